"""A file read as a format that it is not in: the sentence names the one that fits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.llm.registry import read_tokens

FILES = {
    "philly": "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,a\n",
    "chronus": (
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
        "best_effort,job_type\n1,u,1,0,9,x,5,1,9,1,0,s\n"
    ),
    "tiresias": "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n1,1,0,9,x,5,1\n",
    "openb": (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "p,1000,1000,1,1000,,LS,Running,0,9,1\n"
    ),
    "synergy": "0,res50,4000.5,1200,2\n1,m5,4100,300,1\n",
    "gavel": "LM (batch size 5)\tcd x, y && python main.py\t--steps\t1\t800\t0\t2\n",
    "sia": "name,time,application,num_replicas,batch_size\nncf-0,5,ncf,2,32768\n",
    "blox": "job_id,num_gpus,submit_time,duration,model,batch_size\n1,2,3,4,resnet50,64\n",
    "helios": "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n",
    "acme": "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n",
    "alibaba-spot": (
        "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type\n"
    ),
    "alibaba-genai": "value,timestamp_anon,container_ip\n1,2,a\n",
    "philly-json": '[{"jobid": "a"}]\n',
    "miso": "order,job,model,arrival_s,duration_s,num_iters,launch_s,lat_7g.40gb\n0,a,m,0,9,3,1,0.5\n",
}


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("words", ["", "native:"])
def test_a_public_file_read_as_native(tmp_path: Path, form: str, words: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(FILES[form])
    with pytest.raises(InputError) as caught:
        read_trace(f"{words}{path}")
    assert f"it looks like {form}:{path}" in caught.value.message
    assert caught.value.line == 1


def test_a_native_file_read_as_another_format(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("id,arrival_s,gpus,duration_s\na,0,1,5\n")
    with pytest.raises(InputError, match=f"not in the tiresias format .*it looks like native:{path}"):
        read_trace(f"tiresias:{path}")


def test_a_node_list_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nn,96000,786432,8,V100M32\n")
    with pytest.raises(InputError, match=f"it looks like --cluster openb:{path}"):
        read_trace(f"openb:{path}")


def test_lists_read_as_gavel(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    for form, text in FILES.items():
        if form == "gavel":
            continue
        path.write_text(text)
        with pytest.raises(InputError, match=f"looks like {form}:"):
            read_trace(f"gavel:{path}")


def test_a_node_list_of_2026_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,128,0\n")
    with pytest.raises(InputError, match=f"it looks like --cluster alibaba-spot:{path}"):
        read_trace(f"alibaba-spot:{path}")


SWF = """; Version: 2.2
; MaxProcs: 128
1 0 10 100 4 -1 -1 4 200 -1 1 1 1 -1 1 -1 -1 -1
2 5 10 0 4 -1 -1 4 200 -1 0 1 1 -1 1 -1 -1 -1
3 7.5 10 60 -1 -1 -1 4 200 -1 5 1 1 -1 1 -1 -1 -1
  4 9 10 30 2 -1 -1 4 200 -1 1 1 1 -1 1 -1 -1 -1
