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
        self._seen = self._last = self._look()
        self.gone = False  # the file was missing at both of the last two looks

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def changed(self) -> bool:
        """Whether the file has changed since this method last returned True. A missing file is not a change, but the
        file's return is one, whatever its contents.

        The call that first sees a new state of the file returns False. The next call returns True if the file is still
        in that state. Until then a program that writes the file in place may have written only a part of it; a file
        that was just truncated would be a valid, empty configuration.
        """
        now, last = self._look(), self._last
        self._last, self.gone = now, now is None and last is None
        if self.gone:
            self._seen = None
        if now is None or now == self._seen or now != last:
            return False
        self._seen = now
        return True
