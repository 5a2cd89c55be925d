"""Gavel and Sia against brute force: every share on a grid, every choice of configurations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cotenant.policy.elastic import sia
from cotenant.policy.elastic.gavel import Gavel, allocate, rates_by_model, serve_round
from cotenant.policy.elastic.sia import (
    WAITING,
    Sia,
    choose_by_prices,
    choose_by_tables,
    choose_exactly,
    values,
    worth,
)
from cotenant.policy.elastic.view import NONE, Configurations, View, rigid


def view_of(rate: np.ndarray, gpu: list[int], count: list[int], capacity: list[int], **more: object) -> View:
    jobs, models = len(rate), len(capacity)
    fields: dict[str, object] = {
        "wants": np.ones(jobs, np.int64), "held": np.full(jobs, NONE), "most": np.zeros(jobs, np.int64),
        "left": np.ones(jobs), "age_s": np.full(jobs, 1000.0), "restarts": np.zeros(jobs, np.int64),
        "restart_s": np.zeros(jobs), "received_s": np.zeros((jobs, models)), "priority": np.zeros(jobs, np.int64),
        "kind": np.arange(jobs), "host": np.full(jobs, NONE), "job": np.arange(jobs),
    }  # fmt: skip
    options = Configurations(np.array(gpu), np.array(count), np.array(capacity), np.array([3.0, 1.0, 0.5][:models]))
    return View(options=options, rate=np.asarray(rate, float), **{**fields, **more})  # type: ignore[arg-type]


# Two GPU models with one GPU each. For the first job the first model is 4 times as fast as the second, for the second
# job 1.5 times.
TWO = view_of(np.array([[4.0, 1.0], [3.0, 2.0]]), [0, 1], [1, 1], [1, 1])
GRID = np.linspace(0.0, 1.0, 41)


def grid_best(objective: object) -> float:
    """The best of the objective over all shares on a grid that keep the limits of both jobs and both models."""
    a, b, c, d = np.meshgrid(GRID, GRID, GRID, GRID, indexing="ij", sparse=True)
    ok = (a + b <= 1) & (c + d <= 1) & (a + c <= 1) & (b + d <= 1)
    return float(np.where(ok, objective(a, b, c, d), -np.inf).max())  # type: ignore[operator]


def shares(goal: str, view: View) -> np.ndarray:
    rate = rates_by_model(view, rigid(view))
    ones = np.ones(len(view), np.int64)
    return allocate(goal, rate, view.wants, ones, view, view.priority, view.left)


def test_fairness_is_the_best_of_all_shares() -> None:
    x = shares("fairness", TWO)
    # divided by the speed with half of the time on each model, which is 2.5 for both jobs
    least = min(4 * x[0, 0] + x[0, 1], 3 * x[1, 0] + 2 * x[1, 1]) / 2.5
    best = grid_best(lambda a, b, c, d: np.minimum(4 * a + b, 3 * c + 2 * d) / 2.5)
    assert best - 1e-9 <= least + 2e-3
    assert least <= best + 0.05
    assert (x.sum(axis=1) <= 1 + 1e-9).all()
    assert (x.sum(axis=0) <= 1 + 1e-9).all()
    # By hand: 4a + (1-a) = 3(1-a) + 2a gives a = 0.5, so both get 2.5, as with equal shares.
    assert least == pytest.approx(1.0, abs=2e-3)


def test_makespan_is_the_best_of_all_shares() -> None:
    view = view_of(TWO.rate, [0, 1], [1, 1], [1, 1], left=np.array([4.0, 1.0]))
    x = shares("makespan", view)
    least = min((4 * x[0, 0] + x[0, 1]) / 4, 3 * x[1, 0] + 2 * x[1, 1])
    # By hand: the first job needs the fast GPU for the whole second, and the second job runs on the slow one.
    assert least == pytest.approx(1.0, abs=2e-3)
    assert grid_best(lambda a, b, c, d: np.minimum((4 * a + b) / 4, 3 * c + 2 * d)) == pytest.approx(1.0)


def test_cost_takes_the_model_with_most_work_per_price() -> None:
    # The fast model costs 3 an hour, the slow one 1. Per price, the first job gets (4/4)/3 = 1/3 against (1/4)/1 = 1/4,
    # and the second one 1/3 against 2/3.
    assert shares("cost", TWO).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_agnostic_takes_models_for_equal() -> None:
    x = shares("agnostic", TWO)
    assert x.sum(axis=1) == pytest.approx([1.0, 1.0])


def test_equal_jobs_are_one_row_of_the_program() -> None:
    rate = np.array([[4.0, 1.0], [4.0, 1.0], [3.0, 2.0]])
    alike = view_of(rate, [0, 1], [1, 1], [2, 1], kind=np.array([0, 0, 1]))
    apart = view_of(rate, [0, 1], [1, 1], [2, 1])

    def least(view: View) -> float:
        x = Gavel()._shares(view, rigid(view))
        return float(((rate * x).sum(axis=1) / (rate * [2, 1]).sum(axis=1) * 3).min())

    assert least(alike) == pytest.approx(least(apart), rel=1e-3)


def test_a_round_serves_who_got_least_of_its_share() -> None:
    choices = rigid(TWO)
    x = np.array([[0.5, 0.5], [0.5, 0.5]])
    spent = np.array([[0.4, 0.0], [0.1, 0.0]])
    # the first job has not been on the slow model, and has had more time than the other on the fast one
    assert serve_round(TWO, choices, x, spent).tolist() == [1, 0]


def test_the_time_spent_counts_from_the_last_reset() -> None:
    """It begins anew when a job comes and 1,000 s have passed, and not before."""

    def view(jobs: list[int], ages: list[float], got: list[float]) -> View:
        n = len(jobs)
        received = np.column_stack([got, np.zeros(n)])
        return view_of(
            np.tile([4.0, 1.0], (n, 1)), [0, 1], [1, 1], [1, 1], job=np.array(jobs), age_s=np.array(ages),
            received_s=received,
        )  # fmt: skip

    policy = Gavel()
    assert policy._spent(view([0], [500.0], [200.0])).tolist() == [[0.0, 0.0]]
    assert policy._spent(view([0], [900.0], [500.0]))[0, 0] == pytest.approx(300 / 400)
    early = policy._spent(view([0, 1], [1300.0, 100.0], [600.0, 50.0]))
    assert early[:, 0] == pytest.approx([400 / 800, 50 / 100])
    assert policy._spent(view([0, 1], [1600.0, 400.0], [900.0, 50.0])).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_gang_that_does_not_fit_lets_others_pass() -> None:
    view = view_of(np.array([[0.0, 5.0], [1.0, 0.0]]), [0, 0], [1, 4], [3], wants=np.array([4, 1]))
    assert serve_round(view, rigid(view), np.ones((2, 1)), np.zeros((2, 1))).tolist() == [NONE, 0]


def random_case(seed: int, jobs: int) -> View:
    rng = np.random.default_rng(seed)
    gpu, count = [0, 0, 0, 1, 1], [1, 2, 4, 1, 2]
    rate = rng.uniform(0.5, 2.0, (jobs, 5)) * np.array(count) ** rng.uniform(0.5, 1.0, (jobs, 1))
    rate[rng.random((jobs, 5)) < 0.15] = 0.0
    held = np.where(rng.random(jobs) < 0.5, NONE, rng.integers(0, 5, jobs))
    held = np.where(rate[np.arange(jobs), held] > 0, held, NONE)
    return view_of(
        rate, gpu, count, [4, 2], held=held, most=np.full(jobs, 2), restarts=rng.integers(0, 4, jobs),
        restart_s=np.full(jobs, 60.0), age_s=rng.uniform(30, 4000, jobs),
    )  # fmt: skip


def best_of_all(value: np.ndarray, view: View) -> float:
    best = 0.0
    for config in itertools.product(range(-1, value.shape[1]), repeat=len(view)):
        load = [0, 0]
        for c in config:
            if c >= 0:
                load[view.options.gpu[c]] += view.options.count[c]
        if load[0] <= 4 and load[1] <= 2 and all(c < 0 or value[j, c] > 0 for j, c in enumerate(config)):
            best = max(best, worth(value, np.array(config)))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_sia_is_the_best_of_all_choices(seed: int) -> None:
    view = random_case(seed, 5)
    value = values(view)
    best = best_of_all(value, view)
    start, bound = choose_by_prices(value, view.options.gpu, view.options.count, view.options.capacity)
    assert worth(value, start) <= best + 1e-9 <= bound + 1e-6
    solved = choose_exactly(value, view, start, 10.0)
    assert solved.proven
    assert worth(value, solved.config) == pytest.approx(best, rel=2e-4)
    by_tables = choose_by_tables(value, view.options.gpu, view.options.count, view.options.capacity)
    assert worth(value, by_tables) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("cells", [0, 10**9])
@pytest.mark.parametrize("seed", range(4))
def test_sia_keeps_capacity_and_gap_by_both_ways(monkeypatch: pytest.MonkeyPatch, seed: int, cells: int) -> None:
    monkeypatch.setattr(sia, "CELLS", cells)
    view = random_case(seed, 40)
    policy = Sia(exact=True, limit_s=10.0)
    config = policy.decide(view).config
    chosen = config[config >= 0]
    load = np.bincount(view.options.gpu[chosen], view.options.count[chosen], minlength=2)
    assert (load <= view.options.capacity).all()
    assert worth(values(view), config) == pytest.approx(best_value(view), rel=2e-4)
    assert policy.worst_gap <= 2e-4


def test_the_prices_keep_the_capacity_and_say_their_gap() -> None:
    view = random_case(3, 60)
    policy = Sia(exact=False)
    config = policy.decide(view).config
    load = np.bincount(view.options.gpu[config[config >= 0]], view.options.count[config[config >= 0]], minlength=2)
    assert (load <= view.options.capacity).all()
    assert worth(values(view), config) >= (1 - policy.worst_gap) * best_value(view) - 1e-9


def best_value(view: View) -> float:
    value = values(view)
    start, _ = choose_by_prices(value, view.options.gpu, view.options.count, view.options.capacity)
    return worth(value, choose_exactly(value, view, start, 20.0).config)


def test_values_of_sia_worked_out() -> None:
    """A job of age 1000 s with one restart of 100 s: r = (1000 - 100) / (1000 + 100) = 9/11 away from where it is."""
    view = view_of(
        np.array([[2.0, 3.0, 8.0]]), [0, 0, 0], [1, 2, 4], [4], held=np.array([1]), most=np.array([2]),
        restarts=np.array([1]), restart_s=np.array([100.0]),
    )  # fmt: skip
    expected = [WAITING - (9 / 11) ** -0.5, WAITING - 1.5**-0.5, WAITING - (4 * 9 / 11) ** -0.5]
    assert values(view)[0] == pytest.approx(expected)


def test_a_job_may_double_at_most() -> None:
    view = view_of(np.array([[1.0, 2.0, 4.0]]), [0, 0, 0], [1, 2, 4], [4], most=np.array([1]))
    assert values(view)[0, 2] == 0
    assert Sia().decide(view).config.tolist() == [1]
    fresh = view_of(np.array([[1.0, 2.0, 4.0]]), [0, 0, 0], [1, 2, 4], [4])
    assert Sia().decide(fresh).config.tolist() == [0]
