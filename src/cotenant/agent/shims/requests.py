"""Handles messages of connected processes: validates them, passes them to the part of the agent concerned, and answers.
"""

from __future__ import annotations

from collections.abc import Callable

from cotenant.abi.protocol import NO_DEADLINE, NO_SLOT, MemoryFamily, MessageType, Status
from cotenant.abi.tenant_page import MAX_GPUS, SlotFlag
from cotenant.agent.config.files import InForce
from cotenant.agent.copies.links import Copies
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.wire import BadMessageError
from cotenant.agent.memory.ledger import HOST, Ledger
from cotenant.agent.memory.pages import MemoryPages
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.residents import Residents
from cotenant.agent.memory.space import SpaceMaker
from cotenant.agent.memory_limits.enforcer import MemoryLimits
from cotenant.agent.slices.enforcer import SliceEnforcer
from cotenant.agent.tenants.host_memory import HostMemory
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.devices.base import uuid_text


class Requests:
    """Handles what a process does after its first message, HELLO: its further messages to the agent, and its end."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        pages: MemoryPages,
        residents: Residents,
        residency: Residency,
        space: SpaceMaker,
        host: HostMemory,
        broker: Broker,
        copies: Copies,
        slices: SliceEnforcer,
        limits: MemoryLimits,
        in_force: InForce,
        warn: Callable[[Tenant, str], None],
    ) -> None:
        self._registry, self._ledger, self._pages, self._residents = registry, ledger, pages, residents
        self._residency, self._space, self._host, self._limits = residency, space, host, limits
        self._broker, self._copies, self._slices, self._in_force, self._warn = broker, copies, slices, in_force, warn

    def came(self, session: Session) -> None:
        """Begin to charge a process that has sent HELLO."""
        self._ledger.join(session.number, session.tenant.name)

    async def limit(self, session: Session) -> None:
        """Limit the control group of a process of a pod or job. Raises InputError if its tenant demands a limit that
        cannot be enforced.
        """
        if not session.closed:
            await self._limits.came(session.tenant, session.peer.pid)

    def gone(self, session: Session) -> None:
        """Free the turns, requests and memory of a process that has ended."""
        self._broker.drop(session)
        self._copies.drop(session)
        self._slices.gone(session)
        self._residency.gone(session)
        for gpu in self._ledger.drop(session.number):
            self._pages.publish(session.tenant, gpu)

    def receive(self, session: Session, head: wire.Head, data: bytes) -> None:
        """Handle one message of a process. Raises BadMessageError, on which the caller must close the connection."""
        handler = _HANDLERS.get(head.type)
        if handler is None:
            raise BadMessageError(Status.BAD_MESSAGE, f"message type {head.type} is not one that a shim sends")
        handler(self, session, head, data)

    def _attach(self, session: Session, head: wire.Head, data: bytes) -> None:
        raw, _total, _free, _ordinal, sms, *_ = wire.body("gpu_attach", data)
        uuid = uuid_text(raw)
        slot = next((s for s, gpu in session.slots.items() if gpu == uuid), None)
        if slot is None:
            mine = {gpu.uuid for gpu in session.tenant.gpus}
            if uuid not in mine:
                known = uuid in self._registry.gpus
                status = Status.DENIED if known else Status.UNKNOWN_GPU
                text = f"{session.program} used {uuid}, which is not among the GPUs of tenant {session.tenant.name}"
                self._warn(session.tenant, text)
                session.send(wire.pack(MessageType.GPU_REPLY, sequence=head.sequence, status=status))
                return
            slot = len(session.slots)
            if slot >= MAX_GPUS:
                session.send(wire.pack(MessageType.GPU_REPLY, sequence=head.sequence, status=Status.TOO_MANY))
                return
            session.slots[slot] = uuid
            self._fill_slot(session, slot, raw)
        if sms:
            session.sms[slot] = sms
            given = session.tenant.enforcement.sms.get(uuid)
            session.sms_given.setdefault(slot, given.at_most if given else 0)
        session.send(wire.pack(MessageType.GPU_REPLY, sequence=head.sequence, slot=slot))

    def _fill_slot(self, session: Session, slot: int, uuid: bytes) -> None:
        """Fill a slot of a process's shared page, for a GPU that the process has just begun to use."""
        tenant, gpu, config = session.tenant, session.slots[slot], self._in_force.config
        page = session.page.slots[slot]
        page.inflight_allowed_ns = config.inflight_ns
        page.idle_release_ns = config.idle_release_ns
        page.drain_timeout_ns = config.quota.stuck_ns
        page.memory_limit_bytes = self._ledger.limit(tenant.name, gpu)
        page.memory_used_bytes = self._ledger.used(tenant.name, gpu)
        page.memory_kept_bytes = self._ledger.not_for(tenant.name, gpu)
        page.memory_withheld_bytes = self._ledger.withheld(tenant.name, gpu)
        page.uuid[:] = list(uuid)
        gate = SlotFlag.BEST_EFFORT if tenant.spec.best_effort else SlotFlag(0)
        gate |= SlotFlag.HOLDS_FLOOR if tenant.spec.latency_sensitive else SlotFlag(0)
        page.flags = SlotFlag.ATTACHED | tenant.slot_flags | gate | self._copies.flag(session, gpu)

    def _gpu(self, session: Session, head: wire.Head) -> str:
        gpu = session.slots.get(head.slot)
        if gpu is None:
            raise BadMessageError(Status.BAD_MESSAGE, f"slot {head.slot} was used before GPU_ATTACH")
        return gpu

    def _request(self, session: Session, head: wire.Head, data: bytes) -> None:
        self._gpu(session, head)
        burst_ns = wire.body("token_request", data)[0]
        # whether the tenant needs turns is read from the agent's own record, because the process could change the flag
        # on the shared page
        if session.tenant.slot_flags & SlotFlag.UNGATED:
            session.send(wire.pack_grant(head.sequence, head.slot, 0, 1, NO_DEADLINE, 0))
            return
        self._broker.request(session, head.slot, min(burst_ns, 1 << 62))

    def _release(self, session: Session, head: wire.Head, data: bytes) -> None:
        self._gpu(session, head)
        values = wire.body("token_release", data)
        epoch, drained_ns, reason, drained, more = values[0], values[4], *values[9:12]
        self._broker.release(session, head.slot, epoch, drained_ns, reason, bool(drained), bool(more))

    def _memory(self, session: Session, head: wire.Head, data: bytes) -> None:
        family, reservation, size, _used, _limit = wire.body("memory", data)
        if not MemoryFamily.PLAIN <= family <= MemoryFamily.HOST and head.type != MessageType.MEMORY_QUERY:
            raise BadMessageError(Status.BAD_MESSAGE, f"memory family {family} is not known")
        if size >> 62:
            raise BadMessageError(Status.BAD_MESSAGE, f"{size} bytes is not an amount of memory")
        host = family == MemoryFamily.HOST or head.slot == NO_SLOT
        gpu = HOST if host else self._gpu(session, head)
        ledger, tenant = self._ledger, session.tenant.name
        number, status = 0, Status.OK
        if family == MemoryFamily.CONTEXT and size == 0 and head.type != MessageType.MEMORY_QUERY:
            # the process does not know the size of a context, so the agent charges (or gives back) the configured size
            size = self._residents.context_reserve_bytes(gpu)
        if head.type == MessageType.MEMORY_RESERVE:
            granted = ledger.reserve(session.number, gpu, family, size)
            if granted is None:
                status = Status.OUT_OF_MEMORY
                self._pages.refused(session.tenant, gpu, size)
            elif not host and self._residents.crowded(session.tenant, gpu, family):
                status = Status.DENIED
            number = granted or 0
        elif head.type == MessageType.MEMORY_COMMIT and reservation == 0:
            # graphs, and pools that the driver grows, allocate without a reservation
            ledger.take(session.number, gpu, family, size)
            if ledger.used(tenant, gpu) > ledger.limit(tenant, gpu):
                self._pages.over(session.tenant, gpu)
        elif head.type == MessageType.MEMORY_COMMIT:
            # if a previous agent made the reservation, it is unknown here; the process's MEMORY_STATE messages then
            # correct the charge
            ledger.commit(session.number, reservation, size)
        elif head.type == MessageType.MEMORY_RELEASE:
            ledger.release(session.number, gpu, family, size)
        elif head.type == MessageType.MEMORY_STATE:
            ledger.state(session.number, gpu, family, size)
            if host:  # the process sends this report after all others
                self._residents.reported(session)
        if head.type in (MessageType.MEMORY_RESERVE, MessageType.MEMORY_QUERY):
            used, limit = ledger.used(tenant, gpu), ledger.limit(tenant, gpu)
            session.send(wire.pack_memory_reply(head.sequence, head.slot, status, family, number, size, used, limit))
        if head.type != MessageType.MEMORY_QUERY and not host:
            self._pages.publish(session.tenant, gpu)

    def _backing(self, session: Session, head: wire.Head, data: bytes) -> None:
        """Send a process the descriptor of the host memory to which its tenant's GPU memory is evicted."""
        fd, size = self._host.memfd(session.tenant.name)
        config = self._in_force.config
        terms = {"backing_bytes": size, "piece_bytes": config.swap_piece_bytes}
        reply = wire.pack(MessageType.MOVE_BACKING_REPLY, terms, sequence=head.sequence)
        if fd < 0:
            session.send(reply)
        else:
            session.send_with(reply, fd)

    def _moved(self, session: Session, head: wire.Head, data: bytes) -> None:
        self._gpu(session, head)
        self._residency.told(session, head.type, head.slot, head.sequence, head.status, wire.fields("move", data))

    def _room(self, session: Session, head: wire.Head, data: bytes) -> None:
        self._gpu(session, head)
        values = wire.fields("move", data)
        self._space.ask(session, head.slot, head.sequence, values["bytes"], values["flags"])

    def _burst(self, session: Session, head: wire.Head, data: bytes) -> None:
        gpu = self._gpu(session, head)
        account = self._broker.turns.gpus[gpu].accounts.get(session.tenant.name)
        if account is not None:
            account.burst_ns = min(wire.body("burst", data)[0], 1 << 62)

    def _attach_copies(self, session: Session, head: wire.Head, data: bytes) -> None:
        given = self._copies.attach(session, self._gpu(session, head))
        if given is None:  # copies are not scheduled any more, or there are too many tenants or processes
            session.send(
                wire.pack(MessageType.COPY_REPLY, sequence=head.sequence, slot=head.slot, status=Status.DENIED)
            )
            return
        fd, terms = given
        reply = wire.pack(MessageType.COPY_REPLY, terms, sequence=head.sequence, slot=head.slot)
        session.send_with(reply, fd)

    def _group(self, session: Session, head: wire.Head, data: bytes) -> None:
        self._slices.group(session, head, data)

    def _note(self, session: Session, head: wire.Head, data: bytes) -> None:
        code, raw = wire.body("text", data)
        text = wire.text_of(raw)
        self._warn(session.tenant, f"{session.program} ({session.peer.pid}): {text} [{code}]")

    def _goodbye(self, session: Session, head: wire.Head, data: bytes) -> None:
        session.end("")


_HANDLERS: dict[int, Callable[[Requests, Session, wire.Head, bytes], None]] = {
    MessageType.GPU_ATTACH: Requests._attach,
    MessageType.TOKEN_REQUEST: Requests._request,
    MessageType.TOKEN_RELEASE: Requests._release,
    MessageType.MEMORY_RESERVE: Requests._memory,
    MessageType.MEMORY_COMMIT: Requests._memory,
    MessageType.MEMORY_RELEASE: Requests._memory,
    MessageType.MEMORY_QUERY: Requests._memory,
    MessageType.MEMORY_STATE: Requests._memory,
    MessageType.BURST_REPORT: Requests._burst,
    MessageType.MOVE_BACKING: Requests._backing,
    MessageType.MOVE_STATE: Requests._moved,
    MessageType.MOVE_PROGRESS: Requests._moved,
    MessageType.MOVE_DONE: Requests._moved,
    MessageType.MOVE_ROOM: Requests._room,
    MessageType.WARNING: Requests._note,
    MessageType.GOODBYE: Requests._goodbye,
    MessageType.COPY_ATTACH: Requests._attach_copies,
    MessageType.CHANNEL_GROUP: Requests._group,
}
