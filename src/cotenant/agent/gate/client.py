"""The floor as a latency-sensitive worker sees it: raise before a batch, lower after it. No system call on either.

floor = join_floor(agent_folder, gpu_uuid)      # or NullFloor()
floor.raise_()                                  # work has arrived
...                                             # the batch runs
floor.lower()                                   # nothing waits any more
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
from typing import Protocol

from cotenant.abi.floor import FLOOR_BYTES, FLOOR_MAGIC, FloorLayout, FloorRole, FloorWordsLayout, WorkClass
from cotenant.abi.protocol import FLOOR_SOCKET, MESSAGE_BYTES
from cotenant.agent.gate import page as floor_page
from cotenant.core.errors import WorkError
from cotenant.devices.base import uuid_bytes

RETRY_S = 0.05
PATIENCE_S = 5.0


class Holder(Protocol):
    """What a worker needs of a floor."""

    def raise_(self, work_class: int = WorkClass.UNKNOWN) -> None:
        """LS work is active from now on; again while it goes on, as a sign of life."""

    def lower(self) -> None:
        """No LS work of this worker is active any more."""

    def others_up(self) -> bool:
        """Whether LS work of somebody else is active."""

    def close(self) -> None:
        """Leave the floor."""


class NullFloor:
    """The floor where nobody is best-effort."""

    def raise_(self, work_class: int = WorkClass.UNKNOWN) -> None:
        """Nothing to tell."""

    def lower(self) -> None:
        """Nothing to tell."""

    def others_up(self) -> bool:
        """Nobody is here."""
        return False

    def close(self) -> None:
        """Nothing to leave."""


class _Mapping:
    """One agent's page, mapped for writing."""

    def __init__(self, connection: socket.socket, fds: list[int], holder: int) -> None:
        self.connection = connection
        try:
            self.memory, words = mmap.mmap(fds[0], FLOOR_BYTES), [mmap.mmap(fd, FLOOR_BYTES) for fd in fds[1:]]
        finally:
            for fd in fds:
                os.close(fd)
        layout = FloorLayout.from_buffer(self.memory)
        if layout.magic != FLOOR_MAGIC:
            raise WorkError("the agent's floor page is not one")
        self.holder = holder
        self.layout = layout
        self.raised, self.raised_ns, self.raises = layout.raised, layout.raised_ns, layout.raises
        # an agent without a second page: what is written there is for nobody
        self.words = FloorWordsLayout.from_buffer(words[0]) if words else FloorWordsLayout()

    def raise_(self, work_class: int) -> None:
        self.show(self.holder, work_class)
        self.raises[self.holder] += 1

    def show(self, holder: int, work_class: int) -> None:
        """That one is active: the time, the class, and then the word that streams wait for."""
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
        raise WorkError(f"no floor at {path}: {error.strerror or error}") from None
    holder = floor_page.holder_of(reply)
    if holder is None or not fds:
        connection.close()
        raise WorkError(f"the agent at {path} did not let this process onto the floor of {uuid}")
    connection.settimeout(None)
    return _Mapping(connection, fds, holder)


class Floor:
    """One LS process on the floor of one GPU. When the agent goes, the page goes on working between those that have it;
    when another agent comes, this joins it, within RETRY_S."""

    def __init__(self, path: Path, uuid: str) -> None:
        self._path, self._uuid = path, uuid
        self._class = 0
        self._closed = False
        self._index_of: dict[int, int] = {}
        self.mapping = _connect(path, uuid)
        self._watcher = threading.Thread(target=self._watch, name="floor", daemon=True)
        self._watcher.start()

    def raise_(self, work_class: int = WorkClass.UNKNOWN) -> None:
        """See Holder. Three stores, the time first."""
        self._class = work_class
        self.mapping.raise_(work_class)

    def raise_for(self, pid: int, work_class: int = WorkClass.UNKNOWN) -> bool:
        """Work is on its way to another LS process of this GPU, which lowers when it is done: BE work in flight can end
        meanwhile. Not counted among its raises. False: that process is not on the floor, or the agent, outside of this
        one's container, knows processes by other numbers."""
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
        """See Holder. Two stores."""
        self._class = 0
        self.mapping.lower()

    def others_up(self) -> bool:
        """See Holder. A holder without a sign of life within the heartbeat timeout does not count."""
        mapping = self.mapping
        mine = mapping.holder
        if not any(bytes(mapping.raised)[:mine]) and not any(bytes(mapping.raised)[mine + 1 :]):
            return False
        now_ns, limit_ns = time.monotonic_ns(), mapping.layout.heartbeat_timeout_ms * 1_000_000
        times = enumerate(zip(mapping.raised, mapping.raised_ns, strict=True))
        return any(up and i != mine and abs(now_ns - at_ns) < limit_ns for i, (up, at_ns) in times)

    @contextlib.contextmanager
    def held(self, work_class: int = WorkClass.UNKNOWN) -> Iterator[None]:
        """Raised inside, lowered after, whatever happens."""
        self.raise_(work_class)
        try:
            yield
        finally:
            self.lower()

    def close(self) -> None:
        """See Holder."""
        self._closed = True
        self.lower()
        with contextlib.suppress(OSError):
            self.mapping.connection.shutdown(socket.SHUT_RDWR)
        self._watcher.join(1.0)
        self.mapping.connection.close()

    def _watch(self) -> None:
        """Notice that the agent has gone, and come back to its successor."""
        while not self._closed:
            with contextlib.suppress(OSError):
                self.mapping.connection.recv(1)
            while not self._closed:
                time.sleep(RETRY_S)
                with contextlib.suppress(WorkError):
                    fresh, stale = _connect(self._path, self._uuid), self.mapping
                    stale.connection.close()
                    self._moved_to(fresh)
                    break

    def _moved_to(self, fresh: _Mapping) -> None:
        """From now on on this page. Not by raise_, which would forget that somebody lowers just now."""
        self.mapping = fresh
        work_class = self._class
        if work_class:
            fresh.raise_(work_class)
            if not self._class:
                self.lower()


def join_floor(folder: Path, uuid: str) -> Floor:
    """Join the floor of a GPU at the agent of `folder`. WorkError when there is none."""
    return Floor(folder / FLOOR_SOCKET, uuid)
