"""The LS gate for a latency-sensitive (LS) worker, at which best-effort launches wait while the worker has work.

The worker sets its LS-activity flag before a batch and clears it after; both are stores to shared memory:

    floor = join_floor(agent_folder, gpu_uuid)  # or NullFloor()
    floor.raise_()                              # set the flag: work has arrived
    ...                                         # the batch runs
    floor.lower()                               # clear the flag: no work is left
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cotenant.abi.floor import FLOOR_BYTES, FLOOR_MAGIC, FloorLayout, FloorRole, FloorWordsLayout, WorkClass
from cotenant.abi.protocol import FLOOR_SOCKET, MESSAGE_BYTES
from cotenant.agent.gate import page as floor_page
from cotenant.core.errors import WorkError
from cotenant.devices.base import uuid_bytes

RETRY_S = 0.05
PATIENCE_S = 5.0


class NullFloor:
    """Stands for the LS gate of a GPU without best-effort tenants; its methods do nothing."""

    def raise_(self, work_class: int = WorkClass.UNKNOWN) -> None:
        """Does nothing."""

    def lower(self) -> None:
        """Does nothing."""

    def others_up(self) -> bool:
        """Always False."""
        return False

    def close(self) -> None:
        """Does nothing."""


class _Mapping:
    """The shared memory of a GPU's LS gate, mapped for writing. The gate page has the LS-activity flags, which
    best-effort processes read. The wait-flag page has copies of them, for which best-effort work waits on the GPU.
    `holder`: index of this worker's flags on both pages.
    """

    def __init__(self, connection: socket.socket, fds: list[int], holder: int) -> None:
        self.connection = connection
        try:
            self.memory, words = mmap.mmap(fds[0], FLOOR_BYTES), [mmap.mmap(fd, FLOOR_BYTES) for fd in fds[1:]]
        finally:
            for fd in fds:
                os.close(fd)
        layout = FloorLayout.from_buffer(self.memory)
        if layout.magic != FLOOR_MAGIC:
            raise WorkError(
                "the shared memory of the LS gate that the agent sent is invalid: the agent and this program must be "
                "of the same release"
            )
        self.holder = holder
        self.layout = layout
        self.raised, self.raised_ns, self.raises = layout.raised, layout.raised_ns, layout.raises
        # if the agent has sent no wait-flag page, this memory, which is not shared, takes the place of that page
        self.words = FloorWordsLayout.from_buffer(words[0]) if words else FloorWordsLayout()

    def raise_(self, work_class: int) -> None:
        self.show(self.holder, work_class)
        self.raises[self.holder] += 1

    def show(self, holder: int, work_class: int) -> None:
        """Mark a worker as active: set the time and class first, then the flag on the wait-flag page."""
        self.raised_ns[holder] = time.monotonic_ns()
        self.raised[holder] = work_class
        self.words.raised[holder] = 1

    def lower(self) -> None:
        self.words.raised[self.holder] = self.raised[self.holder] = 0


def _connect(path: Path, uuid: str) -> _Mapping:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(PATIENCE_S)
    try:
        connection.connect(str(path))
        connection.send(floor_page.pack_join(uuid_bytes(uuid), FloorRole.LATENCY_SENSITIVE, words=True))
        reply, fds, *_ = socket.recv_fds(connection, MESSAGE_BYTES + 1, 1)
        if floor_page.holder_of(reply) is not None and floor_page.words_follow(reply):
            second, more, *_ = socket.recv_fds(connection, MESSAGE_BYTES + 1, 1)
            fds += more if floor_page.is_words(second) else []
    except OSError as error:
        connection.close()
        raise WorkError(f"the agent's LS gate cannot be reached at {path}: {error.strerror or error}") from None
    holder = floor_page.holder_of(reply)
    if holder is None or not fds:
        connection.close()
        raise WorkError(
            f"the agent at {path} did not let this process join the LS gate of GPU {uuid}; see the agent's log"
        )
    connection.settimeout(None)
    return _Mapping(connection, fds, holder)


class Floor:
    """Joins this latency-sensitive process to the LS gate of one GPU. If the agent ends, the gate continues to work
    among the processes that share the gate's memory; the process joins the gate of a new agent within RETRY_S.
    """

    def __init__(self, path: Path, uuid: str) -> None:
        self._path, self._uuid = path, uuid
        self._class = 0
        self._closed = False
        self._index_of: dict[int, int] = {}
        self.mapping = _connect(path, uuid)
        self._watcher = threading.Thread(target=self._watch, name="floor", daemon=True)
        self._watcher.start()

    def raise_(self, work_class: int = WorkClass.UNKNOWN) -> None:
        """Set this process's LS-activity flag; call it again as a heartbeat. It costs three stores to memory."""
        self._class = work_class
        self.mapping.raise_(work_class)

    def raise_for(self, pid: int, work_class: int = WorkClass.UNKNOWN) -> bool:
        """Set the LS-activity flag of another process, to which work is on its way, so that best-effort work can drain
        meanwhile. That process clears the flag when the work is done. Returns False if that process has not joined the
        LS gate, or if the agent runs in another PID namespace and knows the process by another pid.
        """
        mapping = self.mapping
        layout = mapping.layout
        if layout.pid[mapping.holder] != os.getpid():
            return False
        index = self._index_of.get(pid, 0)
        if layout.pid[index] != pid:
            index = next((i for i, there in enumerate(layout.pid) if there == pid), -1)
            if index < 0:
                return False
            self._index_of[pid] = index
        mapping.show(index, work_class)
        return True

    def lower(self) -> None:
        """Clear this process's LS-activity flag. It costs two stores to memory."""
        self._class = 0
        self.mapping.lower()

    def others_up(self) -> bool:
        """Whether another process's LS-activity flag is set. Flags whose heartbeat has expired do not count."""
        mapping = self.mapping
        mine = mapping.holder
        if not any(bytes(mapping.raised)[:mine]) and not any(bytes(mapping.raised)[mine + 1 :]):
            return False
        now_ns, limit_ns = time.monotonic_ns(), mapping.layout.heartbeat_timeout_ms * 1_000_000
        times = enumerate(zip(mapping.raised, mapping.raised_ns, strict=True))
        return any(up and i != mine and abs(now_ns - at_ns) < limit_ns for i, (up, at_ns) in times)

    @contextlib.contextmanager
    def held(self, work_class: int = WorkClass.UNKNOWN) -> Iterator[None]:
        """Context manager for one piece of LS work: sets the LS-activity flag, and clears it at the end."""
        self.raise_(work_class)
        try:
            yield
        finally:
            self.lower()

    def close(self) -> None:
        """Clear the LS-activity flag and leave the LS gate."""
        self._closed = True
        self.lower()
        with contextlib.suppress(OSError):
            self.mapping.connection.shutdown(socket.SHUT_RDWR)
        self._watcher.join(1.0)
        self.mapping.connection.close()

    def _watch(self) -> None:
        """When the agent ends, join the LS gate of the agent started next."""
        while not self._closed:
            with contextlib.suppress(OSError):
                self.mapping.connection.recv(1)
            while not self._closed:
                time.sleep(RETRY_S)
                with contextlib.suppress(WorkError):
                    fresh, stale = _connect(self._path, self._uuid), self.mapping
                    stale.connection.close()
                    self._moved_to(fresh)
                    if self._closed:  # `close` was called meanwhile, and knew only the previous agent's connection
                        fresh.connection.close()
                    break

    def _moved_to(self, fresh: _Mapping) -> None:
        """Use the shared memory of a new agent's LS gate, and set the flag in that memory if it was set before. Another
        thread may call `lower` meanwhile: then the flag is cleared again.
        """
        self.mapping = fresh
        work_class = self._class
        if work_class:
            fresh.raise_(work_class)
            if not self._class:
                self.lower()


Holder = Floor | NullFloor  # an LS gate, for a worker


def join_floor(folder: Path, uuid: str) -> Floor:
    """Join a GPU's LS gate of the agent that runs in `folder`. Raises WorkError if no agent runs there, or if it
    refuses this process.
    """
    return Floor(folder / FLOOR_SOCKET, uuid)
