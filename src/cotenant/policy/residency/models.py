"""Decides which models are resident on GPUs that cannot hold all of them: a pure state machine; times are seconds.

Its input is requests and results of actions (`arrived`, `began`, `ended`, `settled`, `failed`, `died`). `decide`
returns actions that start a model's program, evict it to host memory, restore it, or stop it. If models have to be
evicted for one that is restored, one action does both at the same time (an exchange), since copies to and from the GPU
do not slow each other down much. Rules:

1. Waiting models are served by rank (class, then priority), then by the time at which their first request is late.
2. A model is not evicted while its program serves a request. An idle model is evicted for a waiting one of equal or
   higher rank when it has been idle for as long as restoring it takes (at most `most_patience_s`), so waiting takes no
   longer than the move that it may save. It is evicted for a waiting model of lower rank after `idle_s`.
3. Of the idle models, those of the lowest rank are evicted first, then those with the smallest expected cost: seconds
   to restore / seconds idle, since the longer a model has been idle, the less likely is a request for it soon.
4. A busy model is evicted for a waiting one of higher rank, and for one of equal rank when it has been resident for
   `back (1 - f) / f` seconds. `back` is the time to restore it and f is `most_moving`, so moves take at most the
   fraction f of the time. The busy model first gets no more requests ("draining"); it is evicted when those that it
   has are done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cotenant.policy.residency.model_rows import (
    IN_HOST,
    Action,
    Do,
    ModelFacts,
    ModelRow,
    ModelSettings,
    Place,
    Plan,
)  # fmt: skip
from cotenant.policy.residency.rates import MoveRates

BLEND = 0.3  # weight of a new measurement in the running average of a duration


class ModelResidency:
    """All models of one server on its GPUs. `host_bytes`: host memory for evicted models; None: unlimited; 0: programs
    cannot be moved, so they are stopped instead.
    """

    def __init__(
        self,
        gpu_bytes: Sequence[int],
        models: Iterable[ModelFacts],
        settings: ModelSettings | None = None,
        host_bytes: int | None = None,
        rates: MoveRates | None = None,
    ) -> None:
        self.gpu_bytes, self.host_bytes = list(gpu_bytes), host_bytes
        self.settings, self.rates = settings or ModelSettings(), rates or MoveRates()
        self.rows = {facts.name: ModelRow(facts, start_s=facts.start_s) for facts in models}
        self.wake_s = math.inf  # time at which `decide` must be called even if no event occurs
        # all models that should be on a GPU but are not; `_line` removes names for which this is no longer true
        self._away = {name for name, row in self.rows.items() if row.facts.kept}
        self._on: list[dict[str, ModelRow]] = [{} for _ in self.gpu_bytes]
        self._host_used = 0

    # -- events ----------------------------------------------------------------------------------------------------

    def arrived(self, name: str, now_s: float) -> None:
        """Called when a request for the model has arrived and waits."""
        row = self.rows[name]
        row.waiting += 1
        row.used_s = now_s
        row.first_s = min(row.first_s, now_s)
        self._away.add(name)

    def began(self, name: str, now_s: float) -> None:
        """Called when a waiting request was sent to the model's program."""
        self._left(name, now_s)
        self.rows[name].open += 1

    def withdrawn(self, name: str, now_s: float) -> None:
        """Called when a waiting request was withdrawn and will not be sent to the model's program."""
        self._left(name, now_s)

    def _left(self, name: str, now_s: float) -> None:
        row = self.rows[name]
        row.waiting -= 1
        row.used_s = now_s
        if not row.waiting:
            row.first_s = math.inf

    def ended(self, name: str, now_s: float) -> None:
        """Called when an open request, one that the model's program serves, has ended."""
        row = self.rows[name]
        row.open -= 1
        row.used_s = now_s

    def settled(self, name: str, now_s: float, seconds: float | None = None) -> None:
        """Called when the action on the model that is in progress has succeeded. `seconds`: its duration, if measured.
        """
        row = self.rows[name]
        if row.place is Place.LEAVING:
            self._off(row, now_s, Place.COLD if row.stopping else Place.EVICTED)
        elif row.place in (Place.STARTING, Place.RETURNING):
            if row.place is Place.STARTING:
                if seconds is not None:
                    row.start_s = seconds if not row.starts else row.start_s + BLEND * (seconds - row.start_s)
                row.starts += 1
            else:
                self._host_used -= row.facts.memory_bytes
                if seconds is not None:
                    self.rates.observe(row.against_bytes, row.facts.memory_bytes, seconds)
            row.place, row.since_s, row.used_s = Place.RESIDENT, now_s, max(row.used_s, now_s)
            self._away.discard(name)

    def failed(self, name: str, now_s: float, again_s: float) -> None:
        """Called when the action on the model that is in progress has failed and changed nothing. It may be retried
        after `again_s` seconds.
        """
        row = self.rows[name]
        row.not_before_s = now_s + again_s
        if row.place is Place.STARTING:
            self._off(row, now_s, Place.COLD)
        elif row.place is Place.RETURNING:
            self._off(row, now_s, Place.EVICTED)
        elif row.place is Place.LEAVING:
            row.place, row.stopping = Place.RESIDENT, False

    def died(self, name: str, now_s: float, again_s: float = 0.0) -> None:
        """Called when the model's program has ended, in whatever state it was. The caller reports the end of each open
        request.
        """
        row = self.rows[name]
        row.not_before_s = now_s + again_s
        self._off(row, now_s, Place.COLD)

    def _off(self, row: ModelRow, now_s: float, place: Place) -> None:
        name, held = row.facts.name, row.facts.memory_bytes
        if row.place in IN_HOST:
            self._host_used -= held
        if place is Place.EVICTED:
            self._host_used += held
        if row.gpu >= 0:
            self._on[row.gpu].pop(name, None)
        if place is Place.COLD:
            row.gpu = -1
        row.place, row.since_s, row.draining, row.stopping = place, now_s, False, False
        if row.wanted:
            self._away.add(name)

    @property
    def wanting(self) -> bool:
        """Whether a model may have to be brought to a GPU. If not, `decide` has nothing to do."""
        return bool(self._away)

    @property
    def resident(self) -> list[str]:
        """The models that are on a GPU, or on their way to or from one."""
        return [name for on in self._on for name in on]

    # -- actions ---------------------------------------------------------------------------------------------------

    def admits(self, name: str) -> bool:
        """Whether a waiting request may be given to the model's program now."""
        row = self.rows[name]
        return row.place is Place.RESIDENT and not row.draining

    def back_s(self, row: ModelRow) -> float:
        """Return the estimated time in seconds to restore the model after an eviction."""
        held = row.facts.memory_bytes
        stays = self.host_bytes is None or self._host_used + held <= self.host_bytes
        return self.rates.seconds(0, held) if stays else row.start_s

    def wait_s(self, name: str, now_s: float) -> float:
        """Return the estimated time in seconds until a request that arrives now is sent to the program."""
        row = self.rows[name]
        if row.place is Place.RESIDENT:
            return 0.0
        against = row.against_bytes if row.place is Place.RETURNING else 0
        whole = self.rates.seconds(against, row.facts.memory_bytes)
        full = whole if row.place in (Place.EVICTED, Place.RETURNING) else row.start_s
        spent = now_s - row.since_s if row.place in (Place.STARTING, Place.RETURNING) else 0.0
        return max(full - spent, row.not_before_s - now_s, 0.0)

    def decide(self, now_s: float) -> list[Action]:
        """Return the actions to start now. Called after every event, and at `wake_s`."""
        self.wake_s = math.inf
        actions: list[Action] = []
        promised = [0] * len(self.gpu_bytes)
        draining = {id(row) for on in self._on for row in on.values() if row.draining}
        kept_draining: set[int] = set()
        for row in self._line(now_s):
            plan = self._best(row, promised, now_s)
            if plan is None:
                continue
            promised[plan.gpu] += row.facts.memory_bytes
            kept_draining.update(id(other) for other in plan.drain)
            for other in plan.drain:
                other.draining = True
            left = [self._leave(other, now_s) for other in plan.out]
            together = row.place is Place.EVICTED and plan.enough_now(row.facts.memory_bytes)
            together = together and bool(left) and all(action.do is Do.EVICT for action in left)
            if plan.fits or together:
                promised[plan.gpu] -= row.facts.memory_bytes
                actions.append(self._come(row, plan.gpu, now_s, plan.out))
            else:
                actions += left
        if draining:
            for on in self._on:
                for row in on.values():
                    if id(row) in draining - kept_draining and row.place is Place.RESIDENT:
                        row.draining = False
        return actions

    def _line(self, now_s: float) -> list[ModelRow]:
        """Return the models that should be brought to a GPU, the most urgent first."""
        found = []
        for name in list(self._away):
            row = self.rows[name]
            if not row.wanted:
                self._away.discard(name)
            elif row.not_before_s > now_s:
                self._wake(row.not_before_s)
            else:
                found.append(row)
        return sorted(found, key=lambda r: (-r.facts.rank[0], -r.facts.rank[1], r.first_s + r.facts.late_s))

    def _best(self, row: ModelRow, promised: list[int], now_s: float) -> Plan | None:
        """Return the plan by which the model is resident soonest; a model that was evicted returns to its GPU."""
        gpus = [row.gpu] if row.gpu >= 0 else range(len(self.gpu_bytes))
        plans = [plan for gpu in gpus if (plan := self._plan(row, gpu, promised[gpu], now_s)) is not None]
        return min(plans, key=lambda plan: plan.order, default=None)

    def _plan(self, row: ModelRow, gpu: int, promised: int, now_s: float) -> Plan | None:
        on = self._on[gpu].values()
        free = self.gpu_bytes[gpu] - promised - sum(other.facts.memory_bytes for other in on)
        lacking = row.facts.memory_bytes - free
        if lacking <= 0:
            return Plan(gpu, free, True, cost=-float(free))
        lacking -= sum(other.facts.memory_bytes for other in on if other.place is Place.LEAVING)
        plan = Plan(gpu, free, False)
        ready, busy, soon = [], [], 0
        for other in on:
            if other.place is not Place.RESIDENT or other.facts.kept:
                continue
            at_s = max(other.not_before_s, self._leaves_at(other, row, now_s))
            if at_s > now_s:
                self._wake(at_s)
                soon += other.facts.memory_bytes if at_s < math.inf else 0
            elif other.open:
                busy.append(other)
            else:
                ready.append(other)
        ready.sort(key=lambda other: (other.facts.rank, self._regret(other, now_s)))
        busy.sort(key=lambda other: (not other.draining, other.facts.rank, other.since_s))
        for chosen, candidates in ((plan.out, ready), (plan.drain, busy)):
            for other in candidates:
                if lacking <= 0:
                    break
                chosen.append(other)
                lacking -= other.facts.memory_bytes
        if lacking > 0:
            return Plan(gpu, free, False, later=True) if lacking <= soon else None
        for chosen in (plan.drain, plan.out):
            # models that were chosen later may have made an earlier choice unnecessary
            for other in reversed(list(chosen)):
                if lacking + other.facts.memory_bytes <= 0:
                    chosen.remove(other)
                    lacking += other.facts.memory_bytes
        plan.cost = sum(self._regret(other, now_s) for other in (*plan.out, *plan.drain))
        return plan

    def _leaves_at(self, other: ModelRow, row: ModelRow, now_s: float) -> float:
        """Return the time from which on a resident model may be evicted for another one."""
        back_s, f = self.back_s(other), self.settings.most_moving
        higher = other.facts.rank > row.facts.rank
        if other.draining and not higher:
            return now_s
        if other.idle:
            patience_s = self.settings.idle_s if higher else min(back_s, self.settings.most_patience_s)
            return other.used_s + patience_s
        if higher:
            return math.inf
        if other.facts.rank < row.facts.rank:
            return now_s
        return other.since_s + back_s * (1.0 - f) / f

    def _regret(self, other: ModelRow, now_s: float) -> float:
        return self.back_s(other) / max(1e-3, now_s - other.used_s)

    def _leave(self, row: ModelRow, now_s: float) -> Action:
        held = row.facts.memory_bytes
        rows = (other for on in self._on for other in on.values())
        leaving = sum(r.facts.memory_bytes for r in rows if r.place is Place.LEAVING and not r.stopping)
        row.stopping = self.host_bytes is not None and self._host_used + leaving + held > self.host_bytes
        row.place, row.since_s, row.draining = Place.LEAVING, now_s, False
        return Action(Do.STOP if row.stopping else Do.EVICT, row.facts.name, row.gpu)

    def _come(self, row: ModelRow, gpu: int, now_s: float, out: Sequence[ModelRow]) -> Action:
        do = Do.START if row.place is Place.COLD else Do.EXCHANGE if out else Do.BRING
        row.place = Place.STARTING if do is Do.START else Place.RETURNING
        row.gpu, row.since_s = gpu, now_s
        row.against_bytes = sum(other.facts.memory_bytes for other in out)
        self._on[gpu][row.facts.name] = row
        return Action(do, row.facts.name, gpu, tuple(other.facts.name for other in out))

    def _wake(self, at_s: float) -> None:
        self.wake_s = min(self.wake_s, at_s)
