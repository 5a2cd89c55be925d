"""The serving planners, which make a plan for services and GPUs. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.serving import Gpulet, LeftOut, Service, ServingPlan
from cotenant.policy.serving.packing import adjust, cover, reasons, rows, search
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.exact import prove, with_proof
from cotenant.policy.serving.packing.instances import InstanceTable
from cotenant.policy.serving.packing.kernel import State
from cotenant.policy.serving.packing.prices import CoverTable, cover_table
from cotenant.policy.serving.packing.shared import SharedTable, serve_all, shared_table
from cotenant.policy.serving.packing.specs import KEPT_APART, PLANNERS, Spec
from cotenant.policy.serving.packing.tables import Gpus, build_tables, most_rows, new_state

SEED = 0x9E3779B97F4A7C15
SMALL = 64  # up to this many services and GPUs, plans are searched for; beyond it, one is built in a single pass
MANY = 300  # with at most this many services, an integer program assigns MIG instances
COVERED = 12  # with at most this many services, all patterns (ways to divide a GPU) are listed
LOOKS = 400  # number of places that are tried for one service, beginning with the GPUs that were used last
GRID = math.log(1.01)  # feasibility is decided for rates that are rounded up to a geometric grid, see _covers
TRIES, QUICK_TRIES, EXACT_TRIES = 600, 150, 60_000
WIDEN = np.array([3.0, 2.0, 1.5, 1.3, 1.2, 1.1, 1.05, 1.02, 1.0])
GUARDS = (1.1, 1.25, 1.4)  # factors on the rates by which a planner that ignores interference makes up for it
CROWDED = 1000  # with more GPUs, only few models may share a gpulet: records of gpulets with many models are large
SPARE = 1 + 3e-6  # rates are planned higher by this factor, so that rounding leaves none too low


class Packer:
    """One planner for a fixed set of services (models, SLOs) and GPUs. It makes plans for different rates.

    Creating it computes the tables, which is the slow part; `plan` then decides. A plan that claims to be feasible has
    passed `check.problems` under the interference in the profile, whether the planner considers interference or not.
    """

    def __init__(self, spec: Spec, gpus: Gpus, services: Sequence[Service], *, time_limit_s: float = 5.0) -> None:
        """Compute the tables. `time_limit_s`: time limit of the exact planner for one decision of its solver."""
        if not services:
            raise InputError("there are no services to plan")
        if len(gpus) == 0:
            raise InputError("there are no GPUs to plan for")
        names = set()
        for s in services:
            if s.name in names:
                raise InputError(f"service {s.name} is declared twice", field="services")
            names.add(s.name)
        self.spec, self.gpus, self.services, self.time_limit_s = spec, gpus, list(services), time_limit_s
        self.tables = build_tables(gpus, services, spec.rules)
        self.lets = most_rows(self.tables)
        for s, cap in zip(services, self.tables.cap.max(axis=(0, 2)), strict=True):
            if cap <= 0:
                raise InputError(reasons.too_slow(s, gpus, whole_only=spec.rules.whole_only), field="slo_ms")
        seats = spec.rules.seats
        self._scratch = new_state(3, self.lets, seats)
        self._states = [new_state(len(gpus), self.lets, seats) for _ in range(3)]
        self._rng = np.zeros(1, np.uint64)
        self._counts = np.bincount(np.array(gpus.types), minlength=len(gpus.profiles))

    @property
    def small(self) -> bool:
        """Whether the problem is small enough for a search; otherwise plans are built in one pass."""
        return len(self.services) <= SMALL and len(self.gpus) <= SMALL

    @cached_property
    def table(self) -> CoverTable | None:
        """Return the patterns (ways to divide a GPU) and prices for exact covers (see prices.py); None if plans may
        divide a GPU as no pattern of two gpulets does, or if there are too many services."""
        one_instance = bool((self.tables.size["whole"] > 1 - 1e-9).all())
        enough = self.spec.cover and self.lets <= 2 and one_instance and len(self.services) <= COVERED
        return cover_table(self.tables) if enough else None

    @cached_property
    def shared(self) -> SharedTable | None:
        """Return all patterns (ways to divide a GPU), including those whose parts several models share; None if no
        parts are shared, or there are too many patterns."""
        return shared_table(self.tables, sorted(set(self.gpus.types))) if self.spec.rules.seats > 1 else None

    @cached_property
    def instances(self) -> InstanceTable | None:
        """Return the integer program for GPUs that are divided into MIG instances; None if no GPU is divided, or if the
        program would take too long."""
        cut = bool((self.tables.size["whole"] < 1 - 1e-9).any())
        searched = self.spec.climb > 0 and not self.spec.rules.whole_only and len(self.services) <= MANY
        return InstanceTable(self.tables) if cut and searched else None

    def plan(self, rates_rps: Sequence[float] | None = None, start: ServingPlan | None = None) -> ServingPlan:
        """Return the plan for these rates (default: the services' own). `start`: a plan whose gpulets are kept if
        possible; as few services as possible move (see replan.moves)."""
        services = self.services
        if rates_rps is not None:
            services = [replace(s, rate_rps=float(r)) for s, r in zip(services, rates_rps, strict=True)]
        plan = self._crowding(services, start)
        mixing = None if plan.feasible or plan.proven_infeasible else self._mixing
        if mixing is not None and mixing.plan([s.rate_rps for s in services]).feasible:
            return replace(plan, notes=(*plan.notes, KEPT_APART))
        return plan

    def _crowding(self, services: Sequence[Service], start: ServingPlan | None) -> ServingPlan:
        """Return a plan with few models on each gpulet, or one with many if the latter serves more, or `start` already
        has gpulets with many."""
        few, crowded = self.spec.rules.seats, self._crowded
        if crowded is not None and start is not None and any(len(let.seats) > few for let in start.gpulets):
            kept = crowded._decide(services, start)
            if kept.feasible:
                return kept
        plan = self._decide(services, start)
        if crowded is not None and not plan.feasible and any(len(let.seats) >= few for let in plan.gpulets):
            plan = self._better(plan, crowded._decide(services, start))
        if self._undivided is not None and not plan.feasible and not plan.proven_infeasible:
            plan = self._better(plan, self._undivided._crowding(services, None))
        return plan

    def _better(self, plan: ServingPlan, other: ServingPlan) -> ServingPlan:
        """Return the plan that leaves less of the rates unserved. If that is `other`, and it leaves a part unserved, it
        gets the bound and notes of `plan`."""
        if self._missing(other) >= self._missing(plan):
            return plan
        if other.feasible:
            return other
        return replace(other, bound=plan.bound, proven_infeasible=plan.proven_infeasible, notes=plan.notes)

    def _missing(self, plan: ServingPlan) -> float:
        """Return the number of GPUs that the services left out of a plan would need."""
        cost = {s.name: float(c) for s, c in zip(self.services, self.tables.svc["cost"], strict=True)}
        return sum(x.missing_rps * cost[x.service] for x in plan.left_out)

    @cached_property
    def _crowded(self) -> Packer | None:
        """Return the same planner with as many models on a gpulet as its rules allow; None if that changes nothing. It
        builds plans in one pass, since a search with many models on a gpulet takes long."""
        rules = self.spec.rules
        if rules.seats == 1 or not rules.seats < min(rules.crowd, len(self.services)) or len(self.gpus) > CROWDED:
            return None
        spec = replace(self.spec, rules=replace(rules, seats=rules.crowd), climb=0, cover=False, exact=False)
        return Packer(spec, self.gpus, self.services)

    @cached_property
    def _undivided(self) -> Packer | None:
        """Return the same planner without divided GPUs: the search on divided GPUs prefers small gpulets, in which
        fewer models can take turns, so it may miss plans on whole ones. None if this planner needs no such search."""
        rules = self.spec.rules
        if rules.whole_only or rules.seats == 1 or self.spec.exact or self.spec.climb == 0:
            return None
        spec = replace(PLANNERS["temporal"], name=self.spec.name, rules=replace(rules, whole_only=True))
        try:
            return Packer(spec, self.gpus, self.services)
        except InputError:  # a whole GPU is too slow for an SLO, or the profile has no whole GPUs
            return None

    def _decide(self, services: Sequence[Service], start: ServingPlan | None) -> ServingPlan:
        rates = np.array([s.rate_rps for s in services])
        left = np.zeros(len(rates))
        state = self._kept(rates, start) if start is not None else None
        proof = None
        if state is None:
            state = self._feasible(rates)
        if state is None and self.spec.exact and self.table is not None:
            proof = prove(self.table, rates, self._counts, self.time_limit_s, SPARE)
            best = self._states[2]
            if proof.chosen is not None and self._take(proof.chosen, rates * SPARE, best):
                state = best
            elif proof.status != "infeasible" and self.shared is not None:
                status, patterns = serve_all(self.shared, rates, self._counts, self.time_limit_s)
                if status == "infeasible":
                    proof = replace(proof, status=status)
                elif rows.place_patterns(self.tables, self.shared, patterns, rates, best):
                    state = best
        if state is None:
            state = self._best_effort(rates, services, left)
        plan = self._extract(state, services, left)
        if proof is not None and not plan.feasible:
            plan = with_proof(plan, proof)
        if plan.feasible and not self.spec.rules.interference:
            return self._guarded(plan, rates, services)
        return plan

    def bound(self, rates: np.ndarray) -> float:
        """Return an upper bound on the factor by which all rates can be multiplied so that a plan on these GPUs still
        serves them. Below 1 the rates are infeasible."""
        fluid = len(self.gpus) / float((rates * self.tables.svc["cost"]).sum())
        if self.instances is not None and self.instances.bounds:
            return min(fluid, self.instances.factor(rates, self._counts))
        if self.table is None:
            return fluid
        return min(fluid, float(cover.bound_of(self.table.prices, self.table.worth, rates, self._counts)[0]))

    def _feasible(self, rates: np.ndarray) -> State | None:
        A, C, best = self._states
        left = np.zeros(len(rates))
        self._rng[0] = SEED
        if self.instances is not None and self._covers_instances(rates, best):
            return best if self.instances.bounds else self._leaner(best, rates)
        if self.spec.climb == 0 or not self.small:
            return A if search.build(self.tables, A, self._scratch, rates, LOOKS, 1, self._rng, left) else None
        need = float(rates.max())
        direction = rates / need
        bound = self.bound(direction)
        if bound < need:
            return None
        if self._covers(direction, need, bound, best):
            pass
        elif self._climb_pays(len(rates)):
            climbed = search.climb(
                self.tables, A, self._scratch, C, best, direction, need, bound, self.spec.climb, LOOKS, self._rng
            )
            if climbed < need:
                return None
        else:
            return None
        return self._leaner(best, rates)

    def _leaner(self, best: State, rates: np.ndarray) -> State:
        """Return a packing that is built in one pass if it uses no more GPUs than `best`; otherwise `best`."""
        A, left = self._states[0], np.zeros(len(rates))
        lean = search.build(self.tables, A, self._scratch, rates, LOOKS, 1, self._rng, left)
        return A if lean and _used(A) <= _used(best) else best

    def _climb_pays(self, services: int) -> bool:
        """Whether a search can serve more than an exact cover, which is so only if models may share a gpulet."""
        return self.table is None or (self.spec.rules.seats > 1 and services > 1)

    def _covers(self, direction: np.ndarray, need: float, bound: float, out: State) -> bool:
        """Search for an exact cover of the rates. The rates are first rounded up to a geometric grid. If the search
        gives up, it goes on with the next larger rates of the grid, until it finds a cover or a proof that there is
        none. This makes the result monotone: if rates are covered, all smaller rates are, too. The exact planner
        searches at the rates themselves, for longer, and leaves the rest to its solver."""
        table = self.table
        if table is None or len(direction) > 2 * len(self.gpus):
            return False
        chosen = np.full(len(self.gpus), -1, np.int64)
        k = math.ceil(math.log(need) / GRID - 1e-9)
        size = need if self.spec.exact else math.exp(k * GRID)
        while size <= bound:
            # the effort depends only on the position in the grid, so that equal rounded rates get equal answers
            tries = EXACT_TRIES if self.spec.exact else TRIES if k % 3 == 0 else QUICK_TRIES
            answer = cover.cover(
                table.caps, table.kind, table.group, table.limits, table.prices, table.worth, table.solo, table.frac,
                table.cost, direction * (size * SPARE), self._counts, chosen, tries,
            )  # fmt: skip
            if answer == cover.FOUND and self._take(chosen, direction * need * SPARE, out):
                return True
            if answer == cover.NONE or self.spec.exact:
                return False
            k += 1
            size = math.exp(k * GRID)
        return False

    def _take(self, chosen: np.ndarray, rates: np.ndarray, out: State) -> bool:
        """Write chosen patterns into a state, and assign each service's rate to its gpulets in turn. False: the memory
        does not suffice."""
        table = self.table
        assert table is not None
        search.empty_all(out)
        rest = rates.copy()
        free = {t: [g for g, x in enumerate(self.gpus.types) if x == t] for t in range(len(self.gpus.profiles))}
        for c in chosen[chosen >= 0]:
            g = free[int(table.kind[c])].pop(0)
            what = table.what[c]
            caps = adjust.pattern_caps(self.tables, g, *_pair_arrays(what))
            for j, (p, s, b) in enumerate(what):
                rate = min(rest[s], caps[j] * (1 - 1e-7))
                if rate <= 0:
                    continue
                let = out[g, j]
                let["part"], let["inst"], let["count"] = p, 0, 1
                let["svc"][0], let["rate"][0], let["batch"][0] = s, rate, b
                rest[s] = max(0.0, rest[s] - rate)
        return bool((rest <= rates * 1e-6).all()) and bool(adjust.settle_all(self.tables, out))

    def _covers_instances(self, rates: np.ndarray, out: State) -> bool:
        """Fill `out` with the fewest GPUs that the integer program finds. False: it finds no valid packing."""
        table = self.instances
        assert table is not None
        found = table.fewest(rates * SPARE, self._counts, self.time_limit_s)
        if found is None:
            return False
        table.fill(*found, rates, out)
        return bool(adjust.settle_all(self.tables, out))

    def _best_effort(self, rates: np.ndarray, services: Sequence[Service], left: np.ndarray) -> State:
        """Place as much of the rates as fits, by priority, then by least demand; `left` gets the rates not placed."""
        A = self._states[0]
        self._rng[0] = SEED
        search.empty_all(A)
        demand = rates * self.tables.svc["cost"]
        order = np.array(sorted(range(len(rates)), key=lambda s: (-services[s].priority, demand[s])))
        search.fill(self.tables, A, self._scratch, rates, order, LOOKS, 0.0, self._rng, left)
        # `grow` may place rates that the search could not place. A plan could then succeed at these rates and fail at
        # lower ones, so `grow` is called only if the rates are proven infeasible.
        if self.bound(rates) < 1:
            adjust.grow(self.tables, A, self._scratch, order, left)
        return A

    def _kept(self, rates: np.ndarray, start: ServingPlan) -> State | None:
        """Give the gpulets of the start plan the new rates: change the rates of the services that are on them, then
        place the rates that remain. None if that does not serve all services."""
        A = self._states[0]
        now = {s.name: float(r) for s, r in zip(self.services, rates, strict=True)}
        rows.place_as(self.tables, self.gpus, self.services, A, start, now)
        return self._mend(A, rates)

    def _mend(self, A: State, rates: np.ndarray) -> State | None:
        self._rng[0] = SEED
        if not adjust.shrink_to_fit(self.tables, A, self._scratch):
            return None
        left = np.zeros(len(rates))
        order = np.argsort(-rates * self.tables.svc["cost"], kind="stable")
        lack = search.fill(self.tables, A, self._scratch, rates, order, LOOKS, 0.0, self._rng, left)
        return A if lack <= 0 else None

    def _extract(self, state: State, services: Sequence[Service], left: np.ndarray) -> ServingPlan:
        adjust.widen(self.tables, state, self._scratch, WIDEN)
        lets: list[Gpulet] = []
        for g in np.nonzero(state["count"].any(axis=1))[0].tolist():
            lets += rows.gpulets(self.gpus, state, g, services)
        missing: tuple[LeftOut, ...] = ()
        factor = None
        if (left > 0).any():
            factor = self.bound(np.array([s.rate_rps for s in services]))
            missing = tuple(
                LeftOut(s.name, float(left[i]), self._reason(factor, state, i))
                for i, s in enumerate(services) if left[i] > 0
            )  # fmt: skip
        return ServingPlan(
            self.spec.name, len(self.gpus), tuple(lets), missing,
            proven_infeasible=factor is not None and factor < 1, bound=factor,
            rates_rps={s.name: s.rate_rps for s in services},
        )  # fmt: skip

    def _reason(self, factor: float, state: State, service: int) -> str:
        """Return why a service is not completely served in a packing that serves as much as possible."""
        if factor < 1:
            return (
                f"the GPUs can serve at most {factor:.1%} of these rates: "
                f"about {math.ceil(len(self.gpus) / factor - 1e-9):,} such GPUs are needed and there "
                f"{'is' if len(self.gpus) == 1 else 'are'} {len(self.gpus):,}"
            )
        return reasons.left_out(self.tables, state, service)

    @cached_property
    def _mixing(self) -> Packer | None:
        """The same planner without the rule that keeps latency-sensitive and best-effort services apart; None if that
        rule changes nothing."""
        rules = self.spec.rules
        if not rules.apart or rules.seats == 1 or len(set(self.tables.svc["group"].tolist())) == 1:
            return None
        spec = replace(self.spec, rules=replace(rules, apart=False))
        return Packer(spec, self.gpus, self.services, time_limit_s=self.time_limit_s)

    @cached_property
    def _seeing(self) -> Packer:
        """The same planner, but considering interference, to choose the batches of a plan that was made without it."""
        spec = replace(self.spec, rules=replace(self.spec.rules, interference=True), cover=False, climb=0)
        return Packer(spec, self.gpus, self.services)

    def _guarded(self, plan: ServingPlan, rates: np.ndarray, services: Sequence[Service]) -> ServingPlan:
        """Check with interference a plan that was made without it. If it fails, plans for rates higher by the factors
        of GUARDS are checked, and the first that holds is returned. If none holds, the plan returned is infeasible.
        """
        judged = self._judge(plan, services, 1.0)
        for guard in GUARDS:
            wider = None if judged.feasible else self._feasible(rates * guard)
            if wider is None:
                break
            again = self._judge(self._extract(wider, services, np.zeros(len(rates))), services, guard)
            judged = again if again.feasible else judged
        return judged

    def _judge(self, plan: ServingPlan, services: Sequence[Service], guard: float) -> ServingPlan:
        """Check, with interference, a plan that was made without it. If the plan fails, choose new batches on its
        partitions and check again. `guard`: the factor by which the planner had raised the rates of the services."""
        wrong = problems(plan, services, self.gpus)
        if not wrong:
            return plan
        eyes = self._seeing
        state = eyes._states[0]
        rows.place_as(eyes.tables, self.gpus, self.services, state, plan, {}, own=1.0 / guard)
        if adjust.settle_all(eyes.tables, state):
            mended = replace(eyes._extract(state, services, np.zeros(len(services))), planner=self.spec.name)
            if not problems(mended, services, self.gpus):
                return mended
        why = "the plan does not hold under interference"
        return replace(plan, left_out=tuple(LeftOut(s.name, s.rate_rps, why) for s in services), notes=tuple(wrong[:5]))


def _pair_arrays(what: tuple[tuple[int, int, int], ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p, s, b = (np.array(x, np.int64) for x in zip(*what, strict=True))
    return p, s, b


def _used(state: State) -> int:
    return int((state["count"].sum(axis=1) > 0).sum())
