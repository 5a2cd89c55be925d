"""Simulates turns (time slices) of tenants whose memory is moved between the GPU and the host: a turn begins only when
the policy's moves of memory have been carried out, at given rates.

It uses the same policy objects as the agent: those in policy/shares grant the turns, and those in policy/residency
choose the tenants whose memory is on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cotenant.core.units import format_bytes
from cotenant.policy.residency import GpuResidency, MoveRates, ResidencySettings
from cotenant.policy.shares import Grant, QuotaSettings
from cotenant.sim.shares.engine import Load, TokenEngine, _Tenant


@dataclass(frozen=True)
class Card:
    """The memory of every simulated GPU, and settings of moves between GPU and host. Sizes are in bytes."""

    capacity_bytes: int
    memory: Mapping[str, int]  # tenant -> bytes that it holds; all of them can be moved
    settings: ResidencySettings = field(default_factory=ResidencySettings)


@dataclass(frozen=True)
class Moved:
    """One switch between tenants that moved memory: the tenant whose memory was restored, the bytes moved out and in,
    and its begin and end.
    """

    gpu: str
    tenant: str
    out_bytes: int
    in_bytes: int
    start_ns: int
    end_ns: int


class MovingTokenEngine(TokenEngine):
    """Simulates tenants whose memory together may exceed the GPU's. `moves`: the switches of the run. At the start the
    memory of all tenants is evicted."""

    def __init__(
        self,
        loads: Iterable[Load],
        settings: QuotaSettings,
        card: Card,
        gpus: Iterable[str] = ("0",),
        rates: MoveRates | None = None,
    ) -> None:
        names = tuple(gpus)
        super().__init__(loads, settings, names)
        self.rates = rates or MoveRates()
        self.residency = {gpu: GpuResidency(card.capacity_bytes, card.settings, MoveRates()) for gpu in names}
        self.moves: list[Moved] = []
        self._last_move_ns = dict.fromkeys(names, 0)
        for name, gpu in self._tenants:
            self.residency[gpu].resize(name, movable=card.memory.get(name, 0), resident=0)

    def moving_ns(self, start_ns: int, end_ns: int) -> int:
        """Return the time within [start, end) that moves of memory took."""
        return sum(max(0, min(m.end_ns, end_ns) - max(m.start_ns, start_ns)) for m in self.moves)

    def _may_begin(self, tenant: _Tenant, grant: Grant) -> bool:
        """Whether a tenant's turn begins at the moment when it is granted; it does if all memory of the tenant is on
        the GPU.
        """
        residency, machine = self.residency[grant.gpu], self.broker.gpus[grant.gpu]
        if machine.turn is not None and machine.turn.paused_ns is not None:
            return False
        switch = residency.switch(grant.tenant, line=self.broker.line(grant.gpu, self.now_ns))
        if switch.short_bytes:
            raise ValueError(
                f"the memory of {grant.tenant} does not fit on the GPU: {format_bytes(switch.short_bytes)} are "
                "missing"
            )
        if not switch.in_bytes:
            residency.used(grant.tenant, self.now_ns)
            return True
        machine.pause(grant.tenant, grant.epoch, self.now_ns)
        seconds = self.rates.seconds(switch.out_bytes, switch.in_bytes)
        end_ns = self.now_ns + int(seconds * 1e9)
        moved = Moved(grant.gpu, grant.tenant, switch.out_bytes, switch.in_bytes, self.now_ns, end_ns)
        for victim in switch.out:
            self._place(grant.gpu, victim.tenant, -victim.size)
        self._place(grant.gpu, grant.tenant, switch.in_bytes)
        residency.rates.observe(switch.out_bytes, switch.in_bytes, seconds)
        self._at(end_ns, self._arrived, moved, grant.epoch)
        return False

    def _place(self, gpu: str, name: str, change: int) -> None:
        occupant = self.residency[gpu].occupants[name]
        self.residency[gpu].resize(name, movable=occupant.movable_bytes, resident=occupant.resident_bytes + change)

    def _arrived(self, moved: Moved, epoch: int) -> None:
        self.moves.append(moved)
        self._last_move_ns[moved.gpu] = moved.end_ns - moved.start_ns
        floor_ns = self.residency[moved.gpu].floor_ns(moved.end_ns - moved.start_ns)
        machine = self.broker.gpus[moved.gpu]
        out = machine.resume(moved.tenant, epoch, self.now_ns, floor_ns)
        if out:
            self._obey(out)
        elif moved.tenant in machine.accounts:
            self._obey(self.broker.release(moved.gpu, moved.tenant, epoch, self.now_ns, None, "gone"))

    def _idle_release_ns(self, tenant: _Tenant) -> int:
        """Return how long in ns a tenant that has become idle keeps its turn: as long as moving the next tenant's
        memory in would take.
        """
        residency = self.residency[tenant.gpu]
        least_ns = super()._idle_release_ns(tenant)
        if residency.everybody_fits:
            return least_ns
        others = [name for name in residency.occupants if name != tenant.load.name]
        costs = [residency.idle_patience_ns(tenant.load.name, [name]) for name in others]
        return max(least_ns, self._last_move_ns[tenant.gpu], *costs)
