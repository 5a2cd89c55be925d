"""A file read as a format that it is not in: the sentence names the one that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.registry import read_trace

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


@pytest.mark.parametrize("text", ["a,b,c\n1,2,3\n", "1,2,3,4,5\n", "id,when,gpus\na,0,1\n"])
def test_a_file_like_no_other_says_what_it_has(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"the file has no column .* it has ") as caught:
        read_trace(str(path))
    assert "looks like" not in caught.value.message
