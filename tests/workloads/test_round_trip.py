"""Writing the native format and reading it back gives the same jobs, to the last bit."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.gpus import CATALOG
from cotenant.core.work import Jobs
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.jobs.write import write_native

positive = st.floats(min_value=1e-6, max_value=1e10, allow_nan=False)
stated = st.one_of(st.just(math.nan), positive)
word = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8).map(str.strip)
gpus = st.one_of(st.integers(1, 64).map(float), st.floats(min_value=0.001, max_value=0.999))
accepted = st.lists(st.sampled_from(sorted(CATALOG)), max_size=3, unique=True).map("|".join)


@st.composite
def job_lists(draw: st.DrawFn) -> Jobs:
    ids = draw(st.lists(word.filter(bool), min_size=1, max_size=12, unique=True))
    n = len(ids)

    def column(strategy: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(strategy, min_size=n, max_size=n))

    durations = column(stated)
    iterations = [draw(positive) if math.isnan(d) else draw(stated) for d in durations]  # type: ignore[call-overload]
    return Jobs.build(
        n,
        id=ids,
        arrival_s=np.sort(np.array(column(st.floats(0, 1e10)))),
        gpus=column(gpus),
        duration_s=durations,
        iterations=iterations,
        model=column(word),
        tenant=column(word),
        priority=column(st.integers(-(2**53), 2**53)),
        cpus=column(stated),
        memory_bytes=column(stated),
        deadline_s=column(stated),
        gpu_models=column(accepted),
    )


def assert_same(left: Jobs, right: Jobs) -> None:
    for field in fields(Jobs):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if a.dtype == np.float64:
            assert np.array_equal(a, b, equal_nan=True), field.name
        else:
            assert a.tolist() == b.tolist(), field.name


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=job_lists())
def test_round_trip(jobs: Jobs, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{suffix}"
    write_native(path, lambda: jobs)
    first = path.read_bytes()
    again = read_trace(str(path)).jobs
    assert_same(jobs, again)
    write_native(path, lambda: again)
    assert path.read_bytes() == first


def test_columns_that_state_nothing_are_not_written(tmp_path: Path) -> None:
    jobs = Jobs.build(2, id=["a", "b"], arrival_s=[0, 1.5], gpus=[1, 2], duration_s=[3, 4])
    write_native(tmp_path / "t.csv", lambda: jobs)
    assert (tmp_path / "t.csv").read_text() == "id,arrival_s,gpus,duration_s\na,0.0,1,3\nb,1.5,2,4\n"


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path) -> None:
    def fail() -> Jobs:
        raise InputError("no")

    kept = tmp_path / "t.csv"
    kept.write_text("old")
    with pytest.raises(InputError):
        write_native(kept, fail)
    assert kept.read_text() == "old"
    assert list(tmp_path.iterdir()) == [kept]
    with pytest.raises(InputError, match="cannot write"):
        write_native(tmp_path / "absent" / "t.csv", fail)
    with pytest.raises(InputError, match=r"ends in \.csv or \.parquet"):
        write_native(tmp_path / "t.txt", fail)
