"""`cotenant sweep`: every combination, the same bytes however often it was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command import command, cotenant

FILE = """\
title: Small sweep
jobs: 40
cluster: 2x8
load: [0.7, 1.2]
ordering: [fifo, srtf]
allotment: tune
seed: [1, 2]
"""


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a sweep's runs, and its list of them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sweep file, finished sweep); also brings the kernels into the cache."""
    folder = tmp_path_factory.mktemp("sweep")
    file = folder / "small.yaml"
    file.write_text(FILE)
    assert cotenant("sweep", file, "--out", folder / "out", "--workers", 2).code == 0
    return file, folder / "out"


def test_every_combination_is_a_run(undisturbed: tuple[Path, Path]) -> None:
    file, out = undisturbed
    again = cotenant("sweep", file, "--out", out, "--json")
    assert (again.code, again.err) == (0, "")
    answer = json.loads(again.out)
    assert answer["title"] == "Small sweep"
    assert len(answer["runs"]) == 2 * 2 * 2
    seen = {(run["options"]["load"], run["options"]["ordering"], run["seed"]) for run in answer["runs"]}
    assert seen == {(load, name, seed) for load in (0.7, 1.2) for name in ("fifo", "srtf") for seed in (1, 2)}
    assert len({run["label"] for run in answer["runs"]}) == 8
    assert all(run["jobs_completed"] == 40 for run in answer["runs"])
    listed = json.loads((out / "sweep.json").read_text())
    assert listed["axes"] == {"load": ["0.7", "1.2"], "ordering": ["fifo", "srtf"], "seed": ["1", "2"]}
    assert [run["path"] for run in answer["runs"]] == [str(out / run["folder"]) for run in listed["runs"]]
    assert (out / "report.html").stat().st_size > 100_000


def test_a_run_of_a_sweep_is_the_same_as_simulate(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = undisturbed
    trace = tmp_path / "t.csv"
    drawn = ("--jobs", 40, "--load", 1.2, "--cluster", "2x8", "--seed", 2, "--out", trace)
    assert cotenant("trace", "generate", *drawn).code == 0
    single = ("--trace", trace, "--cluster", "2x8", "--ordering", "srtf", "--out", tmp_path / "run")
    assert cotenant("simulate", *single).code == 0
    runs = json.loads((out / "sweep.json").read_text())["runs"]
    folder = next(out / r["folder"] for r in runs if (r["load"], r["ordering"], r["seed"]) == (1.2, "srtf", 2))
    for name in ("jobs.parquet", "events.parquet", "rounds.parquet"):
        assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_set_goes_over_the_file(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    file, _ = undisturbed
    changes = ("--set", "load=0.5", "--set", "ordering=[las]", "--set", "seed=[3,4]")
    result = cotenant("sweep", file, "--out", tmp_path / "out", *changes, "--workers", 1, "--json")
    runs = json.loads(result.out)["runs"]
    assert {(r["options"]["load"], r["options"]["ordering"]) for r in runs} == {(0.5, "las")}
    assert [r["seed"] for r in runs] == [3, 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ordering=[las,foo]", "--set ordering: unknown ordering 'foo'"),
        ("gpu=[A100-40GB,Z9]", "--set gpu: "),
        ("load=[0.9,90]", "--set load: 90 is over 1000%"),
        ("lode=0.9", "--set lode: is not an option of a sweep; did you mean load?"),
        ("max_jobs=3", "--set max_jobs: cannot be used with a generated trace"),
    ],
)
def test_a_wrong_value_of_set_is_not_blamed_on_the_file(
    undisturbed: tuple[Path, Path], tmp_path: Path, change: str, said: str
) -> None:
    file, _ = undisturbed
    result = cotenant("sweep", file, "--out", tmp_path / "out", "--set", change)
    assert result.code == 2
    assert result.err.startswith(f"cotenant: {said}")


def test_paths_are_relative_to_the_file_and_a_changed_trace_runs_anew(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "t.csv").write_text("id,arrival_s,gpus,duration_s\na,0,1,600\nb,300,1,600\n")
    file = folder / "s.yaml"
    file.write_text("trace: native:t.csv\ncluster: 1x8\nallotment: proportional\nordering: [fifo, las]\n")
    again = ("sweep", file, "--out", tmp_path / "out", "--workers", 1, "--json")
    first = json.loads(cotenant(*again).out)
    assert [run["jct_s"]["mean"] for run in first["runs"]] == [600.0, 600.0]
    (folder / "t.csv").write_text("id,arrival_s,gpus,duration_s\na,0,1,900\nb,300,1,900\n")
    second = json.loads(cotenant(*again).out)
    assert [run["jct_s"]["mean"] for run in second["runs"]] == [900.0, 900.0]


def test_the_figure_of_an_experiment_is_drawn_from_its_results(tmp_path: Path) -> None:
    def run(load: float, allotment: str, seed: int, hours: float) -> dict[str, object]:
        options = {"load": load, "ordering": "fifo", "allotment": allotment}
        return {"options": options, "seed": seed, "jct_s": {"mean": hours * 3600}}

    runs = [run(load, a, seed, h * load * seed) for load in (0.5, 1.0) for a, h in (("proportional", 8), ("tune", 2))
            for seed in (1, 3)]  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps({"runs": runs}))
    script = Path(__file__).resolve().parents[2] / "docs" / "experiments" / "figure.py"
    for name, kind in (("lines", ["--by", "load", "--axis", "load"]), ("dots", ["--by", "load,ordering"])):
        svg = tmp_path / f"{name}.svg"
        drawing = [sys.executable, script, tmp_path / "r.json", *kind, "--svg", svg]
        drawn = subprocess.run(drawing, capture_output=True, text=True, check=True)
        root = ElementTree.fromstring(svg.read_text())
        assert root.tag.endswith("svg")
        assert "16.0" in drawn.stdout  # 8 h at load 1, for seeds 1 and 3
        assert drawn.stdout.count("4.00×") == 2


