"""Imitates control groups (cgroup version 2), with or without the dmem controller, in an ordinary folder. Driver 615
and the kernel limit GPU memory by control group; this module does the kernel's part of that for the software GPU, whose
driver (native/softgpu/limits.c) reads the folder's files.

The environment variable COTENANT_SOFTGPU_CGROUPS names the folder. As in the kernel, other processes see each change
completely or not at all: a file is replaced by a rename, and a lock on the folder is held for changes and searches.
The rules are those of the kernel's manual (Documentation/admin-guide/cgroup-v2.rst, Linux 6.14); where the kernel
returns an error, methods raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from cotenant.core.cgroups import Cgroups

VARIABLE = "COTENANT_SOFTGPU_CGROUPS"
DMEM_FILES = {"dmem.max": "max", "dmem.min": "0", "dmem.low": "0", "dmem.current": "0"}


def region(index: int) -> str:
    """Return the kernel's name for the memory of the software GPU with this index."""
    return f"nvidia/00000000:{index + 1:02X}:00.0/vidmem"


class FolderCgroups(Cgroups):
    """The imitated tree of control groups in a folder. A group is given by the full path of its folder."""

    def __init__(self, root: Path, version: int = 2) -> None:
        self.root, self.version = root, version

    @classmethod
    def make(cls, root: Path, *, dmem: bool, memory_bytes: int, gpus: int = 1, version: int = 2) -> FolderCgroups:
        """Create the tree of control groups of a machine that has just started. `version`: version of its control
        groups, 1 or 2.
        """
        root.mkdir(parents=True)
        (root / "cgroup.procs").write_text("")
        if version == 2:
            (root / "cgroup.controllers").write_text("cpu memory dmem\n" if dmem else "cpu memory\n")
            (root / "cgroup.subtree_control").write_text("")
        if dmem:
            lines = [f"{region(index)} {memory_bytes}\n" for index in range(gpus)]
            (root / "dmem.capacity").write_text("".join(lines))
        return cls(root, version)

    @classmethod
    def found(cls) -> FolderCgroups | None:
        """Return the tree of control groups in the folder that the environment variable names; None if the variable is
        not set.
        """
        folder = os.environ.get(VARIABLE)
        if not folder:
            return None
        return cls(Path(folder), 2 if Path(folder, "cgroup.controllers").exists() else 1)

    # -- looking ---------------------------------------------------------------------------------------------------

    def of(self, pid: int) -> Path:
        """Return the control group of a process: the group that lists the process or its nearest listed ancestor, or
        the root if none does.
        """
        with self._locked(fcntl.LOCK_SH):
            listed = {number: group for group in self.groups(self.root) for number in self._listed(group)}
        while pid > 1:
            if pid in listed:
                return listed[pid]
            pid = _stat(pid)[1]
        return self.root

    def processes(self, group: Path) -> list[int]:
        """Return the living processes that were moved into a group; their children are not listed."""
        return [pid for pid in self._listed(group) if _alive(pid)]

    # -- changing --------------------------------------------------------------------------------------------------

    def create(self, group: Path) -> None:
        """Create a control group below an existing one."""
        with self._locked():
            group.mkdir()
            (group / "cgroup.procs").write_text("")
            (group / "cgroup.controllers").write_text(self.read(group.parent, "cgroup.subtree_control"))
            (group / "cgroup.subtree_control").write_text("")
            self._offer(group)

    def delegate(self, group: Path, controller: str) -> None:
        """Enable a controller for the groups below this group. Raises OSError: ENOENT if the group does not have the
        controller, EBUSY if the group has processes.
        """
        with self._locked():
            if controller not in self.read(group, "cgroup.controllers").split():
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(group / "cgroup.subtree_control"))
            given = self.read(group, "cgroup.subtree_control").split()
            if controller in given:
                return
            if group != self.root and self.processes(group):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group / "cgroup.subtree_control"))
            _replace(group / "cgroup.subtree_control", " ".join([*given, controller]) + "\n")
            for child in (child for child in group.iterdir() if child.is_dir()):
                offered = self.read(child, "cgroup.controllers").split()
                _replace(child / "cgroup.controllers", " ".join([*offered, controller]) + "\n")
                self._offer(child)

    def enter(self, group: Path, pid: int) -> None:
        """Move a process into a control group; its memory stays charged to its old group. Raises OSError: ESRCH if the
        process has ended, EBUSY if the group has enabled controllers and so may have no processes.
        """
        if not _alive(pid):
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH), str(group / "cgroup.procs"))
        with self._locked():
            if group != self.root and self.read(group, "cgroup.subtree_control").split():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group / "cgroup.procs"))
            for other in self.groups(self.root):
                listed = self._listed(other)
                if pid in listed or other == group:
                    rest = [*(number for number in listed if number != pid), *([pid] if other == group else [])]
                    _replace(other / "cgroup.procs", "".join(f"{number}\n" for number in rest))

    def quicken(self, pid: int) -> None:
        """See Cgroups. A move takes no time here, and would list a process that its parent's entry stands for."""

    def remove(self, group: Path) -> None:
        """Remove a control group; what it was charged stays in the sums of the groups above. Raises OSError (EBUSY) if
        it has processes or groups.
        """
        with self._locked():
            if self.processes(group) or any(child.is_dir() for child in group.iterdir()):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group))
            shutil.rmtree(group)

    def write(self, group: Path, name: str, line: str) -> None:
        """Replace the line of a GPU's memory in a file of a group, as other programs with root's rights may do."""
        wanted = line.split()[0]
        with self._locked():
            kept = [old for old in self.read(group, name).splitlines() if old.split()[0] != wanted]
            _replace(group / name, "".join(f"{text}\n" for text in [*kept, line]))

    # --------------------------------------------------------------------------------------------------------------

    def _offer(self, group: Path) -> None:
        if "dmem" not in self.read(group, "cgroup.controllers").split():
            return
        regions = [line.split()[0] for line in self.read(self.root, "dmem.capacity").splitlines()]
        for name, value in DMEM_FILES.items():
            _replace(group / name, "".join(f"{text} {value}\n" for text in regions))

    def _listed(self, group: Path) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return super().processes(group)
        return []

    @contextlib.contextmanager
    def _locked(self, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Context manager that holds the lock on the tree, which the software GPU's driver takes, too."""
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, kind)
            yield
        finally:
            # a child that was forked meanwhile has the descriptor, too, so that closing it would not unlock
            fcntl.flock(folder, fcntl.LOCK_UN)
            os.close(folder)


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically: other processes read the whole old text or the whole new one."""
    fresh = path.with_name(".new")
    fresh.write_text(text)
    fresh.rename(path)


def _stat(pid: int) -> tuple[str, int]:
    """Return the state and the parent of a process; ("X", 0) if there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "X", 0
    fields = line[line.rfind(")") + 2 :].split()
    return fields[0], int(fields[1])


def _alive(pid: int) -> bool:
    return _stat(pid)[0] not in "ZX"


# As a program, this module creates a new tree in a folder, for use outside tests. The variable
# COTENANT_SOFTGPU_CGROUPS can then name that folder.
if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in ("dmem", "misc"):
        sys.exit("usage: python -m cotenant.softgpu.cgroups FOLDER dmem|misc")
    if Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} exists: name a new folder, or remove that one while no agent uses it")
    FolderCgroups.make(Path(sys.argv[1]), dmem=sys.argv[2] == "dmem", memory_bytes=16 << 30, gpus=16)
