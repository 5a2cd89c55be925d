"""Ordering keys, the Gittins index and the sort against values worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.policy.compiled import bare
from cotenant.policy.jobs.arrays import JOB
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.policy.jobs.ordering import ORDERINGS, gittins_table, key, sort_jobs


@bare
def _sort(order: Any, n: int, jobs: Any, scratch: Any) -> None:
    sort_jobs(order, n, jobs, scratch)  # compiled kernels can only be called from compiled code


def test_gittins_index_of_two_equally_likely_sizes() -> None:
    # The size X is 1 or 10 with equal probability. A new job: stopping at 1 gives P = 1/2 and E[min(X, 1)] = 1, so 0.5;
    # stopping at 10 gives 1 / 5.5. A job that has received 1: 9 remain, so 1/9.
    attained, index = gittins_table(np.array([1.0, 10.0]))
    at = dict(zip(attained.tolist(), index.tolist(), strict=True))
    assert at[0.0] == pytest.approx(0.5)
    assert at[1.0] == pytest.approx(1 / 9)
    assert at[10.0] == 0.0  # received more than any known job


def test_gittins_prefers_the_young_where_most_jobs_are_short() -> None:
    attained, index = gittins_table(np.array([60.0] * 90 + [36000.0] * 10))
    young, old = index[0], index[np.searchsorted(attained, 60.0)]
    assert young > old > 0


@given(st.lists(st.integers(1, 10**5), min_size=2, max_size=25))
def test_gittins_table_against_its_definition(sizes: list[int]) -> None:
    attained, index = gittins_table(np.array(sizes, float), points=len(sizes))
    ends = np.unique(np.quantile(sizes, np.linspace(0, 1, len(sizes)), method="lower"))
    for a, value in zip(attained, index, strict=True):
        alive = [x for x in sizes if x > a]
        best = 0.0
        for end in ends[ends > a]:
            done = sum(x <= end for x in alive)
            spent = sum(min(x - a, end - a) for x in alive)
            best = max(best, done / spent)
        assert value == pytest.approx(best if alive else 0.0, rel=1e-9)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=60), st.randoms())
def test_sort_is_by_rank_then_key_then_number(values: list[tuple[int, int]], random: object) -> None:
    n = len(values)
    jobs = np.zeros(n, JOB)
    jobs["rank"] = [v[0] for v in values]
    jobs["key"] = [v[1] for v in values]
    order = np.arange(n)
    random.shuffle(order)  # type: ignore[attr-defined]
    _sort(order, n, jobs, np.zeros(n, np.int64))
    assert order.tolist() == sorted(range(n), key=lambda j: (-values[j][0], values[j][1], j))


def _key(name: str, now: float = 1000.0, active: int = 40, **job: float) -> float:
    from types import SimpleNamespace

    types = SimpleNamespace(gpus=4, part_milli=0, key_s=2.0, isolated_s=3.0, dominant=0.25, size=0.5)
    state = SimpleNamespace(type=0, arrival_s=100.0, total=50.0, done=20.0, attained_s=600.0)
    for field, value in job.items():
        setattr(state, field, value)
    context = JobPolicy(ordering=name).context(np.array([1.0, 10.0]), cluster_gpus=32.0)
    demand = SimpleNamespace(type=[types])
    return float(key.py_func(ORDERINGS[name].code, now, active, 0, [state], demand, context))


def test_keys() -> None:
    assert _key("fifo") == 0
    assert _key("sjf") == 100  # 50 iterations of 2 s
    assert _key("srtf") == 60  # 30 iterations are left
    assert _key("srsf") == 240  # the job has 4 GPUs
    assert _key("las") == 2400  # 600 s on 4 GPUs
    assert _key("las-queues") == 0
    assert _key("las-queues", attained_s=900.0) == 1  # exactly one GPU-hour, which is the limit of the first queue
    assert _key("las-queues", attained_s=9000.0) == 2
    assert _key("gittins", attained_s=0.25) == pytest.approx(-1 / 9)  # one GPU-second has been received
    assert _key("ftf-public") == pytest.approx((900 + 60) / 150)
    # 40 unfinished jobs on 32 GPUs: with a share of 1/40 the work on 4 GPUs takes 5 times the isolated 150 s.
    assert _key("ftf") == pytest.approx(-(900 + 60) / (150 * 5))
    # a share never makes a job faster than it is alone
    assert _key("ftf", active=2) == pytest.approx(-(900 + 60) / 150)
    assert _key("drf") == 0.25
    assert _key("tetris") == 30
    assert _key("smallest-gang") == 4


def test_codes_are_distinct_and_complete() -> None:
    assert sorted(o.code for o in ORDERINGS.values()) == list(range(len(ORDERINGS)))
    for a, b in itertools.pairwise(ORDERINGS):
        assert ORDERINGS[a].summary != ORDERINGS[b].summary
