"""Knows how much of each tenant's memory is on its GPU, and so whether the tenant's turn may begin."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from cotenant.abi.protocol import MemoryFamily
from cotenant.agent import processes
from cotenant.agent.config.files import InForce
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.swap_orders import MoveCount
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import MoveState, Session, Tenant
from cotenant.devices.registry import device_of
from cotenant.policy.residency import GpuResidency, ResidencySettings, Switch

CONTEXT_BYTES = 256 << 20  # estimated size of a context if no memory is charged for it
MOVED_BY_PROCESS = ("swap", "managed")
REPORTED_WITHIN_S = 10.0  # how long a restarted agent waits for the processes that were connected to its predecessor
LOOK_S = 0.01


class Residents:
    """Where the memory of the tenants of all GPUs is: on the GPU, or evicted to host memory."""

    def __init__(self, registry: Registry, ledger: Ledger, parked: ParkedTable, in_force: InForce) -> None:
        self._registry, self._ledger, self._parked, self._in_force = registry, ledger, parked, in_force
        settings = ResidencySettings(in_force.config.most_moving)
        self.gpus = {uuid: GpuResidency(gpu.memory_bytes, settings) for uuid, gpu in registry.gpus.items()}
        for uuid, gpu in registry.gpus.items():
            self.gpus[uuid].overhead_bytes = device_of(gpu).overhead_bytes
        self.counts: dict[str, MoveCount] = {}
        # UUID of a GPU -> the switch of memory between tenants that is in progress
        self.switching: dict[str, Switch] = {}
        self.last_move_ns = dict.fromkeys(self.gpus, 0)  # UUID of a GPU -> duration of its last switch of memory
        # UUID of a GPU -> for each tenant, how many evictions of it are in progress. A tenant that is being evicted
        # gets no turn: its processes return a turn at once if their memory is not on the GPU, and request another one.
        self.leaving: dict[str, Counter[str]] = {uuid: Counter() for uuid in self.gpus}
        self.mute: set[int] = set()  # connections (by number) whose process did not answer an order
        # connections whose process refused the last order to move memory, because its GPU work has not ended or it is
        # moving memory itself, as after a restart of the agent
        self.busy: set[int] = set()
        # name of a tenant that could not be restored -> time until the next attempt to restore it
        self.retry_s: dict[str, float] = {}
        self._reported_by_s = 0.0

    # -- after a restart of the agent ------------------------------------------------------------------------------

    def expect(self, tenant: Tenant, connected: Collection[ProcessKey]) -> None:
        """Record which processes of a tenant were connected to the previous agent: until they have reported it to this
        agent, the memory that they hold is unknown.
        """
        tenant.returning = frozenset(connected)
        self._reported_by_s = time.monotonic() + REPORTED_WITHIN_S

    def reported(self, session: Session) -> None:
        """Called when a process has reported all memory that it holds."""
        session.tenant.returning -= {session.process}

    def unreported(self, tenants: Iterable[Tenant]) -> list[ProcessKey]:
        """The living processes of tenants that were connected to the previous agent and have not reported yet."""
        found = []
        for tenant in tenants:
            tenant.returning = frozenset(key for key in tenant.returning if processes.alive(key))
            found += sorted(tenant.returning)
        return found

    async def all_reported(self, tenants: Iterable[Tenant]) -> str | None:
        """Wait until all memory that these tenants' processes hold is known. Returns a sentence if it is not known
        REPORTED_WITHIN_S after the agent's start.
        """
        tenants = list(tenants)
        while missing := self.unreported(tenants):
            if time.monotonic() > self._reported_by_s:
                return f"process {missing[0].pid} has not connected again since the agent was restarted"
            await asyncio.sleep(LOOK_S)
        return None

    # -- turns -----------------------------------------------------------------------------------------------------

    def ready(self, tenant: Tenant, gpu: str) -> bool:
        """Whether a tenant's turn may begin: all its memory is on its GPU and is not being evicted."""
        if self.leaving[gpu][tenant.name] or self.missing(tenant, gpu):
            return False
        self.gpus[gpu].used(tenant.name, time.monotonic_ns())
        return True

    def missing(self, tenant: Tenant, gpu: str) -> bool:
        """Return whether some of the tenant's memory is not on its GPU."""
        if self._parked.checkpointed_bytes(tenant.name) is not None:
            return True
        if tenant.spec.oversubscribe not in MOVED_BY_PROCESS:
            return False
        return any(state.evicted for _, _, state in self.states(tenant, gpu))

    def patience_ns(self, tenant: Tenant, gpu: str) -> int:
        """How long an idle tenant keeps its turn: as long as the setting `idle_release` says; if tenants must be
        swapped, at least as long as restoring the next tenant takes.
        """
        residency, least_ns = self.gpus[gpu], self._in_force.config.idle_release_ns
        if residency.everybody_fits:
            return least_ns
        others = [o.name for o in residency.occupants.values() if o.name != tenant.name]
        costs = [residency.idle_patience_ns(tenant.name, [name]) for name in others]
        return max(least_ns, self.last_move_ns[gpu], *costs)

    # -- sizes -----------------------------------------------------------------------------------------------------

    def states(self, tenant: Tenant, gpu: str) -> list[tuple[Session, int, MoveState]]:
        """Return where the memory of each of a tenant's processes is (on the GPU or evicted), as the process last
        reported it.
        """
        return [(s, slot, s.moves[slot]) for s, slot in tenant.slots_on(gpu) if slot in s.moves]

    def refresh(self, gpu: str) -> GpuResidency:
        """Update the residency policy's view of a GPU from the ledger and the processes' reports: each tenant's
        swappable bytes, how many of them are on the GPU, and whether the tenant can be evicted.
        """
        residency = self.gpus[gpu]
        tenants = {tenant.name: tenant for tenant in self._registry.on_gpu(gpu)}
        for name in [name for name in residency.occupants if name not in tenants]:
            residency.remove(name)
        for tenant in tenants.values():
            used = self._ledger.used(tenant.name, gpu) + self._uncharged_bytes(tenant, gpu)
            mode, parked_bytes = tenant.spec.oversubscribe, self._parked.checkpointed_bytes(tenant.name)
            if parked_bytes is not None or mode == "park":
                size = max(used, parked_bytes or 0)
                here = size if parked_bytes is None else 0
                began = any(s.page.slots[slot].contexts for s in tenant.sessions for slot in s.slots)
                residency.resize(tenant.name, movable=size, resident=here, can_leave=mode == "park" and began)
                continue
            movable = evicted = 0
            can_leave = False
            for session, _, state in self.states(tenant, gpu) if mode in MOVED_BY_PROCESS else ():
                held = max(0, self._ledger.held(session.number, gpu, MemoryFamily.PLAIN) - state.staying)
                movable += held
                evicted += min(state.evicted, held)
                able = (state.backing > 0 or mode == "managed") and not state.fixed
                can_leave = can_leave or (able and session.number not in self.mute)
            fixed = used - movable
            if mode == "none":  # memory of a tenant that cannot be swapped is reserved up to the tenant's limit
                fixed = max(fixed, tenant.spec.memory_bytes or 0)
            residency.resize(tenant.name, movable=movable, resident=movable - evicted, fixed=fixed, can_leave=can_leave)
        return residency

    def context_reserve_bytes(self, gpu: str) -> int:
        """Bytes charged for a CUDA context of unknown size."""
        reserve = self._in_force.config.context_reserve_bytes
        if reserve is not None:
            return reserve
        entry = self._registry.gpus.get(gpu)
        return 0 if entry is None else device_of(entry).context_bytes

    def _uncharged_bytes(self, tenant: Tenant, gpu: str) -> int:
        """Estimated memory of a tenant's CUDA contexts for which the ledger has no charge. By default the ledger has
        none for any context on the software GPU.
        """
        made = [s for s, slot in tenant.slots_on(gpu) if s.page.slots[slot].contexts]
        return CONTEXT_BYTES * sum(not self._ledger.held(s.number, gpu, MemoryFamily.CONTEXT) for s in made)

    async def learn(self, gpu: str, not_taken: int = 0, *, refused: bool = False) -> None:
        """Query the driver's free memory, and derive how much of the GPU's memory no tenant holds. `not_taken`: bytes
        that are charged but were not allocated. `refused`: the driver refused an allocation for which the accounts show
        enough memory.
        """
        residency, device = self.gpus[gpu], device_of(self._registry.gpus[gpu])
        free = await asyncio.get_running_loop().run_in_executor(None, device.free_bytes, gpu)
        self.refresh(gpu)
        wanted = not_taken or self._in_force.config.swap_piece_bytes
        if free is None:
            residency.ran_short(wanted)
            return
        if refused and not device.free_is_usable and free >= wanted:
            residency.need_margin()  # some GPUs refuse to allocate the last part of the memory that they report as free
        residency.driver_says(free, not_taken)

    # -- space -----------------------------------------------------------------------------------------------------

    def crowded(self, tenant: Tenant, gpu: str, family: int) -> bool:
        """Whether a tenant's new reservation does not fit on the GPU without evicting other tenants, or the tenant is
        parked or being evicted. `family`: kind of the memory.
        """
        moves = family == MemoryFamily.PLAIN and tenant.spec.oversubscribe in MOVED_BY_PROCESS
        anybody = any(other.spec.oversubscribe != "none" for other in self._registry.on_gpu(gpu))
        at_once = (family == MemoryFamily.CONTEXT and anybody) or (tenant.spec.oversubscribe != "none" and not moves)
        if moves and self.goes(tenant, gpu):
            return True  # the memory that parking frees must not be taken by the parked tenant itself
        if not (at_once or moves):
            return False
        # the process then sends MOVE_ROOM, which is answered when the memory of all processes is known
        unknown = time.monotonic() <= self._reported_by_s and self.unreported(self._registry.on_gpu(gpu))
        return bool(unknown) or self.refresh(gpu).free_bytes < 0

    def goes(self, tenant: Tenant, gpu: str) -> bool:
        """Whether a tenant is parked or is being evicted, so that it gets no memory of the GPU now."""
        return tenant.name in self._parked or self.leaving[gpu][tenant.name] > 0

    def here_bytes(self, tenant: Tenant, gpu: str) -> int:
        """Bytes of a tenant on a GPU that can be evicted."""
        # there is no entry for a tenant that has ended meanwhile
        occupant = self.refresh(gpu).occupants.get(tenant.name)
        return occupant.resident_bytes if occupant is not None else 0

    def allocating(self, tenant: Tenant, gpu: str) -> bool:
        """Whether a process of a tenant has reserved memory that can be evicted, and has not allocated it yet."""
        return self._ledger.asked(tenant.name, gpu, MemoryFamily.PLAIN) > 0

    def could_fit(self, tenant: Tenant, gpu: str) -> bool:
        """Whether the tenant would fit on the GPU if all other swappable tenants were evicted."""
        residency = self.refresh(gpu)
        staying = self._ledger.used(tenant.name, gpu)
        for other in self._registry.on_gpu(gpu, without=tenant.name):
            occupant = residency.occupants[other.name]
            if other.spec.oversubscribe == "park" and occupant.can_leave:
                continue
            starting = not any(state for session in other.sessions for state in session.moves.values())
            # a parked tenant may have memory here that it has restored while no agent ran, and that is evicted again
            goes = self._registry.takes_turns(other) or other.name in self._parked
            movable = other.spec.oversubscribe != "none" and goes
            leaves = movable and (occupant.can_leave or starting)
            staying += occupant.fixed_bytes + (0 if leaves else occupant.resident_bytes)
            # memory that another tenant has reserved but not allocated yet is not counted, since that tenant can wait
            if leaves:
                staying -= self._ledger.asked(other.name, gpu, MemoryFamily.PLAIN)
        return staying <= residency.capacity_bytes - residency.overhead_bytes

    def lack(self, gpu: str, plan: Switch, stay: list[str]) -> str:
        """A sentence that says why there is no space. `stay`: tenants that have a turn and cannot be evicted now."""
        why = f"while {', '.join(stay)} still runs" if stay else "and nothing else on the GPU can be moved away"
        if not plan.short_bytes:
            return "the driver has not enough free memory"
        known = device_of(self._registry.gpus[gpu]).overhead_bytes
        strangers = self.gpus[gpu].overhead_bytes - known
        others = f"; programs of no tenant use {strangers / 2**20:.0f} MiB of the GPU" if strangers > 64 << 20 else ""
        return f"{plan.short_bytes / 2**20:.0f} MiB are missing, {why}{others}"

    # -- counters and display --------------------------------------------------------------------------------------

    def count(self, name: str) -> MoveCount:
        """Counters of a tenant's evictions and restores, which the caller may increase."""
        return self.counts.setdefault(name, MoveCount())

    def row(self, tenant: Tenant, gpu: str) -> dict[str, Any] | None:
        """How much of a tenant's memory is on a GPU and how much was swapped, for display; None for a tenant that is
        never swapped.
        """
        moved = self._parked.checkpointed_bytes(tenant.name) is not None or tenant.name in self.counts
        if tenant.spec.oversubscribe == "none" and not moved:
            return None
        occupant = self.refresh(gpu).occupants.get(tenant.name)
        plan = self.switching.get(gpu)
        count = self.counts.get(tenant.name, MoveCount())
        return {
            "movable_bytes": occupant.movable_bytes if occupant else 0,
            "resident_bytes": occupant.resident_bytes if occupant else 0,
            "pinned_bytes": max((state.pinned for _, _, state in self.states(tenant, gpu)), default=0),
            "can_leave": bool(occupant and occupant.can_leave),
            "moving": plan is not None and tenant.name in {plan.tenant, *(victim.tenant for victim in plan.out)},
            "moves_out": count.moves_out,
            "moves_in": count.moves_in,
            "moved_out_bytes": count.out_bytes,
            "moved_in_bytes": count.in_bytes,
            "moving_s": count.seconds,
            "handed_over_bytes": count.handed_bytes,
        }

    def forget(self, name: str) -> None:
        """Remove what is kept here about a tenant that was removed."""
        for residency in self.gpus.values():
            residency.remove(name)
        self.counts.pop(name, None)
        self.retry_s.pop(name, None)
