"""The exact search over patterns with shared gpulets: complete, and right when it says that there is no plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.check import problems, work_ms
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.shared import SharedTable, serve_all, shared_table, undominated
from cotenant.policy.serving.packing.specs import PLANNERS
from cotenant.policy.serving.packing.tables import Gpus, Rules, build_tables
from cotenant.profiles.serving.latency import Interference, ModelProfile, Partition, ServingProfile

PARTS = (Partition(0.4, "40%"), Partition(0.6, "60%"), Partition(1.0, "100%"))


def model(name: str, ms: float, l2: float) -> ModelProfile:
    latency = {p.label: tuple((b, ms * (1 + 0.7 * b) / p.fraction**0.5) for b in (1, 2, 3)) for p in PARTS}
    return ModelProfile(name, 1, latency, (), ((1, l2), (3, 1.4 * l2)), ((1, 0.0), (3, 0.0)))


PROFILE = ServingProfile(
    "X", "made up", 1000, PARTS, {"quick": model("quick", 3.0, 0.2), "slow": model("slow", 9.0, 0.5)},
    Interference(0.1, 0.8, 0.0, 0.0, 1.0),
)  # fmt: skip
SERVICES = [Service("a", "quick", 1.0, 40.0), Service("b", "slow", 1.0, 120.0), Service("c", "quick", 1.0, 90.0)]


def one_gpu() -> Iterator[list[Gpulet]]:
    """Every way to use one GPU: one partition or two, batches of 0 to 3 of each service on each."""
    vectors = [v for v in product(range(4), repeat=len(SERVICES)) if any(v)]

    def let(size: Partition, slot: int, batches: tuple[int, ...]) -> Gpulet:
        seats = [Seat(s.name, s.model, b, 0.0) for s, b in zip(SERVICES, batches, strict=True) if b]
        return Gpulet(0, "X", size.label, size.percent, slot, 1.0, tuple(seats))

    for size, v in product(PARTS, vectors):
        yield [let(size, 0, v)]
    for (p, q), v, w in product(combinations_with_replacement(PARTS, 2), vectors, vectors):
        if p.fraction + q.fraction <= 1:
            yield [let(p, 0, v), let(q, 1, w)]


@cache
def by_hand() -> np.ndarray:
    """(n, S) requests/s of every valid way, as the checker of plans prices and judges them."""
    gpus = Gpus.uniform(PROFILE, 1)
    found = []
    for lets in one_gpu():
        work = [work_ms(PROFILE, x, [y for y in lets if y is not x]) for x in lets]
        timed = [replace(x, duty_ms=ms) for x, ms in zip(lets, work, strict=True)]
        if any(2 * x.duty_ms > 120 for x in timed):
            continue  # some service would wait longer than its SLO allows; skipping it here saves most of the checks
        plan = ServingPlan("x", 1, tuple(timed))
        if not [p for p in problems(plan, SERVICES, gpus) if "capacity" not in p]:
            caps = plan.capacities()
            found.append([caps.get(s.name, 0.0) for s in SERVICES])
    return np.array(found)


def test_all_patterns_are_listed() -> None:
    """The table's undominated capacities are those of every configuration that the independent check accepts."""
    table = shared_table(build_tables(Gpus.uniform(PROFILE, 1), SERVICES, Rules()), [0])
    assert table is not None
    theirs, mine = by_hand(), table.caps
    theirs, mine = theirs[undominated(theirs)], mine[undominated(mine)]
    assert len(theirs) > 20
    for a, b in ((theirs, mine), (mine, theirs)):
        for row in a:
            assert (b >= row * (1 - 1e-9)).all(axis=1).any(), row


numbers = st.integers(0, 6)


@settings(max_examples=150, deadline=None)
@given(
    caps=st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=7), data=st.data(),
    rates=st.tuples(*[st.integers(0, 12)] * 3), counts=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
def test_search_as_trying_everything(
    caps: list[tuple[int, ...]], data: st.DataObject, rates: tuple[int, ...], counts: tuple[int, int]
) -> None:
    kind = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(caps), max_size=len(caps))), np.int64)
    rows = np.array(caps, float)
    wanted = np.array(rates, float)
    table = SharedTable(rows[:, None, :], kind, np.zeros((len(rows), 2), np.int64), rows)
    status, chosen = serve_all(table, wanted, np.array(counts), 600.0)

    def choices(t: int) -> Iterator[tuple[int, ...]]:
        mine = [*np.nonzero(kind == t)[0].tolist(), -1]
        return combinations_with_replacement(mine, counts[t])

    possible = any(
        (sum((rows[c] for c in (*x, *y) if c >= 0), np.zeros(3)) >= wanted).all()
        for x in choices(0) for y in choices(1)
    )  # fmt: skip
    assert status == ("found" if possible else "infeasible")
    if possible:
        assert (rows[chosen].sum(axis=0) >= wanted - 1e-6).all()
        assert all((kind[chosen] == t).sum() <= counts[t] for t in (0, 1))


@settings(max_examples=20, deadline=None)
@given(rates=st.tuples(st.floats(5, 150), st.floats(5, 80), st.floats(5, 150)), gpus=st.integers(1, 2))
def test_exact_decides_every_case(rates: tuple[float, ...], gpus: int) -> None:
    packer = exact(gpus)
    plan = packer.plan(rates)
    wanted = [Service(s.name, s.model, r, s.slo_ms) for s, r in zip(SERVICES, rates, strict=True)]
    assert problems(plan, wanted, packer.gpus) == []
    assert plan.feasible != plan.proven_infeasible
    if gpus == 1:
        assert plan.feasible or not (by_hand() >= np.array(rates) * (1 + 1e-5)).all(axis=1).any()


@cache
def exact(gpus: int) -> Packer:
    return Packer(PLANNERS["exact"], Gpus.uniform(PROFILE, gpus), SERVICES, time_limit_s=600.0)


def test_too_many_vectors_are_not_listed() -> None:
    """Twelve quick services with long SLOs have more batch vectors than are worth listing."""
    latency = {"100%": ((1, 0.1), (32, 1.0))}
    profile = ServingProfile("X", "x", 1000, (Partition(1.0, "100%"),), {"m": ModelProfile("m", 1, latency)})
    many = [Service(f"s{i}", "m", 1.0, 1000.0) for i in range(12)]
    assert shared_table(build_tables(Gpus.uniform(profile, 1), many, Rules()), [0]) is None
