"""Numbers beyond any trace, quotes that do not match, cells of any length, columns of any type: one sentence each."""

from __future__ import annotations

import datetime
from pathlib import Path

import polars as pl
import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.clusters.forms import parse_cluster
from cotenant.workloads.jobs.generate import Workload, generate
from cotenant.workloads.jobs.select import load_trace
from cotenant.workloads.table import check_path
from cotenant.workloads.trace_options import TraceOptions

HEADER = "id,arrival_s,gpus,duration_s,model\n"
CLASSES = {"image": ["res50"], "language": ["lstm"], "speech": ["m5"]}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "t.csv").write_text(f"{HEADER}a,0,1,600,res50\nb,60,2,900,lstm\n", encoding="utf-8")
    return f"native:{tmp_path / 't.csv'}"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (TraceOptions(rate_scale=1e-300), "rate-scale"),
        (TraceOptions(rate_scale=5e-324), "rate-scale"),
        (TraceOptions(arrivals="poisson", rate_per_s=1e-300), "rate"),
        (TraceOptions(arrivals="poisson-gap", rate_per_s=1e-30), "rate"),
        (TraceOptions(arrivals="bursty:2", rate_per_s=1e300), "rate"),
        (TraceOptions(durations="lognormal:1e300:10"), "durations"),
        (TraceOptions(durations="lognormal:1e12:0"), "durations"),
        (TraceOptions(split_mode="randm"), "split-mode"),
    ],
)
def test_options_that_lead_beyond_any_trace(trace: str, options: TraceOptions, field: str) -> None:
    with pytest.raises(InputError) as caught:
        load_trace(trace, options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("workload", "field"),
    [
        (Workload(jobs=2, rate_per_s=1e-300), "rate"),
        (Workload(jobs=2, arrivals="poisson-gap", rate_per_s=1e-30), "rate"),
        (Workload(jobs=2, durations="lognormal:1e200:1"), "durations"),
        (Workload(jobs=1000, rate_per_s=1e-11), "arrivals"),
    ],
)
def test_workloads_that_lead_beyond_any_trace(workload: Workload, field: str) -> None:
    with pytest.raises(InputError) as caught:
        generate(workload, CLASSES)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('a,0,1,600,x\n"b,60,1,600,x\nc,70,1,600,x\n', 3),  # a quoted cell that is never closed
        ('a,0,1,600,x\nb,60,1,600,"x\n', 3),
        ('"a\nb",0,1,600,x\nb"x,0,1,600,x\nc,60,1,600,x\n', 4),  # a quote inside a cell, after a cell of two lines
        ('a,0,1,600,x\nb,0,1,600,"x"y\n', 3),
    ],
)
def test_quotes_that_do_not_match_are_found(tmp_path: Path, rows: str, line: int) -> None:
    (tmp_path / "t.csv").write_text(HEADER + rows, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_trace(f"native:{tmp_path / 't.csv'}")
    assert caught.value.line == line
    assert "quote" in caught.value.message


def test_a_cell_of_any_length_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"{HEADER}a,0,1,600,x\nb,0,1,{'6' * 300_000},x\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 3, field duration_s"):
        load_trace(f"native:{tmp_path / 't.csv'}")


@pytest.mark.parametrize("ids", [[["a"], ["b"]], [b"\xff", b"b"], [{"x": 1}, {"x": 2}]])
def test_ids_that_are_no_text_are_refused(tmp_path: Path, ids: list[object]) -> None:
    table = pl.DataFrame({"id": ids, "arrival_s": [0.0, 1.0], "gpus": [1, 1], "duration_s": [5, 6]})
    table.write_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError) as caught:
        load_trace(f"native:{tmp_path / 't.parquet'}")
    assert caught.value.field == "id"


@pytest.mark.parametrize("value", [[1.0], {"x": 1}, datetime.timedelta(1), b"1\xff"], ids=str)
@pytest.mark.parametrize("name", ["arrival_s", "gpus", "duration_s"])
def test_amounts_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: object) -> None:
    table = pl.DataFrame({"id": ["a"], "arrival_s": [0.0], "gpus": [1], "duration_s": [5], name: [value]})
    table.write_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError) as caught:
        load_trace(f"native:{tmp_path / 't.parquet'}")
    assert caught.value.field == name


def test_a_cluster_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 5000, encoding="utf-8")
    with pytest.raises(InputError, match=r"deep\.yaml"):
        parse_cluster(str(tmp_path / "deep.yaml"))


@pytest.mark.parametrize("gpus", ["0.0009", "1e-9", "5e-324"])
def test_parts_finer_than_policies_count_are_refused(tmp_path: Path, gpus: str) -> None:
    (tmp_path / "t.csv").write_text(f"{HEADER}a,0,0.001,600,res50\nb,0,{gpus},600,res50\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 3, field gpus: .* smallest part"):
        load_trace(f"native:{tmp_path / 't.csv'}")


def test_an_empty_path_is_said_to_be_empty() -> None:
    with pytest.raises(InputError, match="its name is empty"):
        check_path("")
