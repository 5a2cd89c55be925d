"""Imitates a cgroup2 hierarchy, with or without the dmem controller, in a folder: the kernel's part of memory limits on
a machine with driver 615. The software GPU's driver (native/softgpu/limits.c) reads the same files.

COTENANT_SOFTGPU_CGROUPS names the folder. Rules and texts are from the manual (Documentation/admin-guide/cgroup-v2.rst
of Linux 6.14); calls fail as the kernel's files do, with an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "COTENANT_SOFTGPU_CGROUPS"
DMEM_FILES = {"dmem.max": "max", "dmem.min": "0", "dmem.low": "0", "dmem.current": "0"}


def region(index: int) -> str:
    """The kernel's name for the memory of a GPU."""
    return f"nvidia/00000000:{index + 1:02X}:00.0/vidmem"


class FolderCgroups:
    """The hierarchy in a folder. Groups are folders by their full path, as the driver takes them."""

    version = 2

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def make(cls, root: Path, *, dmem: bool, memory_bytes: int, gpus: int = 1, version: int = 2) -> FolderCgroups:
        """Create the hierarchy of a machine that has just started. `version` 1: old control groups."""
        root.mkdir(parents=True)
        (root / "cgroup.procs").write_text("")
        if version == 2:
            (root / "cgroup.controllers").write_text("cpu memory dmem\n" if dmem else "cpu memory\n")
            (root / "cgroup.subtree_control").write_text("")
        if dmem:
            lines = [f"{region(index)} {memory_bytes}\n" for index in range(gpus)]
            (root / "dmem.capacity").write_text("".join(lines))
        found = cls(root)
        found.version = version
        return found

    @classmethod
    def found(cls) -> FolderCgroups | None:
        """The hierarchy that the environment names."""
        folder = os.environ.get(VARIABLE)
        if not folder:
            return None
        hierarchy = cls(Path(folder))
        hierarchy.version = 2 if (hierarchy.root / "cgroup.controllers").exists() else 1
        return hierarchy

    # -- looking ---------------------------------------------------------------------------------------------------

    def of(self, pid: int) -> Path:
        """The group of a process: where it is listed, else the group of its nearest listed ancestor, else the root."""
        listed = {number: group for group in self.groups(self.root) for number in self._listed(group)}
        while pid > 1:
            if pid in listed:
                return listed[pid]
            pid = _stat(pid)[1]
        return self.root

    def groups(self, top: Path) -> Iterator[Path]:
        """A group and all below it."""
        yield top
        try:
            below = sorted(child for child in top.iterdir() if child.is_dir())
        except FileNotFoundError:  # removed meanwhile
            return
        for child in below:
            yield from self.groups(child)

    def processes(self, group: Path) -> list[int]:
        """Living processes that were put into a group (their children are not listed here)."""
        return [pid for pid in self._listed(group) if _alive(pid)]

    def read(self, group: Path, name: str) -> str:
        """A file of a group."""
        return (group / name).read_text()

    # -- changing --------------------------------------------------------------------------------------------------

    def create(self, group: Path) -> None:
        """Create a group below an existing one."""
        group.mkdir()
        (group / "cgroup.procs").write_text("")
        (group / "cgroup.controllers").write_text(self.read(group.parent, "cgroup.subtree_control"))
        (group / "cgroup.subtree_control").write_text("")
        self._offer(group)

    def delegate(self, group: Path, controller: str) -> None:
        """Enable a controller for the groups below this one. ENOENT if it is not available here, EBUSY if processes are
        in it.
        """
        if controller not in self.read(group, "cgroup.controllers").split():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(group / "cgroup.subtree_control"))
        given = self.read(group, "cgroup.subtree_control").split()
        if controller in given:
            return
        if group != self.root and self.processes(group):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group / "cgroup.subtree_control"))
        (group / "cgroup.subtree_control").write_text(" ".join([*given, controller]) + "\n")
        for child in (child for child in group.iterdir() if child.is_dir()):
            offered = self.read(child, "cgroup.controllers").split()
            (child / "cgroup.controllers").write_text(" ".join([*offered, controller]) + "\n")
            self._offer(child)

    def enter(self, group: Path, pid: int) -> None:
        """Move a process; its memory stays charged to the old group. EBUSY if the group may contain only groups."""
        if not _alive(pid):
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH), str(group / "cgroup.procs"))
        if group != self.root and self.read(group, "cgroup.subtree_control").split():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group / "cgroup.procs"))
        for other in self.groups(self.root):
            listed = self._listed(other)
            if pid in listed or other == group:
                rest = [*(number for number in listed if number != pid), *([pid] if other == group else [])]
                fresh = other / ".procs"
                fresh.write_text("".join(f"{number}\n" for number in rest))
                fresh.rename(other / "cgroup.procs")

    def remove(self, group: Path) -> None:
        """Remove a group. EBUSY while processes or groups are in it. Its charges stay in its ancestors' sums."""
        if self.processes(group) or any(child.is_dir() for child in group.iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group))
        shutil.rmtree(group)

    def write(self, group: Path, name: str, line: str) -> None:
        """Change the line of a region, to test what root in a container or another program of the node may do."""
        wanted = line.split()[0]
        kept = [old for old in self.read(group, name).splitlines() if old.split()[0] != wanted]
        (group / name).write_text("".join(f"{text}\n" for text in [*kept, line]))

    # --------------------------------------------------------------------------------------------------------------

    def _offer(self, group: Path) -> None:
        if "dmem" not in self.read(group, "cgroup.controllers").split():
            return
        regions = [line.split()[0] for line in self.read(self.root, "dmem.capacity").splitlines()]
        for name, value in DMEM_FILES.items():
            (group / name).write_text("".join(f"{text} {value}\n" for text in regions))

    def _listed(self, group: Path) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(text) for text in self.read(group, "cgroup.procs").split()]
        return []


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process; ("X", 0) when there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "X", 0
    fields = line[line.rfind(")") + 2 :].split()
    return fields[0], int(fields[1])


def _alive(pid: int) -> bool:
    return _stat(pid)[0] not in "ZX"


if __name__ == "__main__":  # FOLDER dmem|misc: for people who try it; the agent's environment then names the folder
    FolderCgroups.make(Path(sys.argv[1]), dmem=sys.argv[2] == "dmem", memory_bytes=16 << 30, gpus=16)
