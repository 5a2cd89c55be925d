"""Each reader on small files, with every quirk of its format."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.registry import FORMATS, read_trace, split_spec
from cotenant.workloads.trace_options import TraceOptions

OPENB_HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_native_csv_keeps_every_column(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "id,arrival_s,gpus,duration_s,iterations,model,tenant,priority,cpus,memory_bytes,deadline_s,gpu_models,note\n"
        "a,0,1,10.5,,res18,t1,,,,,,x\n"
        "b,1.25,0.5,,300,,,-2,4,1000000000,99.5,T4|V100-16GB,y\n",
    )
    trace = read_trace(f"native:{path}")
    jobs = trace.jobs
    assert jobs.id.tolist() == ["a", "b"]
    assert jobs.arrival_s.tolist() == [0.0, 1.25]
    assert jobs.gpus.tolist() == [1.0, 0.5]
    assert jobs.duration_s[0] == 10.5
    assert math.isnan(jobs.duration_s[1])
    assert math.isnan(jobs.iterations[0])
    assert jobs.iterations[1] == 300
    assert jobs.model.tolist() == ["res18", ""]
    assert jobs.tenant.tolist() == ["t1", ""]
    assert jobs.priority.tolist() == [0, -2]
    assert jobs.cpus[1] == 4
    assert jobs.memory_bytes[1] == 1e9
    assert jobs.deadline_s[1] == 99.5
    assert jobs.gpu_models.tolist() == ["", "T4|V100-16GB"]
    assert trace.left_out == {}
    assert trace.remarks == ["columns not used: note"]


def test_native_survives_blank_lines_spaces_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    text = "\ufeffid, arrival_s ,gpus,duration_s, model\na, 0 ,1, 5, res18 \n\nb,2,1,5,\n"
    jobs = read_trace(f"native:{write(tmp_path, text.replace(chr(10), chr(13) + chr(10)))}").jobs
    assert jobs.id.tolist() == ["a", "b"]
    assert jobs.arrival_s.tolist() == [0.0, 2.0]
    assert jobs.model.tolist() == ["res18", ""]


def test_unsorted_rows_are_sorted_equal_times_keep_file_order_and_both_are_said(tmp_path: Path) -> None:
    rows = [("a", 5), ("b", 3), ("c", 5), ("d", 3), ("e", 9), ("f", 0)]
    text = "id,arrival_s,gpus,duration_s\n" + "".join(f"{i},{t},1,1\n" for i, t in rows)
    trace = read_trace(f"native:{write(tmp_path, text)}")
    assert trace.jobs.id.tolist() == ["f", "b", "d", "a", "c", "e"]
    # rows b, d and f stand below a row with a later arrival
    assert trace.remarks[0].startswith("3 rows arrive before a row above;")
    assert trace.remarks[1].startswith("2 rows arrive at the same time as another")


def test_native_parquet_with_numeric_ids(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    two = pl.DataFrame({"id": [7, 8], "arrival_s": [1, 0], "gpus": [1, 2], "iterations": [5, 6], "other": [0, 0]})
    two.write_parquet(path)
    trace = read_trace(str(path))
    assert trace.jobs.id.tolist() == ["8", "7"]
    assert trace.jobs.iterations.tolist() == [6.0, 5.0]
    assert "columns not used: other" in trace.remarks


def test_synergy_keeps_arrivals_as_written(tmp_path: Path) -> None:
    jobs = read_trace(f"synergy:{write(tmp_path, '0,gnmt,36,25993,1' + chr(10) + '1, alexnet,1039,15128,4')}").jobs
    assert jobs.id.tolist() == ["0", "1"]
    assert jobs.model.tolist() == ["gnmt", "alexnet"]
    assert jobs.arrival_s.tolist() == [36.0, 1039.0]
    assert jobs.iterations.tolist() == [25993.0, 15128.0]
    assert jobs.gpus.tolist() == [1.0, 4.0]
    assert np.isnan(jobs.duration_s).all()


def test_philly_sorts_rebases_and_leaves_out_what_never_ran(tmp_path: Path) -> None:
    text = (
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
        "2017-10-09 07:00:55,10,0,0,11cb48\n"
        "2017-10-08 07:01:55,20.5,8,164,6214e9\n"
        "2017-10-01 00:00:00,0,8,0,6214e9\n"
    )
    trace = read_trace(f"philly:{write(tmp_path, text)}")
    assert trace.left_out == {"with 0 GPUs": 1, "without duration": 1}
    assert trace.jobs.id.tolist() == ["2", "0"]  # the ids are row numbers of the file, counted from 0
    assert trace.jobs.arrival_s.tolist() == [0.0, 86400.0]
    assert trace.jobs.duration_s.tolist() == [20.5, 66.0]
    assert trace.jobs.tenant.tolist() == ["6214e9", "11cb48"]
    assert trace.jobs.gpus.tolist() == [8.0, 1.0]


def test_chronus_minutes_deadlines_and_zero_gpu_rows(tmp_path: Path) -> None:
    text = (
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
        "best_effort,job_type\n"
        "0,vc_a,1,10,5049,vgg16,7,14,11,10,0,strict\n"
        "1,vc_b,0,2,1,alexnet,7,14,11,10,0,strict\n"
        "2,vc_b,4,3,2,alexnet,1,14,3,10,1,best\n"
        "3,vc_b,4,4,2,alexnet,1,14,20-40-80,10-5-1,0,soft\n"
    )
    path = write(tmp_path, text)
    trace = read_trace(f"chronus:{path}")
    assert trace.left_out == {"with 0 GPUs": 1}
    assert trace.jobs.id.tolist() == ["2", "3", "0"]
    assert trace.jobs.arrival_s.tolist() == [180.0, 240.0, 600.0]
    assert trace.jobs.duration_s.tolist() == [60.0, 60.0, 420.0]
    assert math.isnan(trace.jobs.deadline_s[0])  # a best-effort job has no deadline
    assert trace.jobs.deadline_s[1:].tolist() == [240.0 + 1200.0, 600.0 + 660.0]
    assert trace.jobs.tenant.tolist() == ["vc_b", "vc_b", "vc_a"]
    assert any("minutes assumed" in remark for remark in trace.remarks)
    seconds = read_trace(f"chronus:{path}", TraceOptions(time_unit="s"))
    assert seconds.jobs.duration_s.tolist() == [1.0, 1.0, 7.0]
    assert not any("minutes" in remark for remark in seconds.remarks)


def test_openb_parts_of_gpus_specs_and_pods_that_never_ran(tmp_path: Path) -> None:
    text = OPENB_HEADER + (
        "p0,12000,16384,1,1000,,LS,Running,0,100,10\n"
        "p1,6000,12288,1,460,V100M16|V100M32|V100M32,LS,Failed,5,100,7\n"
        "p2,20000,65536,0,0,,LS,Running,6,100,10\n"
        "p3,4000,16384,1,1000,,BE,Pending,7,100,\n"
        "p4,4000,16384,8,1000,G2,BE,Succeeded,8,100,20\n"
        "p5,4000,16384,1,1000,,BE,Running,8,,20\n"
        "p6,4000,16384,1,1000,,BE,Running,8,,\n"
        "p7,0,0,1,1000,,BE,Running,9,20,20\n"
        "p8,0,0,1,1000,,BE,Running,9,21,20\n"
    )
    trace = read_trace(f"openb:{write(tmp_path, text)}")
    assert trace.left_out == {
        "with 0 GPUs": 1,
        "never scheduled (Pending)": 1,
        "without scheduled_time": 1,
        "without deletion_time": 1,
        "without duration": 1,
    }
    jobs = trace.jobs
    assert jobs.id.tolist() == ["p0", "p1", "p4", "p8"]
    assert jobs.gpus.tolist() == [1.0, 0.46, 8.0, 1.0]
    assert jobs.arrival_s.tolist() == [0.0, 5.0, 8.0, 9.0]
    assert jobs.duration_s.tolist() == [90.0, 93.0, 80.0, 1.0]
    assert jobs.cpus[:3].tolist() == [12.0, 6.0, 4.0]
    assert math.isnan(jobs.cpus[3])
    assert jobs.memory_bytes[0] == 16384 * 2**20
    assert jobs.gpu_models.tolist() == ["", "V100-16GB|V100-32GB", "A10", ""]
    assert jobs.tenant.tolist() == ["LS", "LS", "BE", "BE"]


def test_openb_without_times_needs_both_draws(tmp_path: Path) -> None:
    text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,12000,16384,1,1000\np1,1,1,0,0\n"
    spec = f"openb:{write(tmp_path, text)}"
    with pytest.raises(InputError, match="no times; draw them with --arrivals and --durations"):
        read_trace(spec, TraceOptions(arrivals="static"))
    trace = read_trace(spec, TraceOptions(arrivals="static", durations="two-part"))
    assert trace.jobs.id.tolist() == ["p0"]
    assert trace.left_out == {"with 0 GPUs": 1}
    assert "the arrivals and durations of 1 job are drawn" in trace.remarks[0]


def test_tiresias_with_and_without_optional_columns(tmp_path: Path) -> None:
    full = (
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
        "0,1,0,606,vgg19,164,30\n1,8,30,133,vgg11,147,23\n"
    )
    jobs = read_trace(f"tiresias:{write(tmp_path, full)}").jobs
    assert jobs.duration_s.tolist() == [164.0, 147.0]
    assert jobs.iterations.tolist() == [606.0, 133.0]
    assert jobs.model.tolist() == ["vgg19", "vgg11"]
    other = (
        "job_id,num_gpu,submit_time,start_time,duration,model_size,aggr_interval,model_name,model_scale\n"
        "10,12,11,14,20,400,0,vgg19,1"
    )
    jobs = read_trace(f"tiresias:{write(tmp_path, other)}").jobs
    assert np.isnan(jobs.iterations).all()
    assert jobs.gpus.tolist() == [12.0]


def philly_job(jobid: str, submitted: str, *attempts: tuple[str, str, int], **more: str) -> dict[str, object]:
    detail = [
        {"start_time": start, "end_time": end, "detail": [{"ip": "m1", "gpus": [f"gpu{k}" for k in range(gpus)]}]}
        for start, end, gpus in attempts
    ]
    return {"status": "Pass", "vc": "ee9e8c", "jobid": jobid, "attempts": detail, "submitted_time": submitted,
            "user": "ce2e", **more}  # fmt: skip


def test_philly_json_sums_attempts_and_says_what_it_left_out(tmp_path: Path) -> None:
    day = "2017-10-09"
    log = [
        philly_job(
            "late",
            f"{day} 08:00:00",
            (f"{day} 08:00:10", f"{day} 08:01:10", 2),
            (f"{day} 09:00:00", f"{day} 09:00:30", 4),
        ),
        philly_job("early", f"{day} 07:00:00", (f"{day} 07:00:00", f"{day} 07:10:00", 1), status="Killed", vc="6214e9"),
        philly_job("never", f"{day} 06:00:00"),
        philly_job("open", f"{day} 06:00:00", (f"{day} 07:00:00", "None", 1)),
        philly_job("nogpu", f"{day} 06:00:00", (f"{day} 07:00:00", f"{day} 07:10:00", 0)),
        philly_job("instant", f"{day} 06:00:00", (f"{day} 07:00:00", f"{day} 07:00:00", 1)),
        philly_job("unknown", "None", (f"{day} 07:00:00", f"{day} 07:00:10", 1)),
    ]
    spec = f"philly-json:{write(tmp_path, json.dumps(log), 'log.json')}"
    trace = read_trace(spec)
    assert trace.left_out == {
        "without attempts": 1,
        "with an attempt without start or end time": 1,
        "without GPUs in any attempt": 1,
        "without duration": 1,
        "without submitted_time": 1,
    }
    assert trace.jobs.id.tolist() == ["early", "late"]
    assert trace.jobs.arrival_s.tolist() == [0.0, 3600.0]
    assert trace.jobs.duration_s.tolist() == [600.0, 90.0]
    assert trace.jobs.gpus.tolist() == [1.0, 2.0]
    assert trace.jobs.tenant.tolist() == ["6214e9", "ee9e8c"]
    assert "kept by status: 1 Pass, 1 Killed" in trace.remarks
    assert any("the GPU count of 1 job changed" in remark for remark in trace.remarks)
    assert read_trace(spec, TraceOptions(attempts="last")).jobs.duration_s.tolist() == [600.0, 30.0]
    assert read_trace(spec, TraceOptions(attempts="longest")).jobs.duration_s.tolist() == [600.0, 60.0]


def test_spec_names_a_format_or_is_a_native_file(tmp_path: Path) -> None:
    assert split_spec("philly:a:b.csv") == ("philly", "a:b.csv")
    assert split_spec("x/jobs.parquet") == ("native", "x/jobs.parquet")
    with pytest.raises(InputError, match=r"did you mean philly:t\.csv"):
        split_spec("philyl:t.csv")
    with pytest.raises(InputError, match="names no file"):
        split_spec("synergy:")
    with pytest.raises(InputError, match="write FORMAT:PATH"):
        split_spec("jobs.txt")
    with pytest.raises(InputError, match="--time-unit is for chronus"):
        read_trace("native:x.csv", TraceOptions(time_unit="s"))


def test_every_format_has_a_reader_and_help() -> None:
    import importlib

    for module, help_text in FORMATS.values():
        assert callable(importlib.import_module(module).read)
        assert help_text
