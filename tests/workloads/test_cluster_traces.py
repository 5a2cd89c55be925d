"""The readers of clusters' logs and of simulators' workloads of 2020 to 2026, on small files with every quirk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotenant.cli.trace import app
from cotenant.core.errors import InputError
from cotenant.core.work import Trace
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.trace_options import TraceOptions

HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
ACME = "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,type,state,submit_time,start_time,end_time,duration\n"
SPOT = "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type\n"
UNTRIED = "the reader follows the published description of the format; it has not been tried on the published data"


def read(form: str, folder: Path, text: str) -> Trace:
    path = folder / "t.csv"
    path.write_text(text)
    return read_trace(f"{form}:{path}")


def test_helios(tmp_path: Path) -> None:
    day = "2020-05-01"
    trace = read(
        "helios", tmp_path,
        HELIOS
        + f"1,u1,va,1,4,1,COMPLETED,{day} 07:41:01,{day} 07:41:11,{day} 07:42:51,100,10\n"
        + f"2,u1,va,0,4,1,COMPLETED,{day} 07:41:01,{day} 07:41:11,{day} 07:42:51,100,10\n"
        + f"3,u2,vb,16,0,2,FAILED,{day} 07:40:01,{day} 07:41:01,{day} 07:41:31,30,60\n"
        + f"4,u2,vb,1,1,1,CANCELLED,{day} 07:40:01,,{day} 07:41:31,0,0\n"
        + f"5,u2,vb,1,1,1,CANCELLED,{day} 07:40:01,None,{day} 07:41:31,0,0\n"
        + f"6,u2,vb,1,1,1,SUSPENDED,{day} 07:40:01,{day} 07:41:31,Unknown,0,0\n"
        + f"7,u2,vb,1,1,1,FAILED,{day} 07:40:01,{day} 07:41:31,{day} 07:41:31,0,90\n"
        + f"8,u2,vb,1,1,1,NODE_FAIL,{day} 07:40:01,{day} 07:41:31,{day} 07:41:30,-1,90\n"
        + f"9,u2,vb,1,1,1,FAILED,,{day} 07:41:31,{day} 07:41:41,10,0\n"
        + f"10,u2,vb,,1,1,FAILED,{day} 07:40:01,{day} 07:41:31,{day} 07:41:41,10,0\n",
    )  # fmt: skip
    jobs = trace.jobs
    assert jobs.id.tolist() == ["3", "1"]
    assert jobs.arrival_s.tolist() == [0.0, 60.0]
    assert jobs.duration_s.tolist() == [30.0, 100.0]
    assert jobs.gpus.tolist() == [16.0, 1.0]
    assert jobs.tenant.tolist() == ["vb", "va"]
    assert math.isnan(jobs.cpus[0])
    assert jobs.cpus[1] == 4
    assert trace.left_out == {
        "without gpu_num": 1,
        "with 0 GPUs": 1,
        "without submit_time": 1,
        "never started (no start_time)": 2,
        "without end_time": 1,
        "with an end before the start": 1,
        "without duration": 1,
    }
    assert trace.remarks[0] == UNTRIED
    assert set(trace.remarks[1].removeprefix("kept by state: ").split(", ")) == {"1 COMPLETED", "1 FAILED"}


def test_acme_times_have_zones_and_kalos_counts_from_submission(tmp_path: Path) -> None:
    trace = read(
        "acme", tmp_path,
        ACME
        + "a,u1,2,16,240,1000,Pretrain,FAILED,2023-05-17 11:00:00+00:00,2023-05-17 11:00:10+00:00,"
        + "2023-05-17 11:01:10+00:00,70\n"
        + "b,u2,1,8,0,,Other,CANCELLED,2023-05-17 18:00:00+08:00,2023-05-17 18:00:00+08:00,"
        + "2023-05-17 18:00:30.5+08:00,30.5\n",
    )  # fmt: skip
    jobs = trace.jobs
    assert jobs.id.tolist() == ["b", "a"]  # 18:00 at +08:00 is 10:00 UTC
    assert jobs.arrival_s.tolist() == [0.0, 3600.0]
    assert jobs.duration_s.tolist() == [30.5, 60.0]
    assert jobs.tenant.tolist() == ["u2", "u1"]
    assert math.isnan(jobs.memory_bytes[0])
    assert jobs.memory_bytes[1] == 2e12
    assert "1 row states a duration that differs from end_time minus start_time; the latter is used" in trace.remarks
    assert UNTRIED in trace.remarks
    assert any(remark.startswith("kept by type: ") and "1 Pretrain" in remark for remark in trace.remarks)


def test_alibaba_spot(tmp_path: Path) -> None:
    trace = read(
        "alibaba-spot", tmp_path,
        SPOT
        + "1,7,A10,12,1,1,0,500,HP\n"
        + "2,9,A100-SXM4-80GB,16,8,4,30,60,Spot\n"
        + "3,9,GPU-series-1,0,0.5,1,40,60,Spot\n"
        + "4,9,,4,0.5,2,40,60,Spot\n"
        + "5,9,A10,4,0,2,40,60,Spot\n"
        + "6,9,A10,4,1,0,40,60,Spot\n"
        + "7,9,A10,4,1,1,40,0,HP\n"
        + "8,,,4,2,1,50,5,HP\n",
    )  # fmt: skip
    jobs = trace.jobs
    assert jobs.id.tolist() == ["1", "2", "3", "8"]
    assert jobs.gpus.tolist() == [1.0, 32.0, 0.5, 2.0]
    assert jobs.cpus[:2].tolist() == [12.0, 64.0]
    assert math.isnan(jobs.cpus[2])
    assert jobs.priority.tolist() == [1, 0, 0, 1]
    assert jobs.tenant.tolist() == ["7", "9", "9", ""]
    assert jobs.gpu_models.tolist() == ["A10", "A100-80GB", "L40S", ""]
    assert trace.left_out == {
        "with 0 GPUs": 2,
        "with several workers on a part of a GPU each": 1,
        "without duration": 1,
    }
    assert UNTRIED in trace.remarks
    assert any("1 job asks for GPU-series-1 or 2" in remark for remark in trace.remarks)


GENAI = "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,checkpoint_model_version_id,num_lora\n"


def test_alibaba_genai_requests(tmp_path: Path) -> None:
    trace = read(
        "alibaba-genai", tmp_path,
        GENAI
        + "2024-02-03 04:05:50,TXT_2_IMG,SUCCEED,12.0,G0,M1,0\n"
        + "2024-02-03 04:05:40,INPAINTING,FAILED,3.0,G1,,2\n"
        + "2024-02-03 04:05:51,TXT_2_IMG,PENDING,0.0,G1,M1,0\n"
        + "2024-02-03 04:05:52,TXT_2_IMG,PROCESSING,9.0,G1,M1,0\n"
        + "2024-02-03 04:05:53,TXT_2_IMG,FAILED,0.0,G1,M1,0\n",
    )  # fmt: skip
    jobs = trace.jobs
    assert jobs.id.tolist() == ["1", "0"]
    assert jobs.arrival_s.tolist() == [0.0, 10.0]
    assert jobs.duration_s.tolist() == [3.0, 12.0]
    assert jobs.gpus.tolist() == [1.0, 1.0]
    assert jobs.tenant.tolist() == ["G1", "G0"]
    assert jobs.model.tolist() == ["", "M1"]
    assert trace.left_out == {"not finished (PENDING or PROCESSING)": 2, "without duration": 1}
    assert trace.remarks[0] == "1 request uses LoRA adapters"


def test_alibaba_genai_requests_without_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("predict_type,exec_time_seconds,checkpoint_model_version_id\nx,22.0,m\n")
    with pytest.raises(InputError, match="no arrival times; draw them with --arrivals"):
        read_trace(f"alibaba-genai:{path}")
    jobs = read_trace(f"alibaba-genai:{path}", TraceOptions(arrivals="static")).jobs
    assert (jobs.arrival_s[0], jobs.duration_s[0]) == (0.0, 22.0)


def test_alibaba_genai_latencies_are_told_by_the_name_of_the_file(tmp_path: Path) -> None:
    text = "value,timestamp_anon,container_ip\n2500.0,160.0,aa\n0.0,170.0,aa\n500,103,NULL\n"
    path = tmp_path / "lora_update_latency_anon.csv"
    path.write_text(text)
    trace = read_trace(f"alibaba-genai:{path}")
    assert trace.jobs.id.tolist() == ["2", "0"]
    assert trace.jobs.arrival_s.tolist() == [0.0, 57.0]
    assert trace.jobs.duration_s.tolist() == [0.5, 2.5]
    assert trace.jobs.tenant.tolist() == ["", "aa"]
    assert trace.left_out == {"without duration": 1}
    other = tmp_path / "pod_memory_util_anon.csv"
    other.write_text(text)
    with pytest.raises(InputError, match=r"pod_memory_util_anon\.csv is not a series of GPU work"):
        read_trace(f"alibaba-genai:{other}")


@pytest.mark.parametrize(("name", "command"), [("qps.tar.gz", "tar xzf qps.tar.gz"), ("q.gz", "gunzip -k q.gz")])
def test_a_packed_file_names_the_command_that_unpacks_it(tmp_path: Path, name: str, command: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x1f\x8b\x08\x00rest")
    with pytest.raises(InputError, match=f"the file is compressed; unpack it with: {command}$"):
        read_trace(f"alibaba-genai:{path}")


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ("1,7,A10,12,1,1,0,500,Best", "job_type", "'Best' is neither HP nor Spot"),
        ("1,7,B7,20,1,1,0,500,HP", "gpu_model", "unknown GPU model 'B7'"),
        ("1,7,A10,20,8,20000,0,500,HP", "worker_num", "'20000' workers need more GPUs than a job may have"),
        ("1,7,A10,20,1,1.5,0,500,HP", "worker_num", "'1.5' is not a whole number"),
        ("1,13,A10,20,1,1,0,-500,HP", "duration", "'-500' must be at least 0"),
    ],
)
def test_bad_rows_of_alibaba_spot(tmp_path: Path, row: str, field: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read("alibaba-spot", tmp_path, SPOT + row + "\n")
    assert (caught.value.line, caught.value.field) == (2, field)
    assert message in caught.value.message


def test_gavel_of_three_ages(tmp_path: Path) -> None:
    six = (
        'LM\tpython "a b" --x\t--steps\t900\t3\t1\n\nCycleGAN\tx\t-n\t0\t4\t1\n'
        "A3C\tx\t-n\t7\t2\t0\nA3C\tx\t-n\t7\t2\t4\n"
    )
    trace = read("gavel", tmp_path, six)
    assert trace.jobs.id.tolist() == ["4", "0"]
    assert trace.jobs.model.tolist() == ["A3C", "LM"]
    assert trace.jobs.iterations.tolist() == [7.0, 900.0]
    assert trace.jobs.gpus.tolist() == [4.0, 1.0]
    assert trace.left_out == {"with 0 GPUs": 1, "without steps": 1}
    assert trace.line_of("4") == 5
    seven = "LM (batch size 5)\tx\t-n\t1\t900\t3.5\t2\r\n"
    jobs = read("gavel", tmp_path, seven).jobs
    assert (jobs.model[0], jobs.iterations[0], jobs.arrival_s[0], jobs.gpus[0]) == ("LM (batch size 5)", 900, 3.5, 2)
    ten = (
        "LM\tx\td\t-n\t1\t900\t2\t1\t-1.000000\t5\nLM\tx\td\t-n\t0\t800\t1\t5\t1.2\t5\n"
        "LM\tx\td\t-n\t0\t800\t1\t0.4\t0\t6\n"
    )
    trace = read("gavel", tmp_path, ten)
    assert trace.jobs.gpus.tolist() == [2.0, 1.0, 1.0]
    assert trace.jobs.priority.tolist() == [0, 4, 0]
    assert trace.jobs.arrival_s.tolist() == [5.0, 5.0, 6.0]
    assert trace.remarks[0].startswith("1 job has an SLO")
    assert trace.remarks[1].startswith("1 job has a weight that is not a whole number")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("0\tvgg16\techo\t500\t10\n", 1, "the row has 5 cells separated by tabs instead of 6, 7 or 10"),
        ("LM\tx\t-n\t9\t3\t1\nLM\tx\t-n\t9\t3\n", 2, "5 cells separated by tabs instead of 6, as the first one"),
        ("LM\tx\t-n\tmany\t3\t1\n", 1, "'many' is not a finite number"),
        ("LM x y\n", None, "separated by tabs; this file has none"),
        ("\n", None, "the trace is empty"),
    ],
)
def test_bad_gavel_files(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read("gavel", tmp_path, text)
    assert message in caught.value.message
    assert caught.value.line == line


def test_sia_states_no_lengths(tmp_path: Path) -> None:
    text = (
        ",Unnamed: 0,name,time,application,num_replicas,batch_size\n"
        "0,0,ncf-0,5.25,ncf,1,32768\n1,1,bert-1,7,bert,16,384\n2,2,bert-2,9,bert,0,384\n"
    )
    trace = read("sia", tmp_path, text)
    jobs = trace.jobs
    assert jobs.id.tolist() == ["ncf-0", "bert-1"]
    assert jobs.arrival_s.tolist() == [5.25, 7.0]
    assert jobs.gpus.tolist() == [1.0, 16.0]
    assert jobs.model.tolist() == ["ncf", "bert"]
    assert all(math.isnan(value) for value in [*jobs.duration_s, *jobs.iterations])
    assert trace.left_out == {"with 0 GPUs": 1}
    assert "simulate --policy sia" in trace.remarks[0]
    drawn = read_trace(f"sia:{tmp_path / 't.csv'}", TraceOptions(durations="two-part"))
    assert drawn.remarks == []


def test_converting_sia_names_the_option_that_it_needs(tmp_path: Path) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "o.csv"
    path.write_text("name,time,application,num_replicas,batch_size\nncf-0,5,ncf,1,32768\n")
    result = CliRunner().invoke(app, ["convert", f"sia:{path}", "--out", str(out)])
    assert isinstance(result.exception, InputError)
    assert "add --durations" in result.exception.message
    looked = CliRunner().invoke(app, ["inspect", f"sia:{path}", "--json"])
    assert '"unknown": 1' in looked.output
    result = CliRunner().invoke(app, ["convert", f"sia:{path}", "--durations", "two-part", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert read_trace(str(out)).jobs.duration_s[0] > 0


def test_blox(tmp_path: Path) -> None:
    text = (
        "job_id,num_gpus,submit_time,duration,model,batch_size\n"
        "1,2,12,90,resnet50,64\n2,0,13,90,resnet50,64\n3,1,14,0,DCGAN,64\n4,1,11,5,,\n"
    )
    trace = read("blox", tmp_path, text)
    assert trace.jobs.id.tolist() == ["4", "1"]
    assert trace.jobs.duration_s.tolist() == [5.0, 90.0]
    assert trace.jobs.model.tolist() == ["", "resnet50"]
    assert trace.left_out == {"with 0 GPUs": 1, "without duration": 1}
