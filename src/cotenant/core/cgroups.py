"""The kernel's control groups (cgroups), version 2: finds a process's group, creates and removes groups, delegates
controllers.

A group is given by the full path of its folder. For the software GPU, cotenant.softgpu.cgroups imitates control groups
in an ordinary folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def version_at(mount: Path = MOUNT) -> int:
    """Return the version of the control groups at a mount point; 0 if this process sees no control groups at it."""
    # a hybrid setup mounts version 2 without controllers; it counts as version 1, because the driver sets no limits in
    # such a setup
    if (mount / "cgroup.controllers").exists():
        return 2
    return 1 if mount.is_dir() and any(entry.is_dir() for entry in mount.iterdir()) else 0


class Cgroups:
    """The tree of control groups of this machine. Methods raise OSError as the kernel's files do."""

    def __init__(self, root: Path = MOUNT, proc: Path = PROC) -> None:
        self.root, self._proc = root, proc
        self.version = version_at(root)

    def of(self, pid: int) -> Path:
        """Return the control group of a process. Raises OSError also if the group is outside the part of the tree that
        this process sees.
        """
        for line in (self._proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
            if line.startswith("0::/") and not line.startswith("0::/.."):
                return self.root / line.removeprefix("0::/").removesuffix(" (deleted)")
        raise OSError(f"the control group of process {pid} is not visible to this process")

    def contains(self, group: Path, pid: int) -> bool:
        """Whether a process is in a group or in one below it; False if the process's group cannot be found."""
        try:
            return self.of(pid).is_relative_to(group)
        except OSError:  # the process has just ended, or is in a part of the tree that this process does not see
            return False

    def groups(self, top: Path) -> Iterator[Path]:
        """Produce a control group and all groups below it."""
        yield top
        with contextlib.suppress(OSError):  # another process has removed the group since it was listed
            for entry in sorted(os.scandir(top), key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    yield from self.groups(Path(entry.path))

    def processes(self, group: Path) -> list[int]:
        """Pids of the processes in a group, without those in groups below it."""
        return [int(text) for text in self.read(group, "cgroup.procs").split()]

    def read(self, group: Path, name: str) -> str:
        """Read a file of a control group."""
        return (group / name).read_text()

    def create(self, group: Path) -> None:
        """Create a control group below an existing one."""
        group.mkdir()

    def delegate(self, group: Path, controller: str) -> None:
        """Enable a controller for the groups below this group. Raises OSError (EBUSY) if the group has processes."""
        if controller not in self.read(group, "cgroup.subtree_control").split():
            (group / "cgroup.subtree_control").write_text(f"+{controller}")

    def enter(self, group: Path, pid: int) -> None:
        """Move a process into a control group; its existing children stay in their groups."""
        (group / "cgroup.procs").write_text(str(pid))

    def quicken(self, pid: int) -> None:
        """Make the next `enter` take microseconds, if it follows within 10 ms. The kernel lets a move of a process wait
        for a grace period of RCU (5 to 16 ms), unless another move has just waited. So this function moves the process
        into the group in which it is.
        """
        self.enter(self.of(pid), pid)

    def remove(self, group: Path) -> None:
        """Remove an empty control group. Raises OSError (EBUSY) if the group has processes."""
        group.rmdir()


def delegate_down(hierarchy: Cgroups, group: Path, controller: str) -> None:
    """Enable a controller for a group in all groups above it. Raises OSError that names the group where it failed."""
    above = [parent for parent in group.parents if parent.is_relative_to(hierarchy.root)]
    for parent in reversed(above):
        hierarchy.delegate(parent, controller)
