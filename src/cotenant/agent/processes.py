"""Facts about processes: peer credentials, start times, ancestry, pidfds.

The kernel reuses pids, so a process is identified by its pid and its start time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# the longest wait for execve, which takes microseconds unless the host is very busy
EXECVE_S = 0.02
# how long a search of all processes reads the list of processes again: a missed process would lose its tenant
SEARCH_S = 1.0
# the indices of env_start and env_end among the fields that `_stat_fields` returns (proc_pid_stat(5) counts them as 50
# and 51)
ENV_START, ENV_END = 47, 48


class ProcessKey(NamedTuple):
    """A process, identified by pid and start time."""

    pid: int
    start_ticks: int


class Peer(NamedTuple):
    """The credentials of the process at the other end of a unix socket, as the kernel reports them. `pid` is 0 if the
    process is not visible in this PID namespace.
    """

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Read the credentials of the process at the other end of a unix socket (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", raw))


def _stat_fields(pid: int, proc: Path = Path("/proc")) -> list[str] | None:
    try:
        line = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # fields are counted after the last parenthesis, because the process's name may contain spaces and parentheses
    return line[line.rfind(")") + 2 :].split()


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (/proc/PID/stat), or None if there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def environment(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """Read the environment with which a process was started, as entries NAME=value.

    While execve loads a program, /proc shows an empty environment. This function then waits until execve has ended, for
    at most EXECVE_S.

    Raises OSError if the environment cannot be read, or if execve has not ended by then.
    """
    file, end = proc / str(pid) / "environ", time.monotonic() + EXECVE_S
    while not (entries := file.read_bytes()):
        if _has_none(pid, proc):
            # _has_none is also true if the process has ended; then the second read raises OSError
            return file.read_bytes().split(b"\0")
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} has been starting its program for {EXECVE_S} s")
        time.sleep(0.0005)
    return entries.split(b"\0")


def _has_none(pid: int, proc: Path) -> bool:
    """Return whether the process's program was started without an environment, or the process has no program, as a
    kernel thread. False while execve loads a program, and also if execve has ended since the environment was read.
    """
    try:
        os.readlink(proc / str(pid) / "exe")
        fields = _stat_fields(pid, proc)
    except OSError:
        return True
    return fields is None or fields[ENV_START] == fields[ENV_END] != "0"


def variable(pid: int, name: str) -> str | None:
    """An environment variable with which a process was started; empty if it was not set, None if the process's
    environment cannot be read.
    """
    try:
        entries = environment(pid)
    except OSError:
        return None
    start = f"{name}=".encode()
    return next((entry[len(start) :].decode(errors="replace") for entry in entries if entry.startswith(start)), "")


def is_zombie(pid: int) -> bool:
    """Return whether the process is a zombie: it has ended, but its parent has not read its exit status yet."""
    fields = _stat_fields(pid)
    return fields is None or fields[0] in "ZX"


def ancestors(pid: int, most: int = 64) -> list[int]:
    """Return the process and its ancestors, nearest first."""
    found: list[int] = []
    while pid > 1 and len(found) < most:
        found.append(pid)
        fields = _stat_fields(pid)
        if not fields:
            break
        pid = int(fields[1])
    return found


def in_group(group: int) -> bool:
    """Whether a process group contains a living process; zombies do not count."""
    for pid in each_process():
        fields = _stat_fields(pid)
        if fields and int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False


def each_process(proc: Path = Path("/proc"), again: set[int] | None = None) -> Iterator[int]:
    """Yield the pids of all processes. A pid that the caller adds to `again` is yielded once more.

    The list of processes is read until it has nothing new, for at most SEARCH_S: a process that has ended before it was
    looked at may have started another one after the list was read, as daemons do.
    """
    again = set() if again is None else again
    seen, end = set[int](), time.monotonic() + SEARCH_S
    while left := again | {int(entry) for entry in os.listdir(proc) if entry.isdigit()} - seen:
        seen |= left
        again.clear()
        yield from sorted(left)
        if time.monotonic() > end:
            break


def descendants(roots: set[ProcessKey]) -> set[ProcessKey]:
    """All living descendants of these processes."""
    children: dict[int, list[ProcessKey]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat_fields(int(entry)) if entry.isdigit() else None
        if fields:
            children.setdefault(int(fields[1]), []).append(ProcessKey(int(entry), int(fields[19])))
    found: set[ProcessKey] = set()
    queue = [key.pid for key in roots]
    while queue:
        for key in children.get(queue.pop(), []):
            if key not in found and key not in roots:
                found.add(key)
                queue.append(key.pid)
    return found


def key_of(pid: int) -> ProcessKey:
    """Key of a process; its start time is 0 if it cannot be read."""
    return ProcessKey(pid, start_ticks(pid) or 0)


def alive(key: ProcessKey) -> bool:
    """Whether this process still runs; a later process with the same pid does not count."""
    return key.pid > 0 and start_ticks(key.pid) == key.start_ticks and not is_zombie(key.pid)


def pidfd(key: ProcessKey) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has ended or cannot be watched."""
    if key.pid <= 0:
        return None
    try:
        fd = os.pidfd_open(key.pid)
    except OSError:
        return None
    if start_ticks(key.pid) != key.start_ticks:
        os.close(fd)
        return None
    return fd


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to the maximum: each process of a tenant needs two descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
