"""The miso trace reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.miso import read, read_latencies
from cotenant.workloads.trace_options import TraceOptions

HEADER = (
    "order,job,model,arrival_s,duration_s,num_iters,launch_s,lat_7g.40gb,lat_4g.20gb,lat_3g.20gb,lat_2g.10gb,lat_1g.5gb"
)
ROW = "0,17,gnn_train512,29,120,100,5.0,0.5,0.7,0.8,1.25,"


def write(folder: Path, *rows: str, header: str = HEADER) -> str:
    path = folder / "t.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def test_a_duration_is_not_used_but_a_negative_one_is_refused(tmp_path: Path) -> None:
    assert read(write(tmp_path, ROW.replace(",120,", ",,")), TraceOptions()).jobs.duration_s[0] == 100 * 0.5 + 5
    with pytest.raises(InputError, match="must be at least 0") as wrong:
        read(write(tmp_path, ROW.replace(",120,", ",-120,")), TraceOptions())
    assert (wrong.value.line, wrong.value.field) == (2, "duration_s")


def test_jobs_and_latencies(tmp_path: Path) -> None:
    path = write(tmp_path, ROW, "1,3,m,10,50,200,4.0,0.1,0.1,0.1,0.2,0.4")
    jobs = read(path, TraceOptions()).jobs
    assert list(jobs.id) == ["1", "0"]  # sorted by arrival
    assert list(jobs.duration_s) == [200 * 0.1 + 4, 100 * 0.5 + 5]
    assert list(jobs.gpus) == [1, 1]
    found = read_latencies(path)
    assert found is not None
    assert found.measured_on.gpu == "A100-40GB"
    assert found.id == ["0", "1"]
    row = dict(zip(found.measured_on.kinds, found.latency_s[0], strict=True))
    assert (row["7g"], row["3g"], row["2g"]) == (0.5, 0.8, 1.25)
    assert np.isnan(row["1g"])
    assert np.isnan(row["1g+"])  # where 1g has too little memory, nothing is known of the 1g with double memory


def test_other_gpus_are_told_by_their_slice_names(tmp_path: Path) -> None:
    header = "id,arrival_s,num_iters,launch_s,lat_7g.80gb,lat_1g.20gb,min_slice,qos_floor,gpus"
    path = write(tmp_path, "a,0,10,1,0.5,2.0,1g+,0.2,", "b,1,10,1,0.5,,,,4", header=header)
    found = read_latencies(path)
    assert found is not None
    assert found.measured_on.gpu == "A100-80GB"
    assert (found.min_slice, list(found.qos_floor)) == (["1g+", ""], [0.2, 0.0])
    assert list(read(path, TraceOptions()).jobs.gpus) == [1, 4]


@pytest.mark.parametrize(
    ("change", "message", "field"),
    [
        (ROW.replace("29", "-1", 1), "at least 0", "arrival_s"),
        (ROW.replace("100,5.0", "nan,5.0"), "finite", "num_iters"),
        (ROW.replace("100,5.0", "0,5.0"), "at least 1", "num_iters"),
        (ROW.replace("0.5,0.7", "0,0.7"), "above 0", "lat_7g.40gb"),
        (ROW.replace("0.5,0.7", ",0.7"), "empty", "lat_7g.40gb"),
        (ROW.replace("5.0", "soon"), "not a finite number", "launch_s"),
    ],
)
def test_bad_rows_name_line_and_field(tmp_path: Path, change: str, message: str, field: str) -> None:
    good = ROW.replace("0,17", "7,17", 1)
    with pytest.raises(InputError, match=message) as caught:
        read(write(tmp_path, good, change), TraceOptions())
    assert (caught.value.line, caught.value.field) == (3, field)


def test_bad_headers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a MIG profile") as caught:
        read(write(tmp_path, ROW, header=HEADER.replace("3g.20gb", "5g.20gb")), TraceOptions())
    assert caught.value.field == "lat_5g.20gb"
    with pytest.raises(InputError, match="of several GPU models"):
        read(write(tmp_path, ROW, header=HEADER.replace("3g.20gb", "3g.40gb")), TraceOptions())
    with pytest.raises(InputError, match="the whole GPU"):
        read(write(tmp_path, ROW, header=HEADER.replace("lat_7g.40gb", "other")), TraceOptions())
    with pytest.raises(InputError, match="no column 'num_iters'"):
        read(write(tmp_path, ROW, header=HEADER.replace("num_iters", "n")), TraceOptions())
    with pytest.raises(InputError, match="unique"):
        read(write(tmp_path, ROW, ROW), TraceOptions())


def test_the_reference_traces(shared: Path) -> None:
    trace = read(str(shared / "reference/miso/trace_g8_j100_a60_s1.csv"), TraceOptions())
    found = read_latencies(str(shared / "reference/miso/trace_g8_j100_a60_s1.csv"))
    assert found is not None
    assert len(trace.jobs) == 100
    assert trace.jobs.duration_s[0] == pytest.approx(2107 * 0.0521835 + 5)


def test_a_native_file_is_read_by_its_models(tmp_path: Path) -> None:
    path = write(tmp_path, "a,0,1,100,gnn_train128", header="id,arrival_s,gpus,duration_s,model")
    assert read_latencies(path) is None
    assert list(read(path, TraceOptions()).jobs.model) == ["gnn_train128"]


def test_a_file_with_neither_latencies_nor_the_native_columns(tmp_path: Path) -> None:
    header = HEADER.split(",lat_")[0]
    with pytest.raises(InputError, match="neither latencies on MIG slices"):
        read(write(tmp_path, ROW.split(",0.5")[0], header=header), TraceOptions())
