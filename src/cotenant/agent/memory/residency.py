"""Swaps memory between GPU and host at the beginning of a turn, if the tenant that has the turn has memory on the host.

That is a switch: other tenants, the victims, are evicted, and concurrently the tenant's memory is restored into the
space that they free. The broker pauses the turn until the switch has ended. A GPU does one switch at a time. If a step
fails, memory stays where it is, and the switch is planned again from the actual state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Protocol

from cotenant.abi.protocol import MemoryFamily, MessageType, Status
from cotenant.agent.config.files import InForce
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.residents import LOOK_S, Residents
from cotenant.agent.memory.swap_orders import Flow, HandleTransfer, MoveEnd, SwapOrders, bytes_owner, moved_well
from cotenant.agent.tenants.host_memory import widest_gap
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import MoveState, Session, Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.agent.turns.hold import ENDLESS, RETRY, PausedTurn
from cotenant.policy.residency import Switch

LOG = logging.getLogger(__name__)

RETRY_S, FIRST_RETRY_S = 0.5, 0.05
MOST_RETRY_S = 10.0
GROWTH = 8
ALLOCATED_WITHIN_S = 1.0  # longest time for which an allocation that has begun delays the eviction of its tenant


class Whole(Protocol):
    """Evicts tenants whose own processes cannot swap their memory. Methods return why they failed, or None."""

    async def evict(self, tenant: Tenant) -> str | None:
        """Evict all of a tenant's processes from their GPU."""

    async def bring(self, tenant: Tenant) -> str | None:
        """Restore all of an evicted tenant's processes into space that is already free."""


