"""Data of a tenant and of its connected processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cotenant.abi.protocol import NO_SLOT, MessageType, MoveFlag, Status
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.page import Page
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.processes import Peer, ProcessKey
from cotenant.agent.tenants.places import Owner
from cotenant.devices.base import Gpu
from cotenant.policy.shares import Share

MAX_UNSENT = 256  # largest number of messages that are buffered for a process that does not read them


class ControlGroup(NamedTuple):
    """The control group with a tenant's memory limit. `made`: the agent has created it and will remove it."""

    path: Path
    made: bool


@dataclass(eq=False)
class Tenant:
    """A tenant: its share and limits, its GPUs, its processes and its warnings."""

    spec: TenantSpec
    gpus: tuple[Gpu, ...]
    token: str
    uid: int
    enforcement: Enforcement
    declared: bool = False
    # setting of a declared tenant that was changed by hand -> the configuration file's value at that time
    by_hand: dict[str, Any] = field(default_factory=dict)
    owner: Owner | None = None  # the pod or job for which the tenant is held
    root: ProcessKey | None = None
    # the program has ended, but processes of its group or with the tenant's token may still run
    left_behind: bool = False
    group: int | None = None
    orphans: frozenset[ProcessKey] = frozenset()
    launching: bool = False  # a launcher has registered the tenant and has not started its program yet
    launcher: ProcessKey | None = None  # that launcher
    created_ns: int = 0
    timeout_s: float | None = None
    sessions: list[Session] = field(default_factory=list)
    # processes that were connected to the previous agent and have not told this one yet what memory they hold
    returning: frozenset[ProcessKey] = frozenset()
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    warning_count: int = 0
    # deviation from the tenant's share, as a sentence -> time in ns at which it began
    not_enforced: dict[str, int] = field(default_factory=dict)
    # UUID of a GPU -> time in ns since when the tenant gets less of it than its request
    short_since: dict[str, int] = field(default_factory=dict)
    launches_gone: int = 0  # sum of the launches of processes that have ended
    waited_gone_ns: int = 0
    held: ControlGroup | None = None  # the control group whose memory is limited by the kernel or the driver
    held_not: str = ""  # why no control group limits the memory, although the kernel or the driver could do that

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.spec.name

    @property
    def pids(self) -> set[int]:
        """Pids of the tenant's connected processes and of its program, since a program connects only when it uses the
        GPU.
        """
        return {s.peer.pid for s in self.sessions} | ({self.root.pid} if self.root else set())

    def slots_on(self, gpu: str) -> list[tuple[Session, int]]:
        """The tenant's processes that use a GPU, each with the GPU's slot in the process's shared page."""
        return [(s, slot) for s in self.sessions for slot, attached in s.slots.items() if attached == gpu]

    def environment(self, *, below: bool) -> dict[str, str]:
        """Environment of a program started now. `below`: the co-location scheme runs best-effort work at lower
        priority; a priority set for the tenant takes precedence.
        """
        lower = below and self.spec.best_effort and self.spec.priority == 0
        return self.enforcement.environment | (self.enforcement.below if lower else {})

    def share(self) -> Share:
        """The tenant's share in the form that the policies for turns and for hardware time slices take."""
        gang = tuple(g.uuid for g in self.gpus) if len(self.gpus) > 1 else ()
        spec = self.spec
        return Share(spec.request, spec.limit, spec.priority, spec.weight, gang)

    def cap_bytes(self, gpu: Gpu) -> int | None:
        """The tenant's memory limit on a GPU. If none is set, it is the GPU's size for swappable tenants, else None."""
        movable = self.spec.oversubscribe != "none"
        return gpu.memory_bytes if self.spec.memory_bytes is None and movable else self.spec.memory_bytes

    @property
    def slot_flags(self) -> int:
        """How the shim treats launches. Those of a tenant whose memory can be moved wait while it is moved."""
        moves = self.spec.oversubscribe != "none"
        return self.enforcement.slot_flags & ~SlotFlag.UNGATED if moves else self.enforcement.slot_flags

    @property
    def kept_bytes(self) -> int | None:
        """Bytes of each GPU that are kept free for the tenant: its memory limit if it is latency-sensitive."""
        return self.spec.memory_bytes if self.spec.latency_sensitive else None

    def warn(self, text: str) -> None:
        """Store a warning, which `cotenant ps`, `cotenant top` and the launcher show."""
        self.warning_count += 1
        if text not in self.warnings:
            self.warnings.append(text)


