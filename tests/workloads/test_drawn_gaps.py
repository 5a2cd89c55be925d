"""Distributions of the gaps between drawn arrivals: mean and variation as asked, and how like Philly's they are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.draws import parse_arrivals, stream
from cotenant.workloads.jobs.generate import Workload, generate
from cotenant.workloads.jobs.registry import read_trace

CLASSES = {"image": ("alexnet",), "language": ("gnmt",), "speech": ("m5",)}
N = 40_000


def no_file(spec: str) -> np.ndarray:
    raise AssertionError(spec)


def gaps(text: str, rate_per_s: float, seed: int, n: int = N) -> np.ndarray:
    return np.diff(parse_arrivals(text, no_file)(stream(seed, "arrivals"), n, rate_per_s), prepend=0.0)


@settings(max_examples=25, deadline=None)
@given(cv=st.floats(0.05, 1000), rate=st.floats(1e-4, 10), seed=st.integers(0, 99))
def test_logs_of_lognormal_gaps_are_normal_with_the_asked_mean_and_cv(cv: float, rate: float, seed: int) -> None:
    logs = np.log(np.maximum(gaps(f"lognormal:{cv!r}", rate, seed), 1e-300))
    # CV^2 = exp(sigma^2) - 1 and mean = exp(mu + sigma^2 / 2). Gaps far below the time so far lose digits in the sum,
    # so only the upper half of a wide distribution is compared.
    sigma = math.sqrt(math.log(1 + cv * cv))
    mu = -math.log(rate) - sigma * sigma / 2
    assert abs(np.median(logs) - mu) < 5 * 1.2533 * sigma / math.sqrt(N)
    assert np.quantile(logs, 0.9) == pytest.approx(mu + 1.2816 * sigma, abs=5 * 1.71 * sigma / math.sqrt(N))
    assert np.quantile(logs, 0.99) == pytest.approx(mu + 2.3263 * sigma, abs=5 * 3.74 * sigma / math.sqrt(N))


@settings(max_examples=25, deadline=None)
@given(cv=st.floats(0.05, 1.5), rate=st.floats(1e-4, 10), seed=st.integers(0, 99))
def test_lognormal_gaps_have_the_asked_rate_and_cv(cv: float, rate: float, seed: int) -> None:
    found = gaps(f"lognormal:{cv!r}", rate, seed)
    assert found.mean() == pytest.approx(1 / rate, rel=5 * cv / math.sqrt(N))
    # The standard error of a sample's CV is half of sqrt((kurtosis - 1) / N), which is large for wide distributions.
    # Here exp(sigma^2) = 1 + CV^2.
    e = 1 + cv * cv
    kurtosis = e**4 + 2 * e**3 + 3 * e**2 - 3
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.01 + 8 * 0.5 * math.sqrt((kurtosis - 1) / N))


@settings(max_examples=25, deadline=None)
@given(
    share=st.floats(0.1, 0.9), ratio=st.floats(1, 20), run=st.floats(1, 8), rate=st.floats(1e-4, 10),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_hyperexponential_gaps_have_the_asked_rate_and_cv(
    share: float, ratio: float, run: float, rate: float, seed: int
) -> None:
    found = gaps(f"hyperexp:{share!r},1,{run!r};{1 - share!r},{ratio!r}", rate, seed)
    # E[g] = sum w m and E[g^2] = 2 sum w m^2, which runs do not change.
    mean = share + (1 - share) * ratio
    cv = math.sqrt(2 * (share + (1 - share) * ratio**2) / mean**2 - 1)
    assert found.mean() == pytest.approx(1 / rate, rel=5 * cv * math.sqrt(2 * run / N))
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.15)


def test_runs_keep_gaps_of_one_mean_together() -> None:
    # The means are so far apart that the length of a gap tells its phase.
    for run in (1.0, 25.0):
        slow = gaps(f"hyperexp:50,1,{run};50,100000,{run}", 1.0, 3, 200_000) > 2e-4
        assert slow.mean() == pytest.approx(0.5, abs=0.02)
        # A run ends after each gap with probability 1/run, and every second time the next run has the other phase.
        assert (slow[1:] != slow[:-1]).mean() == pytest.approx(0.5 / run, rel=0.08)


@pytest.mark.parametrize(
    "text",
    ["lognormal", "lognormal:", "lognormal:0", "lognormal:nan", "lognormal:1001", "hyperexp:", "hyperexp:1",
     "hyperexp:1,0", "hyperexp:1,2;3", "hyperexp:1,2,0.5", "hyperexp:1,2,3,4", "hyperexp:1,nan",
     "hyperexp:-1,2", "hyperexp:1,2,1e9", "hyperexp:1e-300,1e-300"],
)  # fmt: skip
def test_wrong_gaps(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arrivals(text, no_file)
    assert caught.value.field == "arrivals"


def test_jobs_like_philly_do_not_arrive_in_heaps() -> None:
    jobs = generate(Workload(20_000, like="philly"), CLASSES).trace.jobs
    assert len(np.unique(jobs.arrival_s)) > 19_900


def test_philly_gaps_against_the_list(shared: Path) -> None:
    real = np.diff(read_trace(f"philly:{shared / 'data/jobs/philly/jobs.csv'}").jobs.arrival_s)
    jobs = generate(Workload(len(real) + 1, like="philly", seed=1), CLASSES).trace.jobs
    drawn = np.diff(np.floor(jobs.arrival_s))  # the list has whole seconds
    grid = [0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999]
    assert np.quantile(drawn, grid) == pytest.approx(np.quantile(real, grid), rel=0.3, abs=1)
    assert drawn.mean() == pytest.approx(real.mean(), rel=0.25)
    # 14.1 in the list; the value of a sample depends on its 30 or so longest gaps
    assert 8 < drawn.std() / drawn.mean() < 20
    assert (drawn == 0).mean() == pytest.approx((real == 0).mean(), abs=0.02)


def _unevenness(times_s: np.ndarray, width_s: float) -> float:
    counts = np.bincount((times_s // width_s).astype(int))
    return float(counts.var() / counts.mean())


def test_philly_minutes_and_hours_are_as_uneven_as_the_lists(shared: Path) -> None:
    real = read_trace(f"philly:{shared / 'data/jobs/philly/jobs.csv'}").jobs.arrival_s
    drawn = generate(Workload(len(real), like="philly", seed=1), CLASSES).trace.jobs.arrival_s
    for width_s, rel in ((60.0, 0.25), (3600.0, 0.35)):
        assert _unevenness(drawn, width_s) == pytest.approx(_unevenness(real, width_s), rel=rel)
