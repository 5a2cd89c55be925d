"""Pollux, Tesserae, Gandiva and spot policies against brute force: every count, every matching, every window."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.policy.elastic.gandiva import Gandiva
from cotenant.policy.elastic.pollux import WAITING, Pollux, best_counts, costs
from cotenant.policy.elastic.spot import HORIZON, Spot, predicted_rise
from cotenant.policy.elastic.tesserae import Tesserae, match, pack
from cotenant.policy.elastic.view import NONE, Configurations, View, rigid


def view_of(rate: np.ndarray, gpu: list[int], count: list[int], capacity: list[int], **more: object) -> View:
    jobs, models = len(rate), len(capacity)
    fields: dict[str, object] = {
        "wants": np.ones(jobs, np.int64), "held": np.full(jobs, NONE), "most": np.zeros(jobs, np.int64),
        "left": np.ones(jobs), "age_s": np.full(jobs, 1000.0), "restarts": np.zeros(jobs, np.int64),
        "restart_s": np.zeros(jobs), "received_s": np.zeros((jobs, models)), "priority": np.zeros(jobs, np.int64),
        "kind": np.arange(jobs), "host": np.full(jobs, NONE), "job": np.arange(jobs),
    }  # fmt: skip
    options = Configurations(np.array(gpu), np.array(count), np.array(capacity), np.ones(models))
    return View(options=options, rate=np.asarray(rate, float), **{**fields, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(10))
def test_pollux_is_the_best_of_all_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, jobs, capacity = np.array([1, 2, 4]), 5, int(rng.integers(3, 12))
    cost = rng.uniform(0.1, 3.0, (jobs, 3))
    cost[rng.random((jobs, 3)) < 0.2] = np.inf

    def total(config: tuple[int, ...]) -> float:
        return sum(WAITING if c < 0 else float(cost[j, c]) for j, c in enumerate(config))

    fitting = (
        config for config in itertools.product(range(-1, 3), repeat=jobs)
        if sum(count[c] for c in config if c >= 0) <= capacity
    )  # fmt: skip
    found = best_counts(cost, count, capacity)
    assert count[found[found >= 0]].sum() <= capacity
    assert total(tuple(found.tolist())) == pytest.approx(min(map(total, fitting)))


def test_the_cost_of_pollux_worked_out() -> None:
    """4 GPUs and 2 jobs: an equal share is 2 GPUs, where the first job has 3 units a second and the second 4."""
    rate = np.array([[2.0, 3.0, 4.0], [2.0, 4.0, 8.0]])
    view = view_of(rate, [0, 0, 0], [1, 2, 4], [4], most=np.array([2, 2]), held=np.array([1, 1]))
    assert costs(view) == pytest.approx(np.array([[1.5, 1.0, 0.75], [2.0, 1.0, 0.5]]))
    # With both jobs on 2 GPUs the value is 1 + 1. If one of them had 4, nothing would be left for the other.
    assert Pollux().decide(view).config.tolist() == [1, 1]


def test_pollux_refuses_several_gpu_models() -> None:
    with pytest.raises(InputError, match="one GPU model; sia"):
        Pollux().decide(view_of(np.ones((1, 2)), [0, 1], [1, 1], [1, 1]))


@pytest.mark.parametrize("seed", range(10))
def test_the_matching_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.uniform(1.0, 2.0, (3, 4))
    weight[rng.random((3, 4)) < 0.3] = 0.0
    best = max(
        sum(float(weight[i, k]) for i, k in zip(range(3), columns, strict=True) if k >= 0)
        for columns in itertools.product(range(-1, 4), repeat=3)
        if len({k for k in columns if k >= 0}) == sum(k >= 0 for k in columns)
    )
    pairs = match(weight, np.ones(3), np.ones(4))
    assert float((pairs * weight).sum()) == pytest.approx(best)
    assert pairs.sum(axis=0).max() <= 1
    assert pairs.sum(axis=1).max() <= 1


def beside(pairs: dict[tuple[int, int], float], kinds: int) -> np.ndarray:
    table = np.zeros((kinds, kinds, 1))
    for (a, b), part in pairs.items():
        table[a, b, 0] = part
    return table


def test_tesserae_packs_only_where_the_gpu_does_more() -> None:
    """One GPU, three jobs: the first has it. Beside the second both keep 45 %, beside the third 60 and 70 %."""
    parts = {(0, 1): 0.45, (1, 0): 0.45, (0, 2): 0.6, (2, 0): 0.7}
    view = view_of(np.ones((3, 1)), [0], [1], [1], beside=beside(parts, 3))
    decision = Tesserae().decide(view)
    assert decision.config.tolist() == [0, NONE, 0]
    assert decision.host is not None
    assert decision.host.tolist() == [NONE, NONE, 0]
    assert Tesserae(packs=False).decide(view).config.tolist() == [0, NONE, NONE]


def test_pairs_stay_together() -> None:
    """Two jobs of one kind run, two of another wait: any pairing is as good, so the present one is kept."""
    parts = {(0, 1): 0.8, (1, 0): 0.8}
    view = view_of(
        np.ones((4, 1)), [0], [1], [2], kind=np.array([0, 0, 1, 1]), beside=beside(parts, 2),
        held=np.zeros(4, np.int64), host=np.array([NONE, NONE, 1, 0]),
    )  # fmt: skip
    host = pack(view, rigid(view), np.array([0, 0, NONE, NONE]), np.arange(4))
    assert host.tolist() == [NONE, NONE, 1, 0]


def test_who_got_least_service_goes_first() -> None:
    """A job that had more than an hour of GPU time waits behind a new one."""
    view = view_of(np.ones((2, 1)), [0], [1], [1], received_s=np.array([[3600.0], [0.0]]))
    assert Tesserae(packs=False).decide(view).config.tolist() == [NONE, 0]


def test_the_rise_is_the_quantile_of_all_windows() -> None:
    rng = np.random.default_rng(5)
    demand = rng.integers(0, 20, (100, 2)).astype(float)
    rises = [
        max(0.0, max(demand[t + 1 : t + 1 + HORIZON, g]) - demand[t, g]) for g in range(2) for t in range(100 - HORIZON)
    ]
    expected = [np.ceil(np.quantile(rises[g * 88 : (g + 1) * 88], 0.9)) for g in range(2)]
    assert predicted_rise(demand).tolist() == expected
    assert predicted_rise(demand[:20]).tolist() == [0.0, 0.0]


def test_guaranteed_jobs_evict_the_youngest_spot_job() -> None:
    """Two GPUs with spot jobs that ran 500 s and 100 s; a guaranteed job comes."""
    view = view_of(
        np.ones((3, 1)), [0], [1], [2], held=np.array([0, 0, NONE]), priority=np.array([0, 0, 1]),
        received_s=np.array([[500.0], [100.0], [0.0]]),
    )  # fmt: skip
    assert Spot().decide(view).config.tolist() == [0, NONE, 0]


def test_a_predicted_rise_keeps_gpus_free_for_guaranteed_jobs() -> None:
    """A guaranteed job on and off every 4 rounds: its GPU is not given to a spot job while it is away."""
    policy, greedy = Spot(), Spot(predicts=False)
    for i in range(60):
        there = (i // 4) % 2 == 0
        view = view_of(np.ones((1, 1)), [0], [1], [1], priority=np.array([int(there)]))
        if there:
            assert policy.decide(view).config.tolist() == greedy.decide(view).config.tolist() == [0]
        else:
            assert greedy.decide(view).config.tolist() == [0]
            kept = policy.decide(view).config.tolist()
            assert kept == ([0] if i < 2 * HORIZON - 1 else [NONE])


@pytest.mark.parametrize("seed", range(12))
def test_gandiva_makes_only_pairs_that_gain_and_leaves_none_that_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs, gpus = 9, int(rng.integers(2, 5))
    beside = rng.choice([0.0, 0.3, 0.6, 0.8], (jobs, jobs, 1))
    view = view_of(
        np.ones((jobs, 1)), [0], [1], [gpus], beside=beside, received_s=rng.integers(0, 5, (jobs, 1)) * 100.0
    )
    decision = Gandiva().decide(view)
    assert decision.host is not None
    guests = np.flatnonzero(decision.host != NONE)
    hosts = decision.host[guests]
    assert len(set(hosts.tolist())) == len(hosts)
    own = np.flatnonzero((decision.config != NONE) & (decision.host == NONE))
    assert len(own) == gpus
    # the jobs that have received least have the GPUs
    assert view.received_s[own, 0].max() <= np.delete(view.received_s[:, 0], own).min()

    def gain(a: int, b: int) -> float:
        one, other = float(beside[a, b, 0]), float(beside[b, a, 0])
        return one + other if one and other else 0.0

    assert all(gain(h, g) > 1 for h, g in zip(hosts, guests, strict=True))
    alone = set(own.tolist()) - set(hosts.tolist())
    left = [j for j in range(jobs) if decision.config[j] == NONE]
    assert not any(gain(h, j) > 1 for h in alone for j in left)
    again = Gandiva().decide(view_of(
        np.ones((jobs, 1)), [0], [1], [gpus], beside=beside, received_s=view.received_s, host=decision.host,
        held=decision.config,
    ))  # fmt: skip
    assert again.host is not None
    assert again.host.tolist() == decision.host.tolist()  # jobs that run stay where they are