@dataclass
class MoveState:
    """Where a process's memory of one GPU is, as the process last reported. Sizes in bytes."""

    resident: int = 0
    evicted: int = 0
    staying: int = 0  # memory that is never evicted, because other processes have opened it
    backing: int = 0  # host memory that is available for evicted contents
    pinned: int = 0
    low: int = 0  # evicted contents are within the bytes [low, high) of the tenant's host memory
    high: int = 0
    fixed: bool = False

    def take(self, values: dict[str, Any]) -> None:
        """Apply the process's newest report about its memory."""
        self.resident, self.evicted = values["resident_bytes"], values["away_bytes"]
        self.staying = values["staying_bytes"]
        self.backing, self.pinned = values["backing_bytes"], values["pinned_bytes"]
        self.low, self.high = values["backing_low"], values["backing_high"]
        self.fixed = bool(values["flags"] & MoveFlag.FIXED)


class Session:
    """The connection of one process. `tenant` and `page` are set when its HELLO message has been accepted."""

    tenant: Tenant
    page: Page

    def __init__(self, connection: socket.socket, peer: Peer, number: int, end: Callable[[Session, str], None]) -> None:
        """`end` is called with a reason, which may be empty, when the connection must be closed."""
        self.socket = connection
        self.peer = peer
        self.number = number
        self.process = ProcessKey(peer.pid, 0)
        self.program = ""
        self.welcome = False
        self.stranger = True
        self.closed = False
        self.slots: dict[int, str] = {}  # index of a slot on the shared page -> UUID of the slot's GPU
        self.sms: dict[int, int] = {}  # index of a slot -> number of SMs that the process sees on the slot's GPU
        # slot -> most SMs that the tenant's share allowed when the process connected
        self.sms_given: dict[int, int] = {}
        self.asking: set[int] = set()
        self.moves: dict[int, MoveState] = {}  # slot -> where the process's swappable memory is now
        # slot -> number of the last turn (time slice that the agent grants) that was sent to the process
        self.granted: dict[int, int] = {}
        self.pidfd: int | None = None
        self.passed: list[int] = []  # descriptors that came with the present message
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []

    def send(self, data: bytes, fd: int = -1) -> None:
        """Send a message without blocking. A process that leaves more than 256 messages unread is disconnected.

        `fd` is sent with the message if that is possible now; the message must be usable without it.
        """
        if self.closed:
            return
        if fd >= 0 and not self._unsent:
            with contextlib.suppress(OSError):
                socket.send_fds(self.socket, [data], [fd])
                return
        if self._unsent:
            self._keep(data)
            return
        try:
            self.socket.send(data)
        except BlockingIOError:
            self._keep(data)
            self._loop.add_writer(self.socket, self._send_rest)
        except OSError:
            self._end_soon("")

    def send_with(self, data: bytes, fd: int) -> None:
        """Send a message with a descriptor. A process that does not read its messages is disconnected."""
        try:
            if self._unsent:
                raise BlockingIOError
            socket.send_fds(self.socket, [data], [fd])
        except BlockingIOError:
            self._end_soon("the process requested shared memory but does not read its messages")
        except OSError:
            self._end_soon("")

    def end(self, why: str) -> None:
        """Close the connection to the process."""
        self._end(self, why)

    def _end_soon(self, why: str) -> None:
        self._loop.call_soon(self._end, self, why)

    def _keep(self, data: bytes) -> None:
        self._unsent.append(data)
        if len(self._unsent) > MAX_UNSENT:
            self._end_soon(f"the process left {MAX_UNSENT} messages unread")

    def _send_rest(self) -> None:
        try:
            while self._unsent:
                self.socket.send(self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            return
        except OSError:
            self._end(self, "")
            return
        self._loop.remove_writer(self.socket)

    def fail(self, status: Status, text: str, sequence: int = 0, slot: int = NO_SLOT) -> None:
        """Answer the process's message with an ERROR message."""
        self.send(wire.pack_text(MessageType.ERROR, status, text, sequence=sequence, slot=slot))

    def drop_passed(self) -> None:
        """Close those descriptors received with the last message that no part of the agent has taken over."""
        while self.passed:
            os.close(self.passed.pop())

    def close_fds(self) -> None:
        """Close all descriptors of the connection to the process."""
        self.drop_passed()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.socket.close()
        if self.welcome:
            self.page.release()


def work_kind(spec: TenantSpec) -> str:
    """Return the class of a tenant as text: latency-sensitive, best-effort or neither."""
    return "best-effort" if spec.best_effort else "latency-sensitive" if spec.latency_sensitive else "normal"
