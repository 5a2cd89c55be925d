"""A file that may be replaced while it is in use."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """Notices that a file is another one: written in place, replaced by rename, or behind a swapped symbolic link.

    Looks at (device, inode, size, mtime) of what the path leads to, so it needs no notification service and works on
    network file systems and in Kubernetes' mounted ConfigMaps.
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
        """Whether there is a new file since the last call. A file that has gone is not a change: wait for the next."""
        now = self._look()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True
