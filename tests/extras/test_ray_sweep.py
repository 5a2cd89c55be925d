"""A sweep on a Ray cluster of two nodes: the records of a sweep here, also when workers or the sweep are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.extras, pytest.mark.slow]

from command import command, cotenant  # noqa: E402
from waiting import wait_for  # noqa: E402

FILE = "trace: native:t.csv\ncluster: 2x8\nordering: [fifo, srtf]\nseed: [1, 2]\ndurations: two-part\n"
RUNS = 4
LONG_S = 300.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    import ray
    from ray.cluster_utils import Cluster

    made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1, wait=False)
    made.wait_for_nodes(LONG_S)
    yield str(made.address)
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sweep file, the sweep as this machine does it)."""
    folder = tmp_path_factory.mktemp("sweep")
    rows = "".join(f"j{i},{60 * i},1,600\n" for i in range(200))
    (folder / "t.csv").write_text(f"id,arrival_s,gpus,duration_s\n{rows}")
    (folder / "s.yaml").write_text(FILE)
    assert cotenant("sweep", folder / "s.yaml", "--out", folder / "out", "--workers", 1).code == 0
    return folder / "s.yaml", folder / "out"


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def at_work() -> list[int]:
    """Processes of Ray that run a point now, by the title that Ray gives them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                title = (folder / "cmdline").read_bytes()
            except OSError:  # the process has ended meanwhile
                continue
            if title.startswith(b"ray::run_packed"):
                found.append(int(folder.name))
    return found


def kill_one_at_work() -> bool:
    """Kill a process in the middle of a run: stopped first, it cannot end before it is known to run one."""
    for pid in at_work():
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            continue
        if pid in at_work():
            os.kill(pid, signal.SIGKILL)
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def sweep_at(address: str, file: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("sweep", file, "--out", out, "--address", address),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_the_runs_of_a_killed_worker_are_done_again(address: str, here: tuple[Path, Path], tmp_path: Path) -> None:
    file, whole = here
    run = sweep_at(address, file, tmp_path / "out")
    assert wait_for(kill_one_at_work, LONG_S)
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 0, said
    assert tree(tmp_path / "out") == tree(whole)


def test_a_killed_sweep_goes_on_where_it_stopped(address: str, here: tuple[Path, Path], tmp_path: Path) -> None:
    file, whole = here
    out = tmp_path / "out"
    run = sweep_at(address, file, out)
    assert wait_for(lambda: list(out.glob("runs/[!.]*")), LONG_S)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=LONG_S)
    kept = {path.name: (path / "events.parquet").stat().st_mtime_ns for path in out.glob("runs/[!.]*")}
    assert 1 <= len(kept) <= RUNS
    again = cotenant("sweep", file, "--out", out, "--address", address, "--json")
    assert again.code == 0, again.err
    assert len(json.loads(again.out)["runs"]) == RUNS
    assert tree(out) == tree(whole)
    assert {name: (out / "runs" / name / "events.parquet").stat().st_mtime_ns for name in kept} == kept


def test_what_is_wrong_is_one_sentence(address: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("jobs: 20\ncluster: 1x4\nload: [0.5, 0.9]\ngpu_mix: 1:50,8:50\n")
    result = cotenant("sweep", file, "--out", tmp_path / "out", "--address", address)
    assert result.code == 2
    assert len(result.err.strip().splitlines()) == 1
    assert not list((tmp_path / "out").rglob("*.part-*"))
