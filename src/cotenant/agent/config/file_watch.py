"""Detects changes of a file that may be replaced while in use."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """Detects that a file was written in place, that it was replaced by a rename, or that a symbolic link to it now
    leads to another file. It compares (device, inode, size, mtime) of the link's target, so it needs no notification
    service and works on network file systems and with Kubernetes' mounted ConfigMaps.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._look()

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def changed(self) -> bool:
        """Whether the file has changed since the last call. A missing file is not a change."""
        now = self._look()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True
