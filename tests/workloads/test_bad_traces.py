"""Every kind of bad file is one sentence with file, line and field."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.select import load_trace
from cotenant.workloads.trace_options import TraceOptions

H = "id,arrival_s,gpus,duration_s\n"
PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)

# Name: (format, content, line, field, part of the message).
CASES: dict[str, tuple[str, str | bytes, int | None, str | None, str]] = {
    "missing column": ("native", "id,gpus,duration_s\na,1,1\n", 1, "arrival_s", "no column 'arrival_s'"),
    "no work column": ("native", "id,arrival_s,gpus\na,1,1\n", 1, "duration_s", "no column 'duration_s'"),
    "wrong separator": ("native", H.replace(",", ";") + "a;0;1;5\n", 1, None, "semicolons, not commas"),
    "tabs": ("philly", PHILLY.replace(",", "\t"), 1, None, "convert with: tr '\\t' , <"),
    "replay with tabs": ("synergy", "0\tgnmt\t36\t25993\t1\n", 1, None, "separated by tabs, not commas"),
    "replay with a short first row": ("synergy", "0,gnmt,36\n", 1, None, "the row has 3 cells instead of 5"),
    "column twice": ("native", "id,id,arrival_s,gpus,duration_s\na,a,0,1,5\n", 1, "id", "names 'id' twice"),
    "negative duration": ("native", H + "a,0,1,5\nb,0,1,-5\n", 3, "duration_s", "'-5' must be above 0"),
    "NaN duration": ("native", H + "a,0,1,NaN\n", 2, "duration_s", "'NaN' is not a finite number"),
    "infinite duration": ("native", H + "a,0,1,inf\n", 2, "duration_s", "'inf' is not a finite number"),
    "zero duration": ("native", H + "a,0,1,0\n", 2, "duration_s", "'0' must be above 0"),
    "absurd duration": ("native", H + "a,0,1,1e300\n", 2, "duration_s", "above the maximum"),
    "no work": ("native", H + "a,0,1,\n", 2, "duration_s", "neither duration_s nor iterations"),
    "text for a number": ("native", H + "a,0,1,five\n", 2, "duration_s", "'five' is not a finite number"),
    "zero GPUs": ("native", H + "a,0,0,5\n", 2, "gpus", "'0' must be above 0"),
    "negative GPUs": ("native", H + "a,0,-1,5\n", 2, "gpus", "'-1' must be at least 0"),
    "absurd GPUs": ("native", H + "a,0,1000000,5\n", 2, "gpus", "'1000000' is above the maximum of 100000"),
    "half a GPU too many": ("native", H + "a,0,2.5,5\n", 2, "gpus", "'2.5' GPUs is neither a whole number"),
    "negative arrival": ("native", H + "a,-1,1,5\n", 2, "arrival_s", "'-1' must be at least 0"),
    "no id": ("native", H + ",0,1,5\n", 2, "id", "the cell is empty"),
    "duplicate id": ("native", H + "a,0,1,5\n\nb,0,1,5\na,9,1,5\n", 5, "id", "'a' is already on line 2"),
    "line after a quoted newline": ("native", H + '"a\nb",0,1,5\nc,0,1,-5\n', 4, "duration_s", "'-5'"),
    "fractional priority": ("native", H[:-1] + ",priority\na,0,1,5,1.5\n", 2, "priority", "not a whole number"),
    "empty file": ("native", "", None, None, "the file is empty"),
    "header only": ("native", H, None, None, "the trace is empty"),
    "row too long": ("native", H + "a,0,1,5\nb,0,1,5,6\n", 3, None, "5 cells instead of 4"),
    "row cut off": ("native", H + "a,0,1,5\nb,0", 3, "gpus", "the cell is empty"),
    "not text": ("native", H.encode() + b"a,0,1,5\n\xff\xfe,0,1,5\n", 3, None, "not UTF-8"),
    "unclosed quote": ("native", H + '"a,0,1,5\nb,0,1,5\n', 2, None, "the file is not CSV"),
    "replay row cut off": ("synergy", "0,gnmt,36,25993,1\n1,alexnet,5\n", 2, "gpus", "the cell is empty"),
    "replay without work": ("synergy", "0,gnmt,36,0,1\n", 1, "iterations", "'0' must be above 0"),
    "replay of 0 GPUs": ("synergy", "0,gnmt,36,5,0\n", 1, "gpus", "'0' must be above 0"),
    "empty replay": ("synergy", "", None, None, "the trace is empty"),
    "not a time": ("philly", PHILLY + "yesterday,5,1,5,a\n", 2, "timestamp", "'yesterday' is not a time"),
    "negative Philly duration": ("philly", PHILLY + "2017-10-09 07:01:55,-5,1,5,a\n", 2, "duration", "'-5'"),
    "nothing left": ("philly", PHILLY + "2017-10-09 07:01:55,5,0,5,a\n", None, None, "no jobs to run (1 with 0 GPUs)"),
    "cut-off JSON": ("philly-json", '[\n{"jobid":"a","vc":"v",', 2, None, "not JSON or is truncated"),
    "missing cells": ("philly", PHILLY + "2017-10-03 00:05:00,3,4\n", 2, "gpu_time", "3 cells instead of 5"),
    "no list": ("philly-json", '{"jobid":"a"}', None, None, "not a JSON list"),
    "job without attempts": ("philly-json", '[{"jobid":"a","submitted_time":"None"}]', None, "attempts", "is missing"),
    "duplicate Philly id": (
        "philly-json",
        '[{"jobid":"a","submitted_time":"2017-10-09 07:01:55","attempts":[{"start_time":"2017-10-09 07:01:55",'
        '"end_time":"2017-10-09 07:02:55","detail":[{"ip":"m","gpus":["gpu0"]}]}]},'
        '{"jobid":"a","submitted_time":"2017-10-09 07:01:55","attempts":[{"start_time":"2017-10-09 07:01:55",'
        '"end_time":"2017-10-09 07:02:55","detail":[{"ip":"m","gpus":["gpu0"]}]}]}]',
        None, "jobid", "'a' is already on row 1",
    ),
    "parts of several GPUs": ("openb", OPENB + "p,1,1,2,500,,LS,Running,0,5,1\n", 2, "gpu_milli", "a part of it"),
    "unknown GPU": ("openb", OPENB + "p,1,1,1,500,X9,LS,Running,0,5,1\n", 2, "gpu_spec", "unknown GPU model 'X9'"),
    "ends before it starts": ("openb", OPENB + "p,1,1,1,500,,LS,Running,0,5,9\n", 2, "deletion_time", "negative"),
    "not a list of times": (
        "chronus",
        "job_id,user,num_gpu,submit_time,duration,expect_time_list,best_effort\n1,u,1,0,5,x-y,0\n",
        2, "expect_time_list", "'x-y' is not a '-'-separated list",
    ),
    "duplicate testbed id": (
        "tiresias", "job_id,num_gpu,submit_time,duration\n10,12,11,20\n10,12,11,20", 3, "job_id", "already on line 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_file(name: str, tmp_path: Path) -> None:
    kind, content, line, field, part = CASES[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        load_trace(f"{kind}:{path}")
    error = caught.value
    assert part in error.message
    assert (error.line, error.field) == (line, field)
    assert str(path) in str(error.file)
    assert "\n" not in str(error)


def test_a_job_is_found_in_its_file(tmp_path: Path) -> None:
    """Rows are sorted and left out before anything finds a job wrong; its line is still that of the file."""
    philly = tmp_path / "jobs.csv"
    rows = ["2017-10-09 07:03:00,5,1,5,a", "2017-10-09 07:02:00,5,0,0,a", "2017-10-09 07:01:00,5,2,10,b"]
    philly.write_text(PHILLY + "\n".join(rows) + "\n")
    trace = load_trace(f"philly:{philly}")
    assert [(job, trace.line_of(job)) for job in trace.jobs.id.tolist()] == [("2", 4), ("0", 2)]
    assert trace.line_of("1") is None
    replay = tmp_path / "replay.csv"
    replay.write_text("a,gnmt,36,5,1\nb,gnmt,3,5,1\n")
    assert load_trace(f"synergy:{replay}").line_of("b") == 2
    error = trace.wrong("0", "gpus", "too many")
    assert str(error) == f"philly:{philly}, line 2, field gpus: too many"


def test_options_that_change_nothing_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(H + "a,0,1,5\n")
    with pytest.raises(InputError, match="-1 is not a seed"):
        load_trace(str(path), TraceOptions(seed=-1))
    with pytest.raises(InputError, match="the native format has no attempts"):
        load_trace(str(path), TraceOptions(attempts="last"))


def test_unreadable_files(tmp_path: Path) -> None:
    for path, part in (
        (tmp_path, "Is a directory"),
        (tmp_path / "absent.csv", "No such file"),
        (tmp_path / "absent.parquet", "No such file"),
    ):
        with pytest.raises(InputError, match=part) as caught:
            load_trace(f"native:{path}")
        assert caught.value.file == str(path)


def test_truncated_parquet_at_every_kind_of_place(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    n = 1000
    pl.DataFrame(
        {"id": [str(k) for k in range(n)], "arrival_s": range(n), "gpus": [1] * n, "duration_s": [5.0] * n}
    ).write_parquet(whole)
    data = whole.read_bytes()
    assert len(load_trace(str(whole)).jobs) == n
    cut = tmp_path / "cut.parquet"
    for size in (0, 3, 4, 8, 100, len(data) // 2, len(data) - 5, len(data) - 1):
        cut.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"truncated|damaged") as caught:
            load_trace(str(cut))
        assert caught.value.file == str(cut)


def test_parquet_row_and_type_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    two = pl.DataFrame({"id": ["a", "b"], "arrival_s": [0.0, 1.0], "gpus": [1, 0], "duration_s": [1.0, 2.0]})
    two.write_parquet(path)
    with pytest.raises(InputError, match=r"field gpus: 0 must be above 0.*\(row 2\)"):
        load_trace(str(path))
    pl.DataFrame({"id": ["a"], "arrival_s": [0.0], "gpus": [1], "duration_s": [[1.0]]}).write_parquet(path)
    with pytest.raises(InputError, match="field duration_s: the column holds List"):
        load_trace(str(path))
