"""Decides which tenants' memory is resident on one GPU, as a pure state machine: its input is sizes, its output
*switches*, which say which tenants are evicted so that another one can run. A *turn* is a time slice that the agent
grants to a tenant.

Three rules:

1. Only what the next tenant lacks is moved, not everything that its predecessor has: of two tenants of 70 % each, 40 %
   of the GPU's memory is moved at a switch.
2. The tenant that is expected to run last is evicted first: first the tenants that do not wait for a turn, the longest
   unused one first, then the waiting tenants, the last in line first. If more tenants than fit take turns in a fixed
   cycle, the rule evicts the tenant that has just run, which is optimal. To evict the least recently used tenant would
   move every tenant in every cycle.
3. Turns last long enough for their moves: a turn whose tenant took t seconds to restore lasts at least t (1 - f) / f,
   so moves take at most the fraction f of the time, however often turns change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cotenant.policy.residency.rates import MoveRates

SECOND_NS = 1_000_000_000
MARGIN_STEP_BYTES = 128 << 20
MOST_MARGIN_BYTES = 2 << 30


@dataclass(frozen=True)
class ResidencySettings:
    """Settings of swapping on a GPU. `most_moving`: the largest fraction of the time that moves of memory may take
    (0..1).
    """

    most_moving: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 < self.most_moving < 1.0:
            raise ValueError(f"the fraction of time for moving memory must be between 0 and 1, not {self.most_moving}")


@dataclass
class Occupant:
    """One tenant on one GPU, with its memory in bytes: the part that can be moved, how much of it is resident, and the
    part that is never moved.
    """

    name: str
    movable_bytes: int = 0
    resident_bytes: int = 0
    fixed_bytes: int = 0
    can_leave: bool = True
    used_ns: int = 0  # time at which the tenant last had a turn (a time slice of the GPU)

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes must be restored to the GPU before the tenant can run."""
        return self.movable_bytes - self.resident_bytes

    @property
    def leaving_bytes(self) -> int:
        """Return how many bytes of the tenant can be evicted."""
        return self.resident_bytes if self.can_leave else 0


class Victim(NamedTuple):
    """A tenant that is evicted from a GPU in part or completely: `size` bytes of its memory."""

    tenant: str
    size: int


@dataclass(frozen=True)
class Switch:
    """The moves of memory that give `tenant` space for `in_bytes` on the GPU: its evicted memory, without which it
    cannot run, and new allocations. If `short_bytes` is above 0, so much space is missing.
    """

    tenant: str
    in_bytes: int
    out: tuple[Victim, ...] = ()
    short_bytes: int = 0

    @property
    def out_bytes(self) -> int:
        """Return how many bytes the switch moves out of the GPU."""
        return sum(victim.size for victim in self.out)