def runs_in(out: Path) -> list[Path]:
    return [path for path in (out / "runs").glob("*") if not path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_a_stopped_sweep_goes_on_where_it_stopped(
    undisturbed: tuple[Path, Path], tmp_path: Path, how: signal.Signals
) -> None:
    file, whole = undisturbed
    out = tmp_path / "out"
    # Ctrl-C in a terminal sends SIGINT to the whole process group.
    run = subprocess.Popen(
        command("sweep", file, "--out", out, "--workers", 1), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not runs_in(out) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if how is signal.SIGINT:
        os.killpg(run.pid, how)
    else:
        run.kill()
    _, said = run.communicate(timeout=120)
    while _alive(run.pid) and time.monotonic() < deadline:  # the workers of the group end together with their parent
        time.sleep(0.05)
    assert not _alive(run.pid)
    if how is signal.SIGINT:
        assert run.returncode == 130
        assert "Traceback" not in said
        assert "run the same command to continue" in said
        assert not list((out / "runs").glob(".*"))
    kept = {path.name: (path / "events.parquet").stat().st_mtime_ns for path in runs_in(out)}
    assert 1 <= len(kept) < 8, "the sweep ended before it could be stopped"
    assert not (out / "sweep.json").exists()
    assert all((path / "run.json").exists() for path in runs_in(out))

    assert cotenant("sweep", file, "--out", out, "--workers", 1).code == 0
    assert tree(out) == tree(whole)
    assert {name: (out / "runs" / name / "events.parquet").stat().st_mtime_ns for name in kept} == kept


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_failing_run_stops_the_sweep_with_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("jobs: 20\ncluster: 1x4\nload: [0.5, 0.9]\ngpu_mix: 1:50,8:50\n")
    result = cotenant("sweep", file, "--out", tmp_path / "out", "--workers", 1)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert not list((tmp_path / "out").rglob("*.part-*"))


def test_elastic_policies_are_runs_of_a_sweep_as_of_simulate(tmp_path: Path) -> None:
    models = {name: {"family": "image", "rate": {"V100-16GB": {"1": 1.0, "2": 1.5}}} for name in ("a", "b")}
    (tmp_path / "elastic.json").write_text(json.dumps({"models": models}))
    rows = "".join(f"j{i},{200 * i},1,{'ab'[i % 2]},{600 + i}\n" for i in range(12))
    (tmp_path / "t.csv").write_text(f"id,arrival_s,gpus,model,iterations\n{rows}")
    (tmp_path / "s.yaml").write_text(
        "trace: native:t.csv\ncluster: 1x4\ngpu: V100-16GB\npolicy: [gavel, sia-fast]\nprofiles: elastic.json\n"
        "lease: [60s, 120s]\nrestart_cost: 10s\n"
    )
    result = cotenant("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out", "--workers", 1, "--json")
    assert result.code == 0, result.err
    runs = json.loads(result.out)["runs"]
    assert {(r["options"]["policy"], r["options"]["lease_s"]) for r in runs} == {
        (policy, lease) for policy in ("gavel", "sia-fast") for lease in (60.0, 120.0)
    }
    alone = ("--policy", "gavel", "--profiles", tmp_path / "elastic.json", "--lease", "60s", "--restart-cost", "10s")
    where = ("--trace", tmp_path / "t.csv", "--cluster", "1x4", "--gpu", "V100-16GB")
    assert cotenant("simulate", *where, *alone, "--out", tmp_path / "one").code == 0
    folder = next(Path(r["path"]) for r in runs if (r["options"]["policy"], r["options"]["lease_s"]) == ("gavel", 60))
    for name in ("jobs.parquet", "events.parquet", "rounds.parquet"):
        assert (folder / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_partition_policies_are_runs_of_a_sweep_as_of_simulate(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "jobs: 12\nlike: miso\nrate: 60/h\ncluster: 2x1\ngpu: A100-40GB\npolicy: [whole, miso]\n"
        "reconfigure_time: 6s\nseed: [1, 2]\n"
    )
    result = cotenant("sweep", file, "--out", tmp_path / "out", "--workers", 1, "--json")
    assert result.code == 0, result.err
    runs = json.loads(result.out)["runs"]
    assert {(r["options"]["policy"], r["seed"]) for r in runs} == {(p, s) for p in ("whole", "miso") for s in (1, 2)}
    assert all(r["options"]["reconfigure_s"] == 6.0 and r["jobs_completed"] == 12 for r in runs)
    trace = tmp_path / "t.csv"
    drawn = ("--jobs", 12, "--like", "miso", "--rate", "60/h", "--seed", 2, "--out", trace)
    assert cotenant("trace", "generate", *drawn).code == 0
    where = ("--trace", trace, "--cluster", "2x1", "--gpu", "A100-40GB", "--seed", 2)
    single = ("--policy", "miso", "--reconfigure-time", "6s", "--out", tmp_path / "one")
    assert cotenant("simulate", *where, *single).code == 0
    folder = next(Path(r["path"]) for r in runs if (r["options"]["policy"], r["seed"]) == ("miso", 2))
    for name in ("events.parquet", "rounds.parquet"):
        assert (folder / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("policy: [sia, siaa]", "unknown policy 'siaa'; did you mean sia?"),
        ("policy: sia\nordering: [fifo, las]", "field ordering: is for job policies; policy sia does not have it"),
        ("policy: miso\nlease: 60s", "lease is for job policies; policy miso does not have it"),
        ("policy: sia\nlayout: 3,2,2", "layout is for partition policies"),
        ("layout: 3,2,2", "layout is for partition policies"),
        ("policy: mps\nmps_jobs: 100", "100 is not a whole number from 1 to 48"),
        ("policy: miso\nprofile_sole: often", "'often' is neither true nor false"),
        ("policy: sia\nlease: -5s", "field lease: "),
        ("loads: 0.5", "field loads: is not an option of a sweep; did you mean load?"),
        ("seed: [yes, no]", "field seed: true is not a number"),
        ("lease: yes", "field lease: true is not a number"),
    ],
)
def test_options_of_other_policies_are_one_sentence(tmp_path: Path, lines: str, said: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"jobs: 20\ncluster: 1x4\nload: 0.5\n{lines}\n")
    result = cotenant("sweep", file, "--out", tmp_path / "out")
    assert result.code == 2
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("json_", [True, False])
def test_a_failed_run_is_named_and_the_others_are_reported(tmp_path: Path, json_: bool) -> None:
    """Jobs of 8 GPUs fit on one of the two clusters."""
    (tmp_path / "t.csv").write_text("id,arrival_s,gpus,duration_s\na,0,8,600\nb,300,8,600\n")
    file = tmp_path / "s.yaml"
    file.write_text("trace: native:t.csv\ncluster: [1x4, 1x8]\nordering: [fifo, las]\nallotment: proportional\n")
    out = tmp_path / "out"
    result = cotenant("sweep", file, "--out", out, "--workers", 1, *(["--json"] if json_ else []))
    assert result.code == 1, result.err
    assert "the run with cluster: 1x4, ordering: fifo failed: " in result.err
    assert "the run with cluster: 1x4, ordering: las failed: " in result.err
    assert "cluster: 1x8" not in result.err
    assert (out / "report.html").stat().st_size > 100_000
    listed = json.loads((out / "sweep.json").read_text())["runs"]
    assert [("error" in run, run["cluster"]) for run in listed] == [(True, "1x4")] * 2 + [(False, "1x8")] * 2
    if json_:
        answer = json.loads(result.out)
        assert [run["jobs_completed"] for run in answer["runs"]] == [2, 2]
        assert [run["options"] for run in answer["failed"]] == [
            {"cluster": "1x4", "ordering": ordering} for ordering in ("fifo", "las")
        ]
