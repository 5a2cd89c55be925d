"""Whatever is in a file, reading it ends in a trace that holds together or in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.trace_options import TraceOptions

HEADERS = {
    "native": "id,arrival_s,gpus,duration_s,iterations,model,priority",
    "synergy": "",
    "philly": "timestamp,duration,num_gpus,gpu_time,cluster",
    "philly-json": "",
    "chronus": "job_id,user,num_gpu,submit_time,iterations,model_name,duration,expect_time_list,best_effort",
    "openb": "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,"
    "scheduled_time",
    "tiresias": "job_id,num_gpu,submit_time,iterations,model_name,duration",
    "gavel": "",
    "sia": "name,time,application,num_replicas,batch_size",
    "blox": "job_id,num_gpus,submit_time,duration,model,batch_size",
    "helios": "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue",
    "alibaba-genai": "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,num_lora",
    "alibaba-spot": "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type",
}
cell = st.one_of(
    st.sampled_from(["", " ", "0", "1", "2", "0.5", "1000", "-1", "nan", "inf", "1e400", "x", "T4",
                     "2017-10-09 07:01:55", "Pending", '"a,b"', '"', "a\nb", '"a\nb"', "1-2", "\ufeff", "\x00", "é"]),
    st.integers(0, 20).map(str),
    st.text(max_size=5),
)  # fmt: skip
row = st.lists(cell, min_size=0, max_size=12).map(",".join)


def check(spec: str) -> None:
    message = ""
    try:
        trace = read_trace(spec, TraceOptions(arrivals="static", durations="two-part"))
    except InputError as error:
        message = str(error)
    if message:
        assert "\n" not in message
        return
    jobs = trace.jobs
    assert len(set(jobs.id.tolist())) == len(jobs)
    assert (np.diff(jobs.arrival_s) >= 0).all()
    assert np.isfinite(jobs.arrival_s).all()
    assert (jobs.arrival_s >= 0).all()
    assert (jobs.gpus > 0).all()
    assert not (jobs.duration_s <= 0).any()


@pytest.mark.parametrize("kind", HEADERS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(row, max_size=4), ending=st.sampled_from(["\n", "\r\n"]))
def test_random_cells(kind: str, rows: list[str], ending: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [HEADERS[kind], *rows] if HEADERS[kind] else rows
    if kind == "gavel":
        lines = [line.replace(",", "\t") for line in lines]
    path.write_bytes(ending.join(lines).encode("utf-8", errors="surrogatepass"))
    check(f"{kind}:{path}")


@pytest.mark.parametrize("kind", HEADERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60))
def test_random_bytes(kind: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(HEADERS[kind].encode() + b"\n" + data)
    check(f"{kind}:{path}")


json_value = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "None", "a", "2017-10-09 07:01:55"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["jobid", "vc", "submitted_time", "attempts", "start_time", "end_time", "detail", "gpus", "status"]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    log=st.lists(
        st.one_of(
            json_value,
            st.fixed_dictionaries({"jobid": json_value, "submitted_time": json_value, "attempts": json_value}),
        ),
        max_size=3,
    )
)
def test_random_json(log: object, tmp_path: Path) -> None:
    import orjson

    path = tmp_path / "t.json"
    path.write_bytes(orjson.dumps(log))
    check(f"philly-json:{path}")