@dataclass
class GpuResidency:
    """The sizes of the memory of all tenants on one GPU, and decisions about which of it is resident. The caller keeps
    the sizes current and executes the moves.
    """

    capacity_bytes: int
    settings: ResidencySettings = field(default_factory=ResidencySettings)
    rates: MoveRates = field(default_factory=MoveRates)
    occupants: dict[str, Occupant] = field(default_factory=dict)
    # memory on the GPU that no tenant holds and that is not free; learned from the free memory that the driver reports,
    # and from failures to move or allocate memory although the accounts showed enough free memory
    overhead_bytes: int = 0
    # part of overhead_bytes that the driver reports as free but does not allocate; learned from allocations that it
    # refused
    margin_bytes: int = 0

    # -- sizes -----------------------------------------------------------------------------------------------------

    def resize(self, name: str, *, movable: int, resident: int, fixed: int = 0, can_leave: bool = True) -> Occupant:
        """Set how many bytes a tenant holds now."""
        if not 0 <= resident <= movable or fixed < 0:
            raise ValueError(f"{name}: {resident} of {movable} bytes resident, {fixed} fixed")
        occupant = self.occupants.setdefault(name, Occupant(name))
        occupant.movable_bytes, occupant.resident_bytes = movable, resident
        occupant.fixed_bytes, occupant.can_leave = fixed, can_leave
        return occupant

    def remove(self, name: str) -> None:
        """Remove a tenant, whose memory no longer counts."""
        self.occupants.pop(name, None)

    def used(self, name: str, now_ns: int) -> None:
        """Record that the tenant has a turn (a time slice of the GPU) now."""
        if name in self.occupants:
            self.occupants[name].used_ns = now_ns

    @property
    def free_bytes(self) -> int:
        """Return how many bytes of the GPU no account (tenant or overhead) contains; below zero if the accounts exceed
        the GPU's size.
        """
        held = sum(o.resident_bytes + o.fixed_bytes for o in self.occupants.values())
        return self.capacity_bytes - self.overhead_bytes - held

    @property
    def everybody_fits(self) -> bool:
        """Whether the memory of all tenants fits on the GPU at once, so that nothing is ever moved."""
        wanted = sum(o.movable_bytes + o.fixed_bytes for o in self.occupants.values())
        return wanted <= self.capacity_bytes - self.overhead_bytes

    def ran_short(self, short_bytes: int) -> None:
        """Add `short_bytes` to the overhead, the memory that no tenant holds and that is not free. `short_bytes`: by
        how much, at least, the free memory was smaller than the accounts showed.
        """
        self.overhead_bytes = min(self.overhead_bytes + max(0, short_bytes), self.capacity_bytes)

    def driver_says(self, free_bytes: int, not_taken: int = 0) -> None:
        """Update the overhead from the free memory that the driver reports. The overhead is memory that the driver and
        other programs hold, and may change. `not_taken`: bytes that the tenants' accounts contain but no process has
        allocated yet.
        """
        held = sum(o.resident_bytes + o.fixed_bytes for o in self.occupants.values()) - not_taken
        others = max(0, self.capacity_bytes - held - free_bytes)
        self.overhead_bytes = min(others + self.margin_bytes, self.capacity_bytes)

    def need_margin(self) -> None:
        """Called when the driver refused an allocation smaller than its free memory: increases the margin."""
        self.margin_bytes = min(self.margin_bytes + MARGIN_STEP_BYTES, MOST_MARGIN_BYTES)

    # -- decisions -------------------------------------------------------------------------------------------------

    def switch(
        self,
        name: str,
        *,
        more_bytes: int = 0,
        line: Sequence[str] = (),
        stay: Iterable[str] = (),
        leave: Collection[str] = (),
    ) -> Switch:
        """Return the moves of memory that are needed so that the tenant `name` can run, or allocate `more_bytes`.
        `line`: the next tenants, soonest first; `stay`: tenants that cannot be moved now, because they run or still
        have work in flight; `leave`: tenants that are evicted first and completely, even if less space is needed.
        """
        me = self.occupants.get(name) or Occupant(name)
        need = me.missing_bytes + more_bytes
        candidates = self._leaving_order(line, {name, *stay})
        out = [Victim(victim.name, victim.leaving_bytes) for victim in candidates if victim.name in leave]
        lacking = need - self.free_bytes - sum(victim.size for victim in out)
        for victim in candidates:
            if victim.name in leave:
                continue
            if lacking <= 0:
                break
            size = min(victim.leaving_bytes, lacking)
            out.append(Victim(victim.name, size))
            lacking -= size
        return Switch(name, need, tuple(out), max(0, lacking))

    def _leaving_order(self, line: Sequence[str], stay: set[str]) -> list[Occupant]:
        place = {name: index for index, name in enumerate(line)}
        candidates = [o for o in self.occupants.values() if o.leaving_bytes > 0 and o.name not in stay]

        def key(occupant: Occupant) -> tuple[int, int]:
            index = place.get(occupant.name)
            return (0, occupant.used_ns) if index is None else (1, -index)

        return sorted(candidates, key=key)

    def seconds(self, switch: Switch) -> float:
        """Return the estimated duration of a switch between tenants in seconds."""
        return self.rates.seconds(switch.out_bytes, switch.in_bytes)

    def floor_ns(self, moved_ns: int) -> int:
        """Return the minimum length in ns of a turn after moves of memory that took `moved_ns`: moved_ns (1 - f) / f
        with f = `most_moving`; 0 if no tenant has to be moved again.
        """
        if self.everybody_fits:
            return 0
        most = self.settings.most_moving
        return int(moved_ns * (1.0 - most) / most)

    def idle_patience_ns(self, name: str, line: Sequence[str]) -> int:
        """Return how long in ns a tenant that has become idle keeps its turn: as long as the moves of memory for the
        next tenant would take; 0 if the next tenant is resident.

        If the tenant gets work again in this time, the moves are saved. If not, the time lost by waiting is no longer
        than the moves themselves (as in the rent-or-buy problem).
        """
        for challenger in line:
            if challenger != name:
                switch = self.switch(challenger, line=line)
                there = not switch.in_bytes and not switch.out
                return 0 if there else int(self.seconds(switch) * SECOND_NS)
        return 0