"""


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (SWF, ["id,arrival_s,gpus,duration_s", "1,0,4,100", "4,9,2,30"]),
        ("id\tarrival_s\ta b\n1\t2\t3\n", ["id,arrival_s,a b", "1,2,3"]),
        ("JobID|Submit|AllocTRES\n1|5|cpu=8,gres/gpu=1\n", ["JobID,Submit,AllocTRES", "1,5,cpu=8 gres/gpu=1"]),
        ("  id  arrival_s gpus\n  1  2   3\n", ["id,arrival_s,gpus", "1,2,3"]),
        (";id;gpus\n0;a;1\n", [",id,gpus", "0,a,1"]),
        ("id;arrival_s;gpus\na;0,5;1\nb;17,25;2\n", ["id,arrival_s,gpus", "a,0.5,1", "b,17.25,2"]),
        ("id;gpus;models\na;1;x, y\n", ["id,gpus,models", "a,1,x  y"]),
        ("id;gpu_ids\na;0,1,2\n", ["id,gpu_ids", "a,0 1 2"]),
    ],
    ids=["SWF", "tabs", "sacct -P", "spaces", "index and semicolons", "decimal commas", "commas in texts", "lists"],
)
def test_the_command_that_is_named_converts_the_file(tmp_path: Path, text: str, rows: list[str]) -> None:
    path = tmp_path / "my jobs.txt"
    path.write_text(text)
    with pytest.raises(InputError, match="convert with: ") as caught:
        read_trace(str(path))
    subprocess.run(["sh", "-c", caught.value.message.split("convert with: ")[1]], cwd=tmp_path, check=True)
    assert (tmp_path / "my jobs-commas.csv").read_text().splitlines() == rows


def test_a_converted_file_of_a_cpu_cluster_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "log.swf"
    path.write_text(SWF)
    with pytest.raises(InputError, match="Standard Workload Format") as caught:
        read_trace(f"native:{path}")
    subprocess.run(["sh", "-c", caught.value.message.split("convert with: ")[1]], cwd=tmp_path, check=True)
    jobs = read_trace(str(tmp_path / "log-commas.csv")).jobs
    assert (jobs.arrival_s.tolist(), jobs.gpus.tolist(), jobs.duration_s.tolist()) == ([0, 9], [4, 2], [100, 30])


@pytest.mark.parametrize("text", ["1,10,100,1\n2,20,200,2\n", "1,10,100,2\n", "0,0,0\n"])
@pytest.mark.parametrize("form", ["", "philly:", "chronus:"])
def test_a_file_without_a_header_says_so(tmp_path: Path, form: str, text: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="seems to have no header: write the names of its columns"):
        read_trace(f"{form}{path}")


def test_equal_numbers_in_a_first_row_are_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("0,res50,0,1200,1200\n")
    with pytest.raises(InputError, match="it looks like synergy:"):
        read_trace(str(path))


def test_json_is_no_csv(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text('{"jobs": [{"id": 1, "subtime": 0, "res": 1}]}')
    with pytest.raises(InputError, match="the file is JSON, not CSV"):
        read_trace(str(path))


@pytest.mark.parametrize("text", ["a,b,c\n1,2,3\n", "1,2,3,4,5\n", "id,when,gpus\na,0,1\n"])
def test_a_file_like_no_other_says_what_it_has(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"the file has no column .* it has ") as caught:
        read_trace(str(path))
    assert "looks like" not in caught.value.message


TABLE = b"id,arrival_s,gpus,duration_s\na,0,1,5\n"


@pytest.mark.parametrize(
    ("name", "pack", "target"),
    [
        ("jobs.csv.gz", gzip.compress, "jobs.csv"),
        ("my jobs.csv", gzip.compress, "my jobs-unpacked.csv"),
        ("jobs.csv.bz2", bz2.compress, "jobs.csv"),
        ("jobs.csv.xz", lzma.compress, "jobs.csv"),
        ("jobs.csv", lambda data: data.decode().encode("utf-16"), "jobs-utf8.csv"),
    ],
    ids=["gz", "gz without its suffix", "bz2", "xz", "UTF-16"],
)
def test_the_command_that_is_named_unpacks_the_file(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes], target: str
) -> None:
    (tmp_path / name).write_bytes(pack(TABLE))
    with pytest.raises(InputError, match="with: ") as caught:
        read_trace(f"native:{tmp_path / name}")
    subprocess.run(["sh", "-c", caught.value.message.split("with: ")[1]], cwd=tmp_path, check=True)
    assert read_trace(str(tmp_path / target)).jobs.gpus.tolist() == [1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "pointer of Git LFS, .*: run git lfs pull"),
        (b"<!doctype html>\n<html></html>\n", "is an HTML page"),
        (b"PK\x03\x04...", "is compressed; unpack it with: unzip"),
        (b"PAR1....PAR1", r"is Parquet: give it a name that ends in \.parquet"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "it looks like --serving MODELS.yaml --trace azure-llm:"),
        (b"Timestamp,Model,Request tokens,Response tokens\n", "--serving MODELS.yaml --trace burstgpt:"),
    ],
)
def test_what_is_no_table_of_jobs_is_named(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "jobs.csv").write_bytes(data)
    with pytest.raises(InputError, match=said):
        read_trace(str(tmp_path / "jobs.csv"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n"


@pytest.mark.parametrize("form", ["philly-json", "gavel", "mooncake", "copilot", "servegen", "azure-llm"])
def test_every_reader_names_what_is_no_text(tmp_path: Path, form: str) -> None:
    read = read_trace if form in ("philly-json", "gavel") else read_tokens
    path = tmp_path / "trace.txt"
    for data, said in ((POINTER, "is a pointer of Git LFS"), (b"<html>\n</html>\n", "is an HTML page")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=said):
            read(f"{form}:{path}")


def test_what_is_no_archive_of_clients_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "clients.tar"
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="is neither a folder nor a whole tar archive") as caught:
        read_tokens(f"servegen:{path}")
    assert "\n" not in str(caught.value)
