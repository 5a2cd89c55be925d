"""The public traces, with counts taken by the csv module alone."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.jobs.select import durations_in, load_trace
from cotenant.workloads.trace_options import TraceOptions


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_philly_list(shared: Path) -> None:
    path = shared / "data/jobs/philly/jobs.csv"
    rows = rows_of(path)
    assert len(rows) == 72_590
    times = [datetime.strptime(row["timestamp"], "%Y-%m-%d %H:%M:%S") for row in rows]
    # a stable sort, because the reader keeps the order of equal times
    order = sorted(range(len(rows)), key=lambda k: times[k])
    trace = read_trace(f"philly:{path}")
    assert len(trace.jobs) == len(rows)
    assert trace.left_out == {}
    assert trace.jobs.id.tolist() == [str(k) for k in order]
    start = times[order[0]]
    assert trace.jobs.arrival_s.tolist() == [(times[k] - start).total_seconds() for k in order]
    assert trace.jobs.gpus.tolist() == [float(rows[k]["num_gpus"]) for k in order]
    assert trace.jobs.duration_s.tolist() == [float(rows[k]["duration"]) for k in order]
    assert trace.jobs.tenant.tolist() == [rows[k]["cluster"] for k in order]
    assert len(set(trace.jobs.tenant.tolist())) == 12


@pytest.mark.parametrize(("name", "zero"), [("MIX1", 184), ("SLO", 205)])
def test_chronus(shared: Path, name: str, zero: int) -> None:
    path = shared / f"data/jobs/chronus/trace_job_Philly_{name}.csv"
    rows = rows_of(path)
    kept = [row for row in rows if row["num_gpu"] != "0"]
    trace = read_trace(f"chronus:{path}")
    assert (len(rows), len(rows) - len(kept)) == (30_940, zero)
    assert len(trace.jobs) == len(kept)
    assert trace.left_out == {"with 0 GPUs": zero}
    assert trace.jobs.gpus.sum() == sum(int(row["num_gpu"]) for row in kept)
    assert trace.jobs.duration_s.sum() == 60 * sum(int(row["duration"]) for row in kept)
    strict = [row for row in kept if row["best_effort"] == "0"]
    assert int((~np.isnan(trace.jobs.deadline_s)).sum()) == len(strict)
    slack = trace.jobs.deadline_s - trace.jobs.arrival_s
    assert np.nansum(slack) == 60 * sum(int(row["expect_time_list"]) for row in strict)


@pytest.mark.parametrize("name", ["default", "cpu050", "gpushare40", "gpuspec33"])
def test_openb(shared: Path, name: str) -> None:
    path = shared / f"data/jobs/openb/openb_pod_list_{name}.csv"
    rows = rows_of(path)
    no_gpus = [row for row in rows if row["num_gpu"] == "0"]
    pending = [row for row in rows if row["num_gpu"] != "0" and not row["scheduled_time"]]
    kept = [row for row in rows if row["num_gpu"] != "0" and row["scheduled_time"]]
    trace = read_trace(f"openb:{path}")
    assert trace.left_out == {"with 0 GPUs": len(no_gpus), "never scheduled (Pending)": len(pending)}
    assert len(trace.jobs) == len(kept)
    gpus = [int(row["num_gpu"]) if row["gpu_milli"] == "1000" else int(row["gpu_milli"]) / 1000 for row in kept]
    lengths = [int(row["deletion_time"]) - int(row["scheduled_time"]) for row in kept]
    expected = set(zip((row["name"] for row in kept), gpus, lengths, strict=True))
    jobs = trace.jobs
    assert set(zip(jobs.id.tolist(), jobs.gpus.tolist(), jobs.duration_s.tolist(), strict=True)) == expected
    if name == "default":
        assert len(no_gpus) == 1_088
        assert sum(1 for row in rows if not row["scheduled_time"]) == 897
    if name == "gpuspec33":
        specs = sum(1 for row in kept if row["gpu_spec"])
        assert sum(1 for spec in trace.jobs.gpu_models.tolist() if spec) == specs
        assert "V100-16GB|V100-32GB" in set(trace.jobs.gpu_models.tolist())


def test_openb_without_times(shared: Path) -> None:
    path = shared / "data/jobs/openb/openb_pod_list_multigpu20.csv"
    with pytest.raises(InputError, match="no times"):
        read_trace(f"openb:{path}")
    options = TraceOptions(arrivals="poisson", rate_per_s=0.1, durations="two-part")
    trace = load_trace(f"openb:{path}", options)
    assert trace.left_out == {"with 0 GPUs": 1_088}
    assert len(trace.jobs) == len(rows_of(path)) - 1_088
    assert trace.seed == 1


def test_tiresias(shared: Path) -> None:
    folder = shared / "data/jobs/tiresias"
    rows = rows_of(folder / "60_job.csv")
    trace = read_trace(f"tiresias:{folder / '60_job.csv'}")
    assert len(trace.jobs) == len(rows)
    assert trace.jobs.model.tolist() == [row["model_name"] for row in rows]
    with pytest.raises(InputError, match="'10' is already on line 2"):
        read_trace(f"tiresias:{folder / 'tf_job.csv'}")
    # samples for the Gittins policy: one column, with CRLF line ends
    samples = durations_in(str(folder / "yarn-gput1000.csv"))
    with (folder / "yarn-gput1000.csv").open(newline="") as file:
        expected = [float(row["duration"]) for row in csv.DictReader(file)]
    assert samples.tolist() == expected


@pytest.mark.parametrize("name", ["single_1000_8jph", "multi_1000_4jph", "static_1000_single", "stress_multi"])
def test_synergy_replay_files(shared: Path, name: str) -> None:
    path = shared / f"reference/synergy/{name}.csv"
    with path.open(newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    order = sorted(range(len(rows)), key=lambda k: float(rows[k][2]))
    jobs = read_trace(f"synergy:{path}").jobs
    assert jobs.id.tolist() == [rows[k][0] for k in order]
    assert jobs.model.tolist() == [rows[k][1] for k in order]
    assert jobs.arrival_s.tolist() == [float(rows[k][2]) for k in order]
    assert jobs.iterations.tolist() == [float(rows[k][3]) for k in order]
    assert jobs.gpus.tolist() == [float(rows[k][4]) for k in order]