class Residency:
    """Evicts and restores tenants on all GPUs of the node."""

    def __init__(
        self,
        residents: Residents,
        registry: Registry,
        ledger: Ledger,
        parked: ParkedTable,
        broker: Broker,
        whole: Whole,
        in_force: InForce,
        save: Callable[[], None],
    ) -> None:
        self._residents, self._registry, self._ledger, self._parked = residents, registry, ledger, parked
        self._broker, self._whole, self._in_force, self._save = broker, whole, in_force, save
        self._orders = SwapOrders(lambda: 4 * in_force.config.quota.stuck_ns / 1e9)
        self._locks = {gpu: asyncio.Lock() for gpu in residents.gpus}
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusal = ""  # the driver's error for the last refused restore
        self._short: set[str] = set()  # GPUs whose driver reported less free memory than the accounts of the agent

    # -- turns -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Restore the tenants of paused turns as long as the agent runs."""
        while True:
            self.start(self._bring(await self._broker.paused.get()))

    async def _bring(self, paused: PausedTurn) -> None:
        tenant, gpu, epoch = paused
        residents, broker = self._residents, self._broker
        try:
            async with self._locks[gpu]:
                if not broker.waits(paused):
                    return  # the turn was revoked while this switch waited
                # the time of the GPU's earlier switches must not be charged to this turn
                residents.last_move_ns[gpu] = 0
                fault = await self._switch(tenant, gpu)
        except Exception as error:  # if the agent fails here, the GPU must not wait for the end of this switch for ever
            fault = f"the agent failed: {error!r}"
        if fault is None:
            residents.retry_s.pop(tenant.name, None)
            broker.resume_turn(paused, residents.gpus[gpu].floor_ns(residents.last_move_ns[gpu]))
            return
        # no turn of others ends sooner if a tenant without turns waits, and after a restart of the agent it may have to
        # wait for a moment until a parked tenant has left the GPU again
        first_s = RETRY_S if epoch != ENDLESS else FIRST_RETRY_S
        wait_s = min(MOST_RETRY_S, 2 * residents.retry_s.get(tenant.name, first_s / 2))
        residents.retry_s[tenant.name] = wait_s
        if wait_s >= RETRY_S:
            tenant.warn(
                f"the tenant's memory cannot be restored to its GPU now: {fault}; it is kept, and the agent tries again"
            )
            LOG.warning(f"tenant {tenant.name}: {fault}; next try in {wait_s:g} s")
        broker.suspend(tenant, RETRY)
        broker.fail_turn(gpu, tenant.name, epoch)
        asyncio.get_running_loop().call_later(wait_s, self._try_again, tenant)

    def _try_again(self, tenant: Tenant) -> None:
        if self._registry.tenants.get(tenant.name) is tenant:
            self._broker.unsuspend(tenant, RETRY)

    # -- reports of processes --------------------------------------------------------------------------------------

    def told(self, session: Session, kind: int, slot: int, sequence: int, status: int, values: dict[str, Any]) -> None:
        """Handle a process's message about its memory: MOVE_STATE, MOVE_PROGRESS or MOVE_DONE."""
        if kind == MessageType.MOVE_PROGRESS:
            self._orders.progress(session, sequence, values["bytes"])
            return
        session.moves.setdefault(slot, MoveState()).take(values)
        if kind == MessageType.MOVE_DONE:
            self._residents.mute.discard(session.number)
            self._orders.done(session, sequence, MoveEnd.told(status, values))

    def gone(self, session: Session) -> None:
        """End pending orders to a process that has ended; its memory is free."""
        self._residents.mute.discard(session.number)
        self._residents.busy.discard(session.number)
        self._orders.gone(session)

    # -- switching -------------------------------------------------------------------------------------------------

    async def make_space(
        self,
        tenant: Tenant,
        gpu: str,
        refused_bytes: int = 0,
        leave: Collection[str] = (),
        given_up: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Make space on a GPU for all memory of a tenant. Returns a sentence if that is impossible. `refused_bytes`:
        size of an allocation of the tenant that the driver has refused. `leave`: suspended tenants that are evicted
        first and completely. `given_up`: whether the space is not wanted any more when it could be made.
        """
        async with self._locks[gpu]:
            return None if given_up() else await self._switch(tenant, gpu, refused_bytes, leave)

    async def _switch(
        self, tenant: Tenant, gpu: str, refused_bytes: int = 0, leave: Collection[str] = ()
    ) -> str | None:
        """Restore all of a tenant's memory to its GPU. `refused_bytes`: size of an allocation that the driver has
        refused; `leave`: tenants that are evicted first and completely. Returns a sentence on failure.
        """
        residents, broker = self._residents, self._broker
        self.refusal = ""
        if await residents.all_reported(self._registry.on_gpu(gpu)):
            await residents.learn(gpu)  # so the memory of a process that does not report is not given away
        for attempt in range(6):
            residency = residents.refresh(gpu)
            line = broker.turns.line(gpu, time.monotonic_ns())
            others = [t for t in self._registry.on_gpu(gpu) if t is not tenant and t.name not in leave]
            stay = [t.name for t in others if not self._registry.takes_turns(t) or broker.holds(t, gpu)]
            # a tenant that has just allocated will allocate more, so more space is made than it needs now
            more = residency.occupants[tenant.name].movable_bytes // GROWTH if refused_bytes else 0
            plan = residency.switch(tenant.name, more_bytes=more, line=line, stay=stay, leave=leave)
            # either the driver refused an allocation although the agent's accounts show space, or the accounts may
            # still count memory that is free again
            doubtful = (refused_bytes and not plan.out) or (plan.short_bytes and residency.overhead_bytes)
            if attempt == 0 and doubtful:
                await residents.learn(gpu, refused_bytes, refused=bool(refused_bytes) and not plan.out)
                plan = residency.switch(tenant.name, line=line, stay=stay, leave=leave)
            if plan.short_bytes and not (refused_bytes and plan.out):
                return residents.lack(gpu, plan, stay)
            if not plan.out and (refused_bytes or not plan.in_bytes):
                return None
            if await self._carry_out(plan, tenant, gpu):
                return None
            if self.refusal:
                break  # the driver has refused the restore, so another attempt would be refused, too
        return self.refusal or (
            "other tenants could not be evicted to make space" if plan.out else residents.lack(gpu, plan, [])
        )

    async def _carry_out(self, plan: Switch, tenant: Tenant, gpu: str) -> bool:
        """Evict the tenants that the plan names as victims, and concurrently restore the tenant. Returns False if not
        all memory was moved: then the switch must be planned again.
        """
        residents = self._residents
        residency = residents.gpus[gpu]
        flow = Flow(residency.free_bytes, self.handle_transfer([v.tenant for v in plan.out], tenant))
        residents.switching[gpu] = plan
        leaving = Counter(victim.tenant for victim in plan.out)
        residents.leaving[gpu] += leaving
        began = time.monotonic()
        try:
            if self._parked.checkpointed_bytes(tenant.name) is not None:
                # the driver restores all contents of a checkpoint at once, so the space must be free before it begins
                went = await self._all_out(plan, gpu, flow)
                came = went and await self._all_in(tenant, gpu, flow)
            else:
                went, came = await asyncio.gather(self._all_out(plan, gpu, flow), self._all_in(tenant, gpu, flow))
        finally:
            del residents.switching[gpu]
            residents.leaving[gpu] -= leaving
            if flow.hand is not None:
                flow.hand.close()
        seconds = time.monotonic() - began
        if gpu in self._short:
            self._short.discard(gpu)
            await residents.learn(gpu, refused=True)
        if went and came:
            residents.last_move_ns[gpu] += int(seconds * 1e9)
            residency.rates.observe(plan.out_bytes, plan.in_bytes, seconds)
            residents.count(tenant.name).seconds += seconds
        self._save()  # saved so that a restarted agent continues the counters
        return went and came

    async def _all_out(self, plan: Switch, gpu: str, flow: Flow) -> bool:
        complete = True
        for victim in plan.out:
            other = self._registry.tenants.get(victim.tenant)
            if other is None:
                flow.freed(victim.size)  # the victim has ended, so its memory is free
            elif not await self._move_out(other, gpu, victim.size, flow.freed, flow.hand):
                complete = False
                break
        flow.end(complete)
        return complete

    async def _move_out(
        self,
        tenant: Tenant,
        gpu: str,
        size: int,
        freed: Callable[[int], None] = lambda size: None,
        hand: HandleTransfer | None = None,
    ) -> bool:
        """Evict at least `size` bytes of a tenant, process by process. The tenant must not have a turn."""
        if tenant.spec.oversubscribe == "park":
            before = self._ledger.used(tenant.name, gpu)
            fault = await self._whole.evict(tenant)
            if fault is None:
                freed(before)
            return fault is None
        left = size
        for session, slot, state in self._residents.states(tenant, gpu):
            here = self._ledger.held(session.number, gpu, MemoryFamily.PLAIN) - state.evicted
            if left <= 0 or here <= 0 or state.fixed:
                continue
            taken = [(s.low, s.high) for _, _, s in self._residents.states(tenant, gpu)]
            base, span = widest_gap(taken, state.backing)
            wanted = min(left, here)
            values = {"bytes": wanted, "base": base, "span_bytes": span}
            end = await self._out_of(session, slot, values, freed, hand.giver if hand else -1)
            left -= here if end is None else end.moved_bytes
            if end is not None:
                self._residents.count(tenant.name).add_out(end)
        return left <= 0

    async def _out_of(
        self, session: Session, slot: int, values: dict[str, int], freed: Callable[[int], None], hand: int
    ) -> MoveEnd | None:
        """Order a process to evict memory, and wait for the result; None if the process has ended and so freed all."""
        told = 0

        def progress(moved: int) -> None:
            nonlocal told
            freed(moved - told)
            told = moved

        end = await self._orders.give(session, slot, MessageType.MOVE_OUT, values, values["bytes"], progress, hand)
        self._note_busy(session, end)
        if end.status is None and session.closed:
            freed(values["bytes"] - told)
            return None
        if end.status is None:
            self._residents.mute.add(session.number)
            session.tenant.warn(f"process {session.peer.pid} does not answer: its memory cannot be evicted")
        return end

    async def _all_in(self, tenant: Tenant, gpu: str, flow: Flow) -> bool:
        complete = await self._restore(tenant, gpu, flow)
        if flow.hand is not None:
            flow.hand.all_taken()
        return complete

    async def _restore(self, tenant: Tenant, gpu: str, flow: Flow) -> bool:
        if self._parked.checkpointed_bytes(tenant.name) is not None:
            self.refusal = await self._whole.bring(tenant) or ""
            if self.refusal:
                self._short.add(gpu)
            return not self.refusal
        complete = True
        for session, slot, state in self._residents.states(tenant, gpu):
            if not state.evicted:
                continue
            end = await flow.admit(self._orders, session, slot, state.evicted)
            if end.status == Status.OUT_OF_MEMORY:
                self._short.add(gpu)
            self._residents.count(tenant.name).add_in(end)
            self._note_busy(session, end)
            complete = complete and (moved_well(end) or session.closed)
        return complete

    def _note_busy(self, session: Session, end: MoveEnd) -> None:
        busy = self._residents.busy
        (busy.add if end.status == Status.DENIED else busy.discard)(session.number)

    def is_busy(self, tenant: Tenant) -> bool:
        """Whether a process of a tenant has refused the last order to move memory."""
        return any(session.number in self._residents.busy for session in tenant.sessions)

    async def while_busy(self, tenant: Tenant, attempt: Callable[[], Awaitable[bool]], until_s: float) -> bool:
        """Attempt to move a tenant's memory. If a process refuses, because it is busy, this is tried again until
        `until_s`, a time of the monotonic clock. Returns whether it succeeded.
        """
        while not await attempt():
            if not self.is_busy(tenant) or time.monotonic() > until_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def evacuate(self, tenant: Tenant, gpu: str) -> bool:
        """Evict a tenant completely while no switch is in progress on its GPU."""
        residents = self._residents
        async with self._locks[gpu]:
            began = time.monotonic()
            residents.leaving[gpu][tenant.name] += 1
            try:
                good = await self.all_out(tenant, gpu)
                # what a process was already allocating comes to the GPU a moment later; what it allocates now does not
                while good and residents.allocating(tenant, gpu) and time.monotonic() < began + ALLOCATED_WITHIN_S:
                    await asyncio.sleep(LOOK_S)
                return good and await self.all_out(tenant, gpu)
            finally:
                residents.leaving[gpu] -= Counter([tenant.name])
                residents.count(tenant.name).seconds += time.monotonic() - began

    async def all_out(self, tenant: Tenant, gpu: str, hand: HandleTransfer | None = None) -> bool:
        """Evict a tenant completely, even while other memory of the GPU is being moved."""
        here = self._residents.here_bytes(tenant, gpu)
        if not here or await self._move_out(tenant, gpu, here, hand=hand):
            return True
        return not self._residents.here_bytes(tenant, gpu)  # a process may have ended or freed memory meanwhile

    async def all_in(
        self,
        tenant: Tenant,
        gpu: str,
        hand: HandleTransfer | None = None,
        evicting: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Restore a tenant completely, into space that is free already or that evictions in progress make free.
        `evicting`: whether such evictions are in progress. Until they end, a restore that found no memory is tried
        again, since evictions may be slow.
        """
        flow = Flow(0, hand)
        flow.end(complete=True)
        while evicting() and not await self._restore(tenant, gpu, flow) and gpu in self._short:
            self._short.discard(gpu)
        return await self._all_in(tenant, gpu, flow)

    def handle_transfer(self, leave: list[str], come: Tenant) -> HandleTransfer | None:
        """A transfer of memory handles from evicted tenants to a restored one; None if the setting `swap_hand` is off,
        if a tenant does not have `oversubscribe: swap`, or if the tenants have different owners.
        """
        own, tenants = bytes_owner(come), [self._registry.tenants.get(name) for name in leave]
        swap = all(t is not None and t.spec.oversubscribe == "swap" and bytes_owner(t) == own for t in (*tenants, come))
        return HandleTransfer() if tenants and swap and self._in_force.config.swap_hand else None

    # -- tasks -----------------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that moves tenants' memory, or that waits for space on a GPU; exceptions are logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error(f"moving a tenant's memory failed: {task.exception()!r}")

    def close(self) -> None:
        """Cancel pending switches; memory stays where it is."""
        for task in list(self._tasks):
            task.cancel()
