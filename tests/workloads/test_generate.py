"""Synthetic traces: what was asked for is what comes out, and the seed decides all of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.draws import parse_arrivals, parse_durations, parse_gpu_mix, stream
from cotenant.workloads.jobs.generate import Workload, generate
from cotenant.workloads.jobs.presets import PRESETS
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.jobs.write import write_native

CLASSES = {"image": ("alexnet", "res18"), "language": ("gnmt",), "speech": ("m5",)}
N = 40_000


def no_file(spec: str) -> np.ndarray:
    raise AssertionError(spec)


def test_two_part_durations_are_the_specified_mix() -> None:
    seconds = parse_durations("two-part", no_file)(stream(1, "durations"), N)
    exponent = np.log10(seconds / 60)
    assert exponent.min() >= 1.5
    assert exponent.max() <= 4
    below = exponent < 3
    assert abs(below.mean() - 0.8) < 4 * math.sqrt(0.16 / N)
    # The exponents are uniform, with means 2.25 and 3.5. Each mean must be within four standard errors.
    assert abs(exponent[below].mean() - 2.25) < 4 * (1.5 / math.sqrt(12)) / math.sqrt(below.sum())
    assert abs(exponent[~below].mean() - 3.5) < 4 * (1 / math.sqrt(12)) / math.sqrt((~below).sum())
    # the mean of 10^U(a, b) is (10^b - 10^a) / ((b - a) ln 10)
    low = (10**3 - 10**1.5) / (1.5 * math.log(10))
    high = (10**4 - 10**3) / math.log(10)
    assert seconds.mean() == pytest.approx(60 * (0.8 * low + 0.2 * high), rel=0.03)


def test_short_two_part_and_lognormal() -> None:
    short = np.log10(parse_durations("two-part-short", no_file)(stream(1, "durations"), N) / 60)
    assert (short.min() >= 1.5, short.max() <= 2.7) == (True, True)
    assert abs((short < 2.5).mean() - 0.8) < 4 * math.sqrt(0.16 / N)
    logs = np.log(parse_durations("lognormal:20min:1.5", no_file)(stream(1, "durations"), N))
    assert abs(logs.mean() - math.log(1200)) < 4 * 1.5 / math.sqrt(N)
    assert logs.std() == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1.0), ("bursty:4", 4.0), ("bursty:0.5", 0.5)])
def test_arrivals_have_their_rate_and_variation(text: str, cv: float) -> None:
    times = parse_arrivals(text, no_file)(stream(2, "arrivals"), N, 0.01)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert abs(gaps.mean() - 100) < 4 * 100 * cv / math.sqrt(N)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_whole_second_and_poisson_gap_arrivals() -> None:
    times = parse_arrivals("poisson-seconds", no_file)(stream(2, "arrivals"), 1000, 8 / 3600)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps == np.floor(gaps)).all()
    assert gaps.min() >= 1
    # With poisson-gap, the gaps themselves are Poisson-distributed, with half the mean in the first third.
    gaps = np.diff(parse_arrivals("poisson-gap", no_file)(stream(2, "arrivals"), 9000, 1 / 60), prepend=0.0)
    assert abs(gaps[:3000].mean() - 30) < 4 * math.sqrt(30 / 3000)
    assert abs(gaps[3000:].mean() - 60) < 4 * math.sqrt(60 / 6000)


def test_gpu_mix() -> None:
    counts, shares = parse_gpu_mix("1:70,2:10,4:15,0.5:5")
    assert counts.tolist() == [1, 2, 4, 0.5]
    assert shares.tolist() == [0.7, 0.1, 0.15, 0.05]
    jobs = generate(Workload(N, gpu_mix="1:70,2:10,4:15,8:5"), CLASSES).trace.jobs
    for count, share in ((1, 0.7), (2, 0.1), (4, 0.15), (8, 0.05)):
        assert abs((jobs.gpus == count).mean() - share) < 4 * math.sqrt(share * (1 - share) / N)


def test_load_sets_the_rate() -> None:
    workload = Workload(5000, load=0.9, cluster_gpus=128, arrivals="poisson")
    made = generate(workload, CLASSES)
    jobs = made.trace.jobs
    work = float((jobs.gpus * jobs.duration_s).sum())
    # GPU-seconds that jobs ask for per second, divided by 128 GPUs
    assert work / len(jobs) * made.rate_per_s / 128 == pytest.approx(0.9)
    assert made.summary(128)["offered_load"] == pytest.approx(0.9)
    # within four standard errors of the time span
    assert work / jobs.arrival_s[-1] / 128 == pytest.approx(0.9, rel=0.06)
    twice = generate(Workload(5000, load=1.8, cluster_gpus=128, arrivals="poisson"), CLASSES).trace.jobs
    assert twice.arrival_s == pytest.approx(jobs.arrival_s / 2, abs=1e-3)


def test_same_seed_same_bytes_and_parts_are_independent(tmp_path: Path) -> None:
    for suffix in ("csv", "parquet"):
        for name in ("one", "two"):
            write_native(tmp_path / f"{name}.{suffix}", lambda: generate(Workload(500, seed=9), CLASSES).trace.jobs)
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
    first = generate(Workload(500, seed=9), CLASSES).trace.jobs
    again = read_trace(str(tmp_path / "one.csv")).jobs
    assert again.arrival_s.tolist() == first.arrival_s.tolist()
    assert again.duration_s.tolist() == first.duration_s.tolist()
    other = generate(Workload(500, seed=9, arrivals="bursty:3", split="50,0,50"), CLASSES).trace.jobs
    assert other.duration_s.tolist() == first.duration_s.tolist()
    assert other.gpus.tolist() == first.gpus.tolist()
    assert generate(Workload(500, seed=10), CLASSES).trace.jobs.duration_s.tolist() != first.duration_s.tolist()


def test_likenesses() -> None:
    miso = generate(Workload(20_000, like="miso"), CLASSES).trace.jobs
    assert set(miso.gpus.tolist()) == {1.0}
    # The 100 public jobs take 120 to 6082 s, with mean 770.3 and median 244.5. Of them, 12 are transformers with batch
    # 32.
    assert (miso.duration_s.min(), miso.duration_s.max() <= 6082) == (120.0, True)
    assert miso.duration_s.mean() == pytest.approx(770.3, rel=0.06)
    assert np.median(miso.duration_s) == pytest.approx(244.5, rel=0.06)
    assert abs((miso.model == "transformer_train32").mean() - 0.12) < 4 * math.sqrt(0.12 * 0.88 / 20_000)
    philly = generate(Workload(50_000, like="philly"), CLASSES).trace.jobs
    # The public job list: the median is 957 s on one GPU, 94.5 % of jobs use one GPU, and 6214e9 has 56.8 % of the
    # jobs.
    assert np.median(philly.duration_s[philly.gpus == 1]) == pytest.approx(957, rel=0.06)
    assert abs((philly.gpus == 1).mean() - 0.9449) < 0.005
    assert abs((philly.tenant == "6214e9").mean() - 0.568) < 0.01


def test_philly_likeness_against_the_list(shared: Path) -> None:
    real = read_trace(f"philly:{shared / 'data/jobs/philly/jobs.csv'}").jobs
    drawn = generate(Workload(200_000, like="philly"), CLASSES).trace.jobs
    for single in (True, False):
        a, b = real.duration_s[(real.gpus == 1) == single], drawn.duration_s[(drawn.gpus == 1) == single]
        grid = np.linspace(0.05, 0.95, 19)
        assert np.quantile(b, grid) == pytest.approx(np.quantile(a, grid), rel=0.2)
        assert b.mean() == pytest.approx(a.mean(), rel=0.1)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(0), "0 jobs is not between 1"),
        (Workload(5, like="alibaba"), "known: synergy, gavel, sia, miso, philly"),
        (Workload(5, rate_per_s=1, load=0.5, cluster_gpus=8), "--rate or --load, not both"),
        (Workload(5, rate_per_s=0.0), "below 1e9 jobs per second"),
        (Workload(5, load=0.5), "add --cluster"),
        (Workload(5, load=0.0, cluster_gpus=8), "not above 0"),
        (Workload(5, arrivals="static", load=0.5, cluster_gpus=8), "static arrivals have no rate"),
        (Workload(5, split="1,2"), "is not a split"),
        (Workload(5, gpu_mix="2.5:1"), "not GPUS:WEIGHT"),
        (Workload(5, durations="trace:absent.csv"), "No such file"),
        (Workload(5, arrivals="trace:"), "unknown arrivals"),
    ],
)
def test_bad_workloads(workload: Workload, message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(workload, CLASSES)


def test_presets_are_whole() -> None:
    for preset in PRESETS.values():
        parse_gpu_mix(preset.gpu_mix)
        parse_arrivals(preset.arrivals, no_file)
        for table in preset.quantiles:
            assert len(table) == len(preset.probabilities)
            assert list(table) == sorted(table)


def test_fleet_smoke_is_short_jobs_that_fit_four_nodes_of_two_gpus() -> None:
    from cotenant.profiles.training.tables import load_profiles

    profiles = load_profiles()
    made = generate(Workload(400, like="fleet-smoke", seed=3), profiles.classes, profiles.iteration_s)
    jobs = made.trace.jobs
    assert jobs.duration_s.min() >= 20
    assert jobs.duration_s.max() <= 120
    assert set(jobs.gpus.tolist()) == {1.0, 2.0}
    assert set(jobs.model.tolist()) <= set(profiles.models)
    per_gpu = jobs.cpus / jobs.gpus
    assert set(per_gpu.tolist()) == {1.0, 5.0}  # a job that wants five cores and one that wants one share a node of six
    assert (jobs.memory_bytes <= 62.5e9 * jobs.gpus).all()
