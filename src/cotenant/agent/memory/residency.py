"""Who is on the GPUs: sizes kept current, contents moved before a turn begins, one switch at a time on a GPU.

The broker asks `before_grant`; a turn whose tenant is not all there waits while the switch that the policy planned is
carried out: victims leave and the tenant follows into the room they make, at the same time. What fails leaves contents
where they were; the plan is made again from what is true then.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from cotenant.abi.protocol import MemoryFamily, MessageType, MoveFlag, Status
from cotenant.agent.ipc import wire
from cotenant.agent.memory.backing import HostMemory, widest_gap
from cotenant.agent.memory.moves import Flow, Handover, MoveCount, MoveEnd, MoveState, Orders, moved_well, owner
from cotenant.agent.memory.room import CARD_OVERHEAD_BYTES, Room
from cotenant.policy.residency import GpuResidency, ResidencySettings, Switch

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent
    from cotenant.agent.ipc.session import Session
    from cotenant.agent.tenants.registry import Tenant

RETRY_S = 0.5
MOST_RETRY_S = 10.0
GROWTH = 8
MOVED_BY_PROCESS = ("swap", "managed")


class Residency:
    """Residents of all GPUs of the node."""

    def __init__(self, agent: Agent, host: HostMemory, most_moving: float) -> None:
        self.agent = agent
        self.host = host
        self.orders = Orders(lambda: 4 * agent.config.quota.stuck_ns / 1e9)
        settings = ResidencySettings(most_moving)
        self.gpus = {gpu.uuid: GpuResidency(gpu.memory_bytes, settings) for gpu in agent.gpus}
        for gpu in agent.gpus:
            self.gpus[gpu.uuid].overhead_bytes = 0 if gpu.soft else CARD_OVERHEAD_BYTES
        self.counts: dict[str, MoveCount] = {}
        self.switching: dict[str, Switch] = {}  # GPU -> what is being carried out
        # tenants that hold nothing on any GPU (see parking): bytes they come back with
        self.parked: dict[str, int] = {}
        # set by parking: whole processes, for tenants whose own processes cannot move their memory
        self.park: Callable[[Tenant], Awaitable[str | None]] | None = None
        self.unpark: Callable[[Tenant], Awaitable[str | None]] | None = None
        self._locks = {gpu.uuid: asyncio.Lock() for gpu in agent.gpus}
        self._tasks: set[asyncio.Task[None]] = set()
        self._retries: dict[str, float] = {}
        self._last_move_ns = {gpu.uuid: 0 for gpu in agent.gpus}  # what the last switch there took
        self.refusal = ""  # what the driver said to the last restore, if it said no
        self._mute: set[int] = set()  # processes that did not answer an order
        # tenants that make room right now: a turn would be handed back at once, and asked for again
        self._leaving: dict[str, Counter[str]] = {gpu.uuid: Counter() for gpu in agent.gpus}
        self._short: set[str] = set()  # GPUs whose driver had less than the sums say
        self.maker = Room(self)

    # -- what the broker asks --------------------------------------------------------------------------------------

    def before_grant(self, tenant: Tenant, gpu: str, epoch: int) -> bool:
        """Whether a turn may begin now; if not, what it waits for is under way."""
        if self._leaving[gpu][tenant.name] or self.missing(tenant, gpu):
            self._start(self._bring(tenant, gpu, epoch))
            return False
        residency = self.gpus[gpu]
        residency.used(tenant.name, time.monotonic_ns())
        if not residency.everybody_fits:
            self._be_patient(tenant, gpu)
        return True

    def missing(self, tenant: Tenant, gpu: str) -> bool:
        """Whether some of what the tenant holds is not on its GPU."""
        if tenant.name in self.parked:
            return True
        if tenant.spec.oversubscribe not in MOVED_BY_PROCESS:
            return False
        return any(state.away for _, _, state in self.states(tenant, gpu))

    def _be_patient(self, tenant: Tenant, gpu: str) -> None:
        """An idle holder keeps its turn for as long as it would cost to bring the next one in."""
        others = [o.name for o in self.gpus[gpu].occupants.values() if o.name != tenant.name]
        least_ns = max(self.agent.config.idle_release_ns, self._last_move_ns[gpu])
        patience_ns = max([least_ns, *(self.gpus[gpu].idle_patience_ns(tenant.name, [name]) for name in others)])
        for session in tenant.sessions:
            for slot, attached in session.slots.items():
                if attached == gpu and session.page.slots[slot].idle_release_ns != patience_ns:
                    session.page.slots[slot].idle_release_ns = patience_ns

    async def _bring(self, tenant: Tenant, gpu: str, epoch: int) -> None:
        try:
            async with self._locks[gpu]:
                turn = self.agent.broker.turns.gpus[gpu].turn
                if turn is None or (turn.account.name, turn.epoch) != (tenant.name, epoch):
                    return  # it has been taken back meanwhile
                self._last_move_ns[gpu] = 0  # what others moved before is not this one's to pay for
                fault = await self._switch(tenant, gpu)
        except Exception as error:  # a fault of ours must not keep the GPU from everybody
            fault = f"the agent failed: {error!r}"
        broker = self.agent.broker
        if fault is None:
            self._retries.pop(tenant.name, None)
            floor_ns = self.gpus[gpu].floor_ns(self._last_move_ns[gpu])
            broker.resume_turn(gpu, tenant.name, epoch, floor_ns)
            return
        wait_s = self._retries[tenant.name] = min(MOST_RETRY_S, 2 * self._retries.get(tenant.name, RETRY_S / 2))
        tenant.warn(f"it cannot be brought back to its GPU now: {fault}; its contents are kept, it is tried again")
        self.agent.log(f"tenant {tenant.name}: {fault}; next try in {wait_s:g} s")
        broker.suspend(tenant)
        broker.fail_turn(gpu, tenant.name, epoch)
        asyncio.get_running_loop().call_later(wait_s, self._try_again, tenant)

    def _try_again(self, tenant: Tenant) -> None:
        if self.agent.registry.tenants.get(tenant.name) is tenant and tenant.name not in self.agent.parking:
            self.agent.broker.unsuspend(tenant)

    # -- what processes say ----------------------------------------------------------------------------------------

    def backing(self, session: Session, sequence: int) -> None:
        """MOVE_BACKING: hand out the tenant's host memory."""
        fd, size = self.host.memfd(session.tenant.name)
        config = self.agent.config
        flags = MoveFlag.HAND if config.swap_hand else 0
        terms = {"backing_bytes": size, "piece_bytes": config.swap_piece_bytes, "flags": flags}
        reply = wire.pack(MessageType.MOVE_BACKING_REPLY, terms, sequence=sequence)
        if fd < 0:
            session.send(reply)
        else:
            session.send_with(reply, fd)

    def told(self, session: Session, kind: int, slot: int, sequence: int, status: int, values: dict[str, Any]) -> None:
        """MOVE_STATE, MOVE_PROGRESS and MOVE_DONE."""
        if kind == MessageType.MOVE_PROGRESS:
            self.orders.progress(sequence, values["bytes"])
            return
        session.moves.setdefault(slot, MoveState()).take(values)
        if kind == MessageType.MOVE_DONE:
            self._mute.discard(session.number)
            self.orders.done(sequence, MoveEnd.told(status, values))

    def room(self, session: Session, slot: int, sequence: int, values: dict[str, Any]) -> None:
        """MOVE_ROOM: the driver had no memory for an allocation, or will have none for what must be there now."""
        self._start(self.maker.answer(session, slot, sequence, values["bytes"], values["flags"]))

    async def make_room(self, tenant: Tenant, gpu: str, size: int) -> str | None:
        """Room for `size` bytes more of a tenant, which are among what it is charged already; a sentence when not."""
        async with self._locks[gpu]:
            return await self._switch(tenant, gpu, refused_bytes=size)

    def gone(self, session: Session) -> None:
        """A process has ended; what it held is free."""
        self._mute.discard(session.number)
        self.orders.gone(session)

    def forget(self, tenant: Tenant) -> None:
        """A tenant has gone."""
        for residency in self.gpus.values():
            residency.remove(tenant.name)
        self.parked.pop(tenant.name, None)
        self.counts.pop(tenant.name, None)
        self._retries.pop(tenant.name, None)

    # -- sizes -----------------------------------------------------------------------------------------------------

    def states(self, tenant: Tenant, gpu: str) -> list[tuple[Session, int, MoveState]]:
        found = []
        for session in tenant.sessions:
            for slot, attached in session.slots.items():
                if attached == gpu and slot in session.moves:
                    found.append((session, slot, session.moves[slot]))
        return found

    def refresh(self, gpu: str) -> GpuResidency:
        """Bring the policy's numbers up to date with ledger and processes."""
        residency, ledger = self.gpus[gpu], self.agent.ledger
        tenants = {tenant.name: tenant for tenant in self.agent.registry.on_gpu(gpu)}
        for name in [name for name in residency.occupants if name not in tenants]:
            residency.remove(name)
        for tenant in tenants.values():
            used = ledger.used(tenant.name, gpu) + self.maker.uncharged_bytes(tenant, gpu)
            mode = tenant.spec.oversubscribe
            if tenant.name in self.parked or mode == "park":
                size = max(used, self.parked.get(tenant.name, 0))
                here = 0 if tenant.name in self.parked else size
                began = any(s.page.slots[slot].contexts for s in tenant.sessions for slot in s.slots)
                residency.resize(tenant.name, movable=size, resident=here, can_leave=mode == "park" and began)
                continue
            movable = away = 0
            can_leave = False
            for session, _, state in self.states(tenant, gpu) if mode in MOVED_BY_PROCESS else ():
                held = ledger.held(session.number, gpu, MemoryFamily.PLAIN)
                movable += held
                away += min(state.away, held)
                able = (state.backing > 0 or mode == "managed") and not state.fixed
                can_leave = can_leave or (able and session.number not in self._mute)
            fixed = used - movable
            if mode == "none":  # what it was promised is kept free for it
                fixed = max(fixed, tenant.spec.memory_bytes or 0)
            residency.resize(tenant.name, movable=movable, resident=movable - away, fixed=fixed, can_leave=can_leave)
        return residency

    # -- switching -------------------------------------------------------------------------------------------------

    async def _switch(self, tenant: Tenant, gpu: str, refused_bytes: int = 0) -> str | None:
        """Make the tenant resident (refused_bytes: although the driver had no room). A sentence when it cannot be."""
        broker = self.agent.broker
        self.refusal = ""
        for attempt in range(6):
            residency = self.refresh(gpu)
            line = broker.turns.line(gpu, time.monotonic_ns())
            stay = [t.name for t in self.agent.registry.on_gpu(gpu) if t is not tenant and broker.holds(t, gpu)]
            # a tenant that grows will want more: make room in fewer, larger moves
            more = residency.occupants[tenant.name].movable_bytes // GROWTH if refused_bytes else 0
            plan = residency.switch(tenant.name, more_bytes=more, line=line, stay=stay)
            # the sums say that it fits and the driver that it does not, or they may count what has gone since
            doubtful = (refused_bytes and not plan.out) or (plan.short_bytes and residency.overhead_bytes)
            if attempt == 0 and doubtful:
                await self.maker.learn(gpu, refused_bytes, refused=bool(refused_bytes) and not plan.out)
                plan = residency.switch(tenant.name, line=line, stay=stay)
            if plan.short_bytes and not (refused_bytes and plan.out):
                return self.maker.lack(gpu, plan, stay)
            if not plan.out and (refused_bytes or not plan.in_bytes):
                return None
            if await self._carry_out(plan, tenant, gpu):
                return None
            if self.refusal:
                break  # the driver has said no: asking again would not change that
        return self.refusal or (
            "the moves that would make room for it failed" if plan.out else self.maker.lack(gpu, plan, [])
        )

    async def _carry_out(self, plan: Switch, tenant: Tenant, gpu: str) -> bool:
        """Victims out and the tenant in, at the same time. False: look again, there may be another way now."""
        residency = self.gpus[gpu]
        flow = Flow(residency.free_bytes, self.handover([v.tenant for v in plan.out], tenant))
        self.switching[gpu] = plan
        leaving = Counter(victim.tenant for victim in plan.out)
        self._leaving[gpu] += leaving
        began = time.monotonic()
        try:
            if tenant.name in self.parked:  # the driver restores all at once, into room that is there
                went = await self._all_out(plan, gpu, flow)
                came = went and await self._all_in(tenant, gpu, flow)
            else:
                went, came = await asyncio.gather(self._all_out(plan, gpu, flow), self._all_in(tenant, gpu, flow))
        finally:
            del self.switching[gpu]
            self._leaving[gpu] -= leaving
            if flow.hand is not None:
                flow.hand.close()
        seconds = time.monotonic() - began
        if gpu in self._short:
            self._short.discard(gpu)
            await self.maker.learn(gpu, refused=True)
        if went and came:
            self._last_move_ns[gpu] += int(seconds * 1e9)
            residency.rates.observe(plan.out_bytes, plan.in_bytes, seconds)
            self._count(tenant.name).seconds += seconds
        self.agent.save()  # an agent that comes back counts on
        return went and came

    async def _all_out(self, plan: Switch, gpu: str, flow: Flow) -> bool:
        complete = True
        for victim in plan.out:
            other = self.agent.registry.tenants.get(victim.tenant)
            if other is None:
                flow.freed(victim.size)  # it has gone, and its memory with it
            elif not await self.move_out(other, gpu, victim.size, flow.freed, flow.hand):
                complete = False
                break
        flow.end(complete)
        return complete

    async def move_out(
        self,
        tenant: Tenant,
        gpu: str,
        size: int,
        freed: Callable[[int], None] = lambda size: None,
        hand: Handover | None = None,
    ) -> bool:
        """Move at least `size` bytes of a tenant off its GPU, process by process. It must not have a turn."""
        if tenant.spec.oversubscribe == "park":
            before = self.agent.ledger.used(tenant.name, gpu)
            fault = await self.park(tenant) if self.park is not None else "parking is not available"
            if fault is None:
                freed(before)
            return fault is None
        left = size
        for session, slot, state in self.states(tenant, gpu):
            here = self.agent.ledger.held(session.number, gpu, MemoryFamily.PLAIN) - state.away
            if left <= 0 or here <= 0 or state.fixed:
                continue
            taken = [(s.low, s.high) for _, _, s in self.states(tenant, gpu)]
            base, span = widest_gap(taken, state.backing)
            wanted = min(left, here)
            values = {"bytes": wanted, "base": base, "span_bytes": span}
            end = await self._out_of(session, slot, values, freed, hand.giver if hand else -1)
            left -= here if end is None else end.moved_bytes
            if end is not None:
                self._count(tenant.name).add_out(end)
        return left <= 0

    async def _out_of(
        self, session: Session, slot: int, values: dict[str, int], freed: Callable[[int], None], hand: int
    ) -> MoveEnd | None:
        """What left a process; None: it has ended, so that all of it left."""
        told = 0

        def progress(moved: int) -> None:
            nonlocal told
            freed(moved - told)
            told = moved

        end = await self.orders.give(session, slot, MessageType.MOVE_OUT, values, values["bytes"], progress, hand)
        if end.status is None and session.closed:
            freed(values["bytes"] - told)
            return None
        if end.status is None:
            self._mute.add(session.number)
            session.tenant.warn(f"process {session.peer.pid} does not answer: its memory cannot be moved")
        return end

    async def _all_in(self, tenant: Tenant, gpu: str, flow: Flow) -> bool:
        if tenant.name in self.parked:
            fault = await self.unpark(tenant) if self.unpark is not None else "parking is not available"
            self.refusal = fault or ""
            if fault:
                self._short.add(gpu)
            return fault is None
        complete = True
        for session, slot, state in self.states(tenant, gpu):
            if not state.away:
                continue
            end = await flow.admit(self.orders, session, slot, state.away)
            if end.status == Status.OUT_OF_MEMORY:
                self._short.add(gpu)
            self._count(tenant.name).add_in(end)
            complete = complete and (moved_well(end) or session.closed)
        if flow.hand is not None:
            flow.hand.all_taken()
        return complete

    async def evacuate(self, tenant: Tenant, gpu: str) -> bool:
        """Everything of a tenant off its GPU, when nothing else moves there."""
        async with self._locks[gpu]:
            began = time.monotonic()
            self._leaving[gpu][tenant.name] += 1
            try:
                return await self.all_out(tenant, gpu)
            finally:
                self._leaving[gpu] -= Counter([tenant.name])
                self._count(tenant.name).seconds += time.monotonic() - began

    async def all_out(self, tenant: Tenant, gpu: str, hand: Handover | None = None) -> bool:
        """The same beside other moves."""
        movable = self.refresh(gpu).occupants[tenant.name].resident_bytes
        return not movable or await self.move_out(tenant, gpu, movable, hand=hand)

    async def all_in(self, tenant: Tenant, gpu: str, hand: Handover | None = None) -> bool:
        """Everything of a tenant back, into room that is there."""
        flow = Flow(0, hand)
        flow.end(complete=True)
        return await self._all_in(tenant, gpu, flow)

    def handover(self, leave: list[str], come: Tenant) -> Handover | None:
        """A way for memory from tenants to another one, where that is wanted and all are of one owner."""
        own, tenants = owner(come), [self.agent.registry.tenants.get(name) for name in leave]
        swap = all(t is not None and t.spec.oversubscribe == "swap" and owner(t) == own for t in (*tenants, come))
        return Handover() if tenants and swap and self.agent.config.swap_hand else None

    async def make_free(self, tenant: Tenant, gpu: str) -> str | None:
        """Room on a GPU for all that a tenant holds; a sentence when there is none."""
        async with self._locks[gpu]:
            return await self._switch(tenant, gpu)

    # -- looking ---------------------------------------------------------------------------------------------------

    def _count(self, name: str) -> MoveCount:
        return self.counts.setdefault(name, MoveCount())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.agent.log(f"a move failed: {task.exception()!r}")

    def close(self) -> None:
        """Give up what is under way; contents stay where they are."""
        for task in list(self._tasks):
            task.cancel()
        self.host.close()
