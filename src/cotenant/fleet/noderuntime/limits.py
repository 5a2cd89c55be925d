"""CPU and memory limits of a job's processes: by cgroup if possible, else by affinity and monitoring. Standard library
only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

V2 = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


class Cgroup:
    """A cgroup below that of this process: of version 2 with the controllers memory and cpu, or of version 1 with
    memory."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder, self.version = folder, version

    def set_memory(self, limit_bytes: int) -> bool:
        """Limit memory, including page cache; returns whether that succeeded."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        return _write(self.folder / name, str(limit_bytes))

    def set_cpus(self, cpus: float) -> None:
        """Limit the CPU time of the cgroup. Does nothing under version 1, where CPU affinity limits it."""
        if self.version == 2:
            _write(self.folder / "cpu.max", f"{max(1000, round(cpus * PERIOD_US))} {PERIOD_US}")

    def enter(self) -> None:
        """Move this process into the cgroup, so that its limits apply to the process and its later children."""
        _write(self.folder / "cgroup.procs", str(os.getpid()))

    def oom_kills(self) -> int:
        """Number of the cgroup's processes that the kernel killed for lack of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):
            for line in (self.folder / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def remove(self) -> None:
        """Remove the cgroup when it is empty."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def make_cgroup(name: str) -> Cgroup | None:
    """Create a cgroup. Returns None if this process may not create one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    places = {line.split(":")[1]: line.split(":", 2)[2] for line in lines if line.count(":") >= 2}
    if "" in places and (V2 / "cgroup.controllers").exists():
        own = V2 / places[""].lstrip("/")
        _write(own / "cgroup.subtree_control", "+memory +cpu")
        group = _made(own / name)
        if group is not None and (group / "memory.max").exists():
            return Cgroup(group, 2)
        if group is not None:
            group.rmdir()
    if "memory" in places:
        group = _made(V2 / "memory" / places["memory"].lstrip("/") / name)
        if group is not None:
            return Cgroup(group, 1)
    return None


def _made(folder: Path) -> Path | None:
    try:
        folder.mkdir()
    except OSError:
        return None
    return folder


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


def children(pid: int) -> list[int]:
    """The child processes of the process `pid`."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def descendants(pid: int) -> list[int]:
    """All descendants of the process `pid`."""
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children(queue.pop())
        found += below
        queue += below
    return found


def own_memory_bytes(pids: list[int]) -> int:
    """Return how much memory these processes use, without pages that they share."""
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as file:
            fields = file.read().split()
            total += (int(fields[1]) - int(fields[2])) * page
    return total


def pin(pids: list[int], cores: list[int]) -> None:
    """Pin every thread of the processes to the cores."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError):
                    os.sched_setaffinity(int(task), cores)
