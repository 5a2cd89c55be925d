"""Arrival processes and readers of recorded requests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.workloads.requests.arrivals import Arrivals, draw, fit_to, parse_arrivals
from cotenant.workloads.requests.readers import disb_clients, read_requests


def gaps_cv(times: np.ndarray) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1.0), ("constant", 0.0), ("gamma:3", 3.0), ("gamma:0.5", 0.5)])
def test_rate_and_burstiness(text: str, cv: float) -> None:
    times = draw(parse_arrivals(text), 100.0, 1000.0, np.random.default_rng(5))
    assert len(times) == pytest.approx(100_000, rel=0.03)
    assert gaps_cv(times) == pytest.approx(cv, abs=0.05)


def test_mmpp_keeps_the_mean_rate_and_is_bursty() -> None:
    times = draw(parse_arrivals("mmpp:1,5;9,1"), 200.0, 3000.0, np.random.default_rng(5))
    assert len(times) == pytest.approx(600_000, rel=0.06)
    # Rates are 3/7 and 27/7 of the mean, and one sixth of the time is in the burst. So counts per second vary far more
    # than Poisson counts.
    counts = np.bincount(times.astype(int), minlength=3000)
    assert counts.var() / counts.mean() > 50


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(["poisson", "constant", "gamma:2", "mmpp:1,1;4,0.3"]), rate=st.floats(0.5, 500),
    duration=st.floats(0.5, 30), seed=st.integers(0, 9),
)  # fmt: skip
def test_times_are_sorted_in_range_and_seeded(text: str, rate: float, duration: float, seed: int) -> None:
    times = draw(parse_arrivals(text), rate, duration, np.random.default_rng(seed))
    again = draw(parse_arrivals(text), rate, duration, np.random.default_rng(seed))
    assert np.array_equal(times, again)
    assert (np.diff(times) >= 0).all()
    assert len(times) == 0 or (times[0] >= 0 and times[-1] < duration)


@pytest.mark.parametrize(
    "text", ["", "poison", "gamma:0", "gamma:x", "closed:0", "closed:-3", "mmpp:1,1", "mmpp:1;2", "trace:azure-llm",
             "poisson:3", "gamma:nan"],
)  # fmt: skip
def test_wrong_processes(text: str) -> None:
    with pytest.raises(InputError):
        parse_arrivals(text)


def test_bursts_are_five_seconds_and_one_of_six_times_as_much() -> None:
    assert parse_arrivals("bursts") == parse_arrivals("mmpp:1,5;6,1")
    with pytest.raises(InputError, match="write poisson, constant, bursts, gamma:CV"):
        parse_arrivals("bursts:3")


@pytest.mark.parametrize("text", ["poisson", "constant", "gamma:2.5", "mmpp:1,5;9,1", "closed:4", "trace:disb:a.json"])
def test_text_and_back(text: str) -> None:
    assert str(parse_arrivals(text)) == text


@pytest.mark.parametrize(("rate", "duration"), [(0.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1e9, 1e9)])
def test_wrong_amounts(rate: float, duration: float) -> None:
    with pytest.raises(InputError):
        draw(Arrivals("poisson"), rate, duration, np.random.default_rng(0))


def test_fitting_keeps_the_shape() -> None:
    times = np.array([10.0, 11.0, 14.0])
    # Three requests span 4 s and are followed by a mean gap of 2 s. So at 0.5/s one round lasts 6 s.
    assert fit_to(times, 0.5, 12.0) == pytest.approx([0, 1, 4, 6, 7, 10])
    assert fit_to(times, 1.0, 6.0) == pytest.approx([0, 0.5, 2, 3, 3.5, 5])
    assert fit_to(times, None, 5.0) == pytest.approx([0, 1, 4])


@pytest.mark.parametrize(
    "times",
    [
        ("2024-05-10 00:00:00.500000+00:00", "2024-05-10 00:00:02+00:00"),
        ("2024-10-15T12:00:00.250Z", "2024-10-15T12:00:01.750Z"),
    ],
)
def test_azure_s_later_traces_have_zones(tmp_path: Path, times: tuple[str, str]) -> None:
    path = tmp_path / "later.csv"
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{time},1,2" for time in times), "")))
    assert read_requests("azure-llm", path).times_s.tolist() == pytest.approx([0.0, 1.5])


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:50.0000000,1,1\n"
    )
    found = read_requests("azure-llm", path)
    assert found.times_s == pytest.approx([0.0, 3.31941, 4.314579])
    assert found.remarks == ("1 request was out of order; sorted by time",)


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 1000, "input_length": 3}\n{"timestamp": 1000}\n{"timestamp": 4500}\n')
    assert list(read_requests("mooncake", path).times_s) == [0.0, 0.0, 3.5]


def test_offsets_repeat_every_minute(tmp_path: Path) -> None:
    path = tmp_path / "o.txt"
    path.write_text("500\n30000\n59999\n")
    found = read_requests("offsets-ms", path)
    assert fit_to(found.times_s, None, 91.0, found.span_s) == pytest.approx([0.5, 30.0, 59.999, 60.5, 90.0])


def test_servegen_windows(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("0,2.0,1.5,Gamma,1,1\n600,0,0,,0,0\n1200,10,0.7,Gamma,1,1\n")
    times = read_requests("servegen", path, seed=1).times_s
    counts = np.histogram(times, [0, 600, 1200, 1800])[0]
    assert counts[0] == pytest.approx(1200, rel=0.15)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(6000, rel=0.05)
    assert gaps_cv(times[times > 1200]) == pytest.approx(0.7, abs=0.05)


def test_servegen_archive_adds_clients_up(tmp_path: Path) -> None:
    path = tmp_path / "c.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for i in range(3):
            text = b"0,5,1,Gamma,1,1\n600,5,1,Gamma,1,1\n"
            info = tarfile.TarInfo(f"x/chunk-{i}-trace.csv")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    assert len(read_requests("servegen", path).times_s) == pytest.approx(3 * 5 * 1200, rel=0.05)


def test_disb_of_the_public_files(shared: Path) -> None:
    clients = {c.name: c for c in disb_clients(shared / "data" / "requests" / "disb" / "E.json")}
    assert len(clients) == 10
    assert str(clients["vgg19_rt"].arrivals) == "poisson"
    assert clients["vgg19_rt"].rate_rps == 20
    assert str(clients["vgg19_be"].arrivals) == "closed:1"


@pytest.mark.parametrize(("form", "name"), [("azure-llm", "conv.csv"), ("mooncake", "synthetic_trace.jsonl")])
def test_public_traces_read(shared: Path, form: str, name: str) -> None:
    path = shared / "data" / "requests" / form / name
    with path.open() as file:
        lines = sum(1 for _ in file) - (form == "azure-llm")
    times = read_requests(form, path).times_s
    assert len(times) == lines
    assert times[0] == 0.0


@pytest.mark.parametrize(
    ("form", "text", "line"),
    [
        ("azure-llm", "TIMESTAMP,x\nyesterday,1\n", 2),
        ("azure-llm", "WHEN,x\n", 1),
        ("mooncake", '{"timestamp": 1}\n{"timestamp": "nan"}\n', 2),
        ("mooncake", "[]\n", 1),
        ("offsets-ms", "10\n60000\n", 2),
        ("servegen", "0,1\n", 1),
        ("servegen", "0,nan,1\n", 1),
    ],
)
def test_wrong_files_name_the_line(tmp_path: Path, form: str, text: str, line: int) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_requests(form, path)
    assert caught.value.line == line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for form in ("azure-llm", "servegen"):
        with pytest.raises(InputError, match="cannot read"):
            read_requests(form, tmp_path / "none")
    with pytest.raises(InputError, match="unknown request format"):
        read_requests("har", tmp_path / "none")


# a mean of 150/s for two weeks
WEEKS = "".join(f"{600 * i},{rate},1,Gamma,1,1\n" for i, rate in enumerate([200, 100] * 1008))


def test_servegen_weeks_are_drawn_as_far_as_the_run_reaches(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(WEEKS)
    with pytest.raises(InputError, match="more than 50,000,000 requests"):
        read_requests("servegen", path)
    recorded = read_requests("servegen", path, seed=1, duration_s=1200.0)
    own = fit_to(recorded.times_s, None, 1200.0, recorded.span_s, recorded.total)
    assert np.histogram(own, [0, 600, 1200])[0] == pytest.approx([120_000, 60_000], rel=0.02)
    # A mean of 15/s makes time run ten times slower. The first window, twice as busy as the second, then lasts 6000 s.
    scaled = read_requests("servegen", path, seed=1, rate_rps=15.0, duration_s=9000.0)
    own = fit_to(scaled.times_s, 15.0, 9000.0, scaled.span_s, scaled.total)
    assert np.histogram(own, [0, 3000, 6000, 9000])[0] == pytest.approx([60_000, 60_000, 30_000], rel=0.02)


def test_a_longer_servegen_run_begins_alike(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(WEEKS)
    short, long = (read_requests("servegen", path, seed=4, duration_s=d).times_s for d in (300.0, 900.0))
    assert len(long) > len(short) > 1000
    assert (long[: len(short)] == short).all()


def test_servegen_windows_that_do_not_move_on(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("0,1,1\n0,1,1\n")
    with pytest.raises(InputError, match="one after another"):
        read_requests("servegen", path)


@pytest.mark.parametrize("text", ["gamma:1e9", "gamma:101"])
def test_gaps_without_end_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="coefficient of variation"):
        parse_arrivals(text)


def test_stays_far_shorter_than_the_run_are_refused() -> None:
    with pytest.raises(InputError, match="over 1,000,000 times"):
        draw(parse_arrivals("mmpp:1,1e-9;2,1e-9"), 10.0, 5.0, np.random.default_rng(0))
