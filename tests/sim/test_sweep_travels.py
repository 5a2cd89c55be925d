"""A run of a sweep on a machine without the sweep's files, as Ray hands it over; Ray itself is in tests/extras."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from cotenant.core.errors import InputError, WorkError
from cotenant.sim.jobs.sweep_file import Point, digest_of, paths_of, run_point
from cotenant.sim.jobs.sweep_ray import check_listens, run_packed

TRACE = "id,arrival_s,gpus,duration_s\na,0,1,600\nb,300,2,900\nc,400,1,100\n"
POINT: Point = {
    "trace": "native:t.csv", "cluster": "cluster.yaml", "ordering": "srtf", "arrivals": "trace:native:t.csv", "seed": 3,
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "t.csv").write_text(TRACE)
    (folder / "cluster.yaml").write_text("nodes:\n  - {count: 1, gpu: V100-16GB, gpus: 4, cpus: 12, memory: 250GB}\n")
    return folder


def packed(point: Point, base: Path) -> tuple[dict[str, str], list[bytes]]:
    files = paths_of(point, base)
    return {name: digest_of(path) for name, path in files.items()}, [path.read_bytes() for path in files.values()]


@pytest.mark.parametrize("there", ["the same", "none", "another"])
def test_the_record_is_that_of_a_run_here(base: Path, tmp_path: Path, there: str) -> None:
    run_point(POINT, tmp_path / "here", base)
    digests, contents = packed(POINT, base)
    assert set(digests) == {"trace", "cluster", "arrivals"}
    if there == "none":
        shutil.rmtree(base)
    elif there == "another":
        (base / "t.csv").write_text(TRACE.replace("600", "6000"))
    found = run_packed(POINT, str(base), version("cotenant"), digests, *contents)
    assert isinstance(found, dict), found
    assert found == {file.name: file.read_bytes() for file in (tmp_path / "here").iterdir()}


def test_what_is_wrong_comes_back_as_it_would_be_raised(base: Path) -> None:
    point = POINT | {"max_duration": "1s"}
    found = run_packed(point, str(base), version("cotenant"), *packed(point, base)[:1], *packed(point, base)[1])
    assert isinstance(found, InputError)
    assert "the trace has no jobs to run" in str(found)


def test_another_version_is_refused(base: Path) -> None:
    found = run_packed(POINT, str(base), "0.0.1", {})
    assert isinstance(found, WorkError)
    assert "the sweep runs with 0.0.1" in str(found)


@pytest.mark.parametrize(
    ("address", "kind", "said"),
    [
        ("here", InputError, "'here' is not HOST:PORT of a Ray cluster, or auto"),
        ("127.0.0.1:99999", WorkError, "cannot reach Ray at 127.0.0.1:99999"),
        ("127.0.0.1:0", WorkError, "cannot reach Ray at 127.0.0.1:0"),
    ],
)
def test_an_address_without_a_cluster_is_one_sentence(address: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as raised:
        check_listens(address)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
