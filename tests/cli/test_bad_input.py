"""Wrong input to the simulator's commands: one sentence that says where, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import cotenant, cotenant_process
from sample_records import random_record

GOOD = "id,arrival_s,gpus,duration_s,model\na,0,1,600,res50\nb,60,2,900,lstm\nc,70,8,300,alexnet\n"
FILES = {
    "good.csv": GOOD,
    "no-column.csv": "id,arrival_s,duration_s\na,0,600\n",
    "negative.csv": "id,arrival_s,gpus,duration_s\na,0,1,600\nb,60,1,-5\n",
    "nan.csv": "id,arrival_s,gpus,duration_s\na,0,1,nan\n",
    "infinite.csv": "id,arrival_s,gpus,duration_s\na,0,1,inf\n",
    "text.csv": "id,arrival_s,gpus,duration_s\na,0,1,ten\n",
    "early.csv": "id,arrival_s,gpus,duration_s\na,-1,1,600\n",
    "zero-gpus.csv": "id,arrival_s,gpus,duration_s\na,0,0,600\n",
    "absurd-gpus.csv": "id,arrival_s,gpus,duration_s\na,0,1000000000,600\n",
    "half-gpus.csv": "id,arrival_s,gpus,duration_s\na,0,1.5,600\n",
    "too-large.csv": "id,arrival_s,gpus,duration_s,model\na,0,1,60,res50\nb,0,64,600,res50\n",
    "twice.csv": "id,arrival_s,gpus,duration_s\na,0,1,600\nb,10,1,600\na,20,1,600\n",
    "model.csv": "id,arrival_s,gpus,duration_s,model\na,0,1,600,no-such-net\n",
    "gpu-model.csv": "id,arrival_s,gpus,duration_s,gpu_models\na,0,1,600,H900\n",
    "header-only.csv": "id,arrival_s,gpus,duration_s\n",
    "empty.csv": "",
    "short-row.csv": "id,arrival_s,gpus,duration_s\na,0,1\n",
    "no-work.csv": "id,arrival_s,gpus\na,0,1\n",
    "iterations.csv": "0,res50,0.0,-7,1\n",
    "binary.csv": "\x00\x01\x02\xff\n",
    "not.parquet": "PAR1 and then nothing of the kind",
    "job-log.json": '[{"jobid": "a", ',
    "cluster.yaml": "nodes:\n  - {count: 1, gpus: -8}\n",
    "cluster-model.yaml": "nodes:\n  - {count: 1, gpus: 8, gpu: H900}\n",
    "cluster-empty.yaml": "",
    "vast.yaml": "nodes:\n  - {count: 1, gpus: 8, memory: 1e308}\n",
    "ages.csv": "id,arrival_s,gpus,iterations,model\na,0,1,9e15,res50\n",
    "cluster.ini": "[cluster]\n",
    "profiles.json": '{"models": ',
    "profiles-empty.json": "{}",
    "s-yaml.yaml": "jobs: [1, 2\nordering: fifo\n",
    "s-list.yaml": "- fifo\n- las\n",
    "s-empty.yaml": "",
    "s-field.yaml": "jobs: 10\norderings: [fifo]\n",
    "s-none.yaml": "jobs: 10\nordering:\n",
    "s-dict.yaml": "jobs: 10\nordering: {fifo: 1}\n",
    "s-nested.yaml": "jobs: 10\nordering: [[fifo]]\n",
    "s-policy.yaml": "jobs: 10\nordering: [fifo, lifo]\n",
    "s-allotment.yaml": "jobs: 10\nallotment: [tune, tuned]\n",
    "s-lease.yaml": "jobs: 10\nlease: [300s, 0s]\n",
    "s-load.yaml": "jobs: 10\nload: [0.9, -1]\n",
    "s-rate.yaml": "jobs: 10\nrate: [8/h, fast]\n",
    "s-jobs.yaml": "jobs: ten\n",
    "s-seed.yaml": "jobs: 10\nseed: [1, x]\n",
    "s-seed-part.yaml": "jobs: 10\nseed: 1.5\n",
    "s-split.yaml": "jobs: 10\nsplit: ['20,70,10', '1,2']\n",
    "s-mix.yaml": "jobs: 10\ngpu_mix: '1:x'\n",
    "s-cluster.yaml": "jobs: 10\ncluster: [1x8, huge]\n",
    "s-cpus.yaml": "jobs: 10\ncpus_per_node: [24, -1]\n",
    "s-twice.yaml": "jobs: 10\nseed: [1, 1]\n",
    "s-nothing.yaml": "ordering: [fifo, las]\n",
    "s-both.yaml": "trace: native:good.csv\njobs: 10\n",
    "s-missing.yaml": "trace: native:gone.csv\n",
    "s-many.yaml": f"jobs: 10\nload: {[k / 1000 for k in range(1, 500)]}\nseed: {list(range(500))}\n",
    "s-measure.yaml": "jobs: 10\nmeasure: 20-30\n",
    "s-good.yaml": "jobs: 5\nseed: [1, 2]\n",
}  # fmt: skip

TRACE = ("simulate", "--trace")
SIMULATE = ("simulate", "--cluster", "1x8", "--trace", "native:good.csv")
MISO = ("--policy", "miso", "--default-profile", "gnn_train128")
# Name: (arguments, words that the message must contain). Paths are relative to a folder that contains FILES.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # traces
    "no trace": (("simulate",), ("trace",)),
    "no such file": ((*TRACE, "native:gone.csv"), ("gone.csv", "No such file")),
    "a folder for a trace": ((*TRACE, "native:folder"), ("folder",)),
    "unknown format": ((*TRACE, "slurm:good.csv"), ("slurm", "philly")),
    "missing column": ((*TRACE, "native:no-column.csv"), ("no-column.csv", "gpus")),
    "negative duration": ((*TRACE, "native:negative.csv"), ("negative.csv", "line 3", "duration_s")),
    "NaN duration": ((*TRACE, "native:nan.csv"), ("nan.csv", "line 2", "duration_s")),
    "infinite duration": ((*TRACE, "native:infinite.csv"), ("infinite.csv", "line 2", "duration_s")),
    "duration in words": ((*TRACE, "native:text.csv"), ("text.csv", "line 2", "duration_s", "ten")),
    "negative arrival": ((*TRACE, "native:early.csv"), ("early.csv", "line 2", "arrival_s")),
    "zero GPUs": ((*TRACE, "native:zero-gpus.csv"), ("zero-gpus.csv", "line 2", "gpus")),
    "absurd GPUs": ((*TRACE, "native:absurd-gpus.csv"), ("absurd-gpus.csv", "line 2", "gpus")),
    "one and a half GPUs": ((*TRACE, "native:half-gpus.csv"), ("half-gpus.csv", "line 2", "gpus")),
    "a job larger than the cluster": (
        (*TRACE, "native:too-large.csv", "--cluster", "1x8"), ("too-large.csv", "b", "64", "--skip-too-large"),
    ),
    "duplicate id": ((*TRACE, "native:twice.csv"), ("twice.csv", "line 4", "id")),
    "unknown model": ((*TRACE, "native:model.csv"), ("model.csv", "no-such-net", "--default-profile")),
    "unknown GPU model wanted": ((*TRACE, "native:gpu-model.csv"), ("gpu-model.csv", "line 2", "gpu_models", "H900")),
    "no rows": ((*TRACE, "native:header-only.csv"), ("header-only.csv",)),
    "an empty file": ((*TRACE, "native:empty.csv"), ("empty.csv",)),
    "a short row": ((*TRACE, "native:short-row.csv"), ("short-row.csv", "line 2")),
    "no work stated": ((*TRACE, "native:no-work.csv"), ("no-work.csv", "duration_s")),
    "negative iterations": ((*TRACE, "synergy:iterations.csv"), ("iterations.csv", "line 1", "iterations")),
    "binary for CSV": ((*TRACE, "native:binary.csv"), ("binary.csv",)),
    "truncated Parquet": ((*TRACE, "native:cut.parquet"), ("cut.parquet",)),
    "no Parquet at all": ((*TRACE, "native:not.parquet"), ("not.parquet",)),
    "truncated JSON": ((*TRACE, "philly-json:job-log.json"), ("job-log.json",)),
    "window of nothing": ((*SIMULATE, "--from", "10d"), ("good.csv",)),
    "window backwards": ((*SIMULATE, "--from", "2h", "--to", "1h"), ("from",)),
    "unknown tenant": ((*SIMULATE, "--tenant", "nobody"), ("tenant", "nobody")),
    "no jobs wanted": ((*SIMULATE, "--max-jobs", "0"), ("max-jobs",)),
    "bad split": ((*SIMULATE, "--split", "20,70"), ("split", "20,70")),
    "split of nothing": ((*SIMULATE, "--split", "0,0,0"), ("split",)),
    "bad arrivals": ((*SIMULATE, "--arrivals", "often"), ("arrivals", "often")),
    "bad durations": ((*SIMULATE, "--durations", "lognormal:20min"), ("durations",)),
    "rate scale of nothing": ((*SIMULATE, "--rate-scale", "0"), ("rate-scale",)),
    "negative seed": ((*SIMULATE, "--arrivals", "poisson", "--seed", "-1"), ("seed", "-1")),
    # clusters
    "unknown cluster": ((*TRACE, "good.csv", "--cluster", "huge"), ("cluster", "huge")),
    "cluster of nothing": ((*TRACE, "good.csv", "--cluster", "0x8"), ("cluster",)),
    "cluster beyond reason": ((*TRACE, "good.csv", "--cluster", "1x999999999"), ("cluster",)),
    "unknown GPU": ((*SIMULATE, "--gpu", "H900"), ("gpu", "H900")),
    "negative cores": ((*SIMULATE, "--cpus-per-node", "-1"), ("cpus-per-node",)),
    "unknown unit": ((*SIMULATE, "--memory-per-node", "500parsecs"), ("500parsecs", "memory")),
    "memory without a unit": ((*SIMULATE, "--memory-per-node", "500"), ("--memory-per-node", "500GiB")),
    "room to free without a unit": (("preempt", "--gpu", "0", "--free", "40"), ("--free", "40GiB")),
    "host memory without a unit": (("agent", "--gpus", "soft", "--swap-memory", "200"), ("--swap-memory", "200GiB")),
    "contents without a unit": (("bench", "swap", "--size", "24"), ("--size", "24GiB")),
    # an empty value, which a shell makes of a variable that is not set
    "empty memory": (("run", "--memory", "", "--", "true"), ("--memory", "empty")),
    "empty limit": (("run", "--limit=", "--", "true"), ("--limit", "empty")),
    "empty mechanism": (("run", "--mechanism", "", "--", "true"), ("--mechanism", "empty")),
    "empty name": (("run", "--name", "", "--", "true"), ("--name", "empty")),
    "empty memory to set": (("set", "a", "--memory", ""), ("--memory", "empty")),
    "empty trace": (("simulate", "--trace", "", "--cluster", "1x8"), ("--trace", "empty")),
    "empty value of a subcommand": (("trace", "generate", "--rate", ""), ("--rate", "empty")),
    "empty one of several": (("load", "--url", "http://127.0.0.1:1", "--service", ""), ("--service", "empty")),
    "negative GPUs per node": ((*TRACE, "good.csv", "--cluster", "cluster.yaml"), ("cluster.yaml", "gpus")),
    "unknown GPU in a file": ((*TRACE, "good.csv", "--cluster", "cluster-model.yaml"), ("cluster-model.yaml", "H900")),
    "empty cluster file": ((*TRACE, "good.csv", "--cluster", "cluster-empty.yaml"), ("cluster-empty.yaml",)),
    "no cluster file": ((*TRACE, "good.csv", "--cluster", "gone.yaml"), ("gone.yaml",)),
    "no INI file": ((*TRACE, "good.csv", "--cluster", "synergy-ini:gone.ini"), ("gone.ini",)),
    # policies and engine
    "unknown ordering": ((*SIMULATE, "--ordering", "lifo"), ("lifo", "fifo", "ordering")),
    "unknown allotment": ((*SIMULATE, "--allotment", "tuned"), ("tuned", "tune", "allotment")),
    "unknown placement": ((*SIMULATE, "--placement", "best"), ("best", "first-fit", "placement")),
    "unknown policy": ((*SIMULATE, "--policy", "misso"), ("misso", "miso", "policy")),
    "partition option alone": ((*SIMULATE, "--layout", "3,2,2"), ("layout", "--policy")),
    "job option with a policy": ((*SIMULATE, "--policy", "miso", "--ordering", "las"), ("ordering",)),
    "memory beyond reason": ((*SIMULATE, "--memory-per-node", "1e300"), ("memory",)),
    "memory beyond reason in a file": ((*TRACE, "good.csv", "--cluster", "vast.yaml"), ("vast.yaml", "memory")),
    "leases too short for the jobs": ((*SIMULATE, "--lease", "1us"), ("lease", "job b", "9e+08")),
    "jobs too long for the leases": ((*TRACE, "native:ages.csv"), ("lease", "job a")),
    "lease of nothing": ((*SIMULATE, "--lease", "0"), ("lease",)),
    "negative lease": ((*SIMULATE, "--lease", "-5s"), ("lease",)),
    "endless lease": ((*SIMULATE, "--lease", "1e9d"), ("lease",)),
    "lease of an unknown unit": ((*SIMULATE, "--lease", "5 fortnights"), ("lease", "fortnights")),
    "unknown finish": ((*SIMULATE, "--finish", "soon"), ("finish", "soon")),
    "unknown speeds": ((*SIMULATE, "--speeds", "warp"), ("speeds", "warp")),
    "negative restart cost": ((*SIMULATE, "--restart-cost", "-1s"), ("restart-cost",)),
    "negative checkpoint cost": ((*SIMULATE, "--checkpoint-cost", "-1s"), ("checkpoint-cost",)),
    "NaN restart cost": ((*SIMULATE, "--restart-cost", "nan"), ("restart-cost",)),
    "reserve at once": ((*SIMULATE, "--reserve-after", "0s"), ("reserve-after",)),
    "bad queues": ((*SIMULATE, "--ordering", "las-queues", "--queues", "1h,soon"), ("queues", "soon")),
    "queues that fall": ((*SIMULATE, "--ordering", "las-queues", "--queues", "10h,1h"), ("queues",)),
    "no queues": ((*SIMULATE, "--ordering", "las-queues", "--queues", ""), ("queues",)),
    "no such verb": (("simulat", *TRACE[1:]), ("did you mean simulate",)),
    "no such sample": ((*SIMULATE, "--ordering", "gittins", "--gittins-sample", "gone.csv"), ("gone.csv",)),
    "no time to solve": ((*SIMULATE, "--allotment", "optimal", "--solver-limit", "0s"), ("solver-limit",)),
    "no such profiles": ((*SIMULATE, "--profiles", "gone.json"), ("gone.json",)),
    "broken profiles": ((*SIMULATE, "--profiles", "profiles.json"), ("profiles.json",)),
    "profiles of nothing": ((*SIMULATE, "--profiles", "profiles-empty.json"), ("profiles-empty.json",)),
    "no such profile": ((*SIMULATE, "--default-profile", "gpt9"), ("default-profile", "gpt9")),
    "unknown record": ((*SIMULATE, "--record", "some"), ("record", "some")),
    "measure backwards": ((*SIMULATE, "--measure", "3-1"), ("measure", "3-1")),
    "measure beyond the trace": ((*SIMULATE, "--measure", "10-20"), ("measure", "3 jobs")),
    # partition policies
    "no MIG profile": ((*SIMULATE, "--policy", "miso"), ("good.csv", "model", "res50", "--default-profile")),
    "GPU without MIG": ((*SIMULATE, *MISO, "--gpu", "T4"), ("gpu", "T4")),
    "static without a layout": ((*SIMULATE, *MISO, "--policy", "static"), ("layout",)),
    "layout of nothing": ((*SIMULATE, *MISO, "--policy", "static", "--layout", "9,9"), ("layout", "9")),
    "unknown objective": ((*SIMULATE, *MISO, "--objective", "fun"), ("objective", "fun")),
    "unknown disturb": ((*SIMULATE, *MISO, "--disturb", "some"), ("disturb", "some")),
    "placement of a job policy": ((*SIMULATE, *MISO, "--placement", "first-fit"), ("placement", "first-fit")),
    "horizon in words": ((*SIMULATE, *MISO, "--horizon", "soon"), ("horizon", "soon")),
    "negative profile time": ((*SIMULATE, *MISO, "--profile-time", "-4s"), ("profile-time",)),
    "a gang larger than the MIG cluster": ((*SIMULATE, *MISO, "--cluster", "1x4"), ("good.csv", "gpus", "8")),
    # outputs
    "no folder for the JCT file": ((*SIMULATE, "--jct-csv", "gone/jct.csv"), ("gone/jct.csv",)),
    "no folder for the page": ((*SIMULATE, "--html", "gone/r.html"), ("gone/r.html",)),
    "a file for the run's folder": ((*SIMULATE, "--out", "good.csv"), ("good.csv", "not a folder")),
    "a file above the run's folder": ((*SIMULATE, "--out", "good.csv/run"), ("good.csv/run",)),
    "a folder for the JCT file": ((*SIMULATE, "--jct-csv", "folder"), ("folder",)),
    "a folder of something else": ((*SIMULATE, "--out", "folder"), ("folder", "something other")),
    # sweeps
    "no such sweep": (("sweep", "gone.yaml", "--out", "o"), ("gone.yaml",)),
    "a folder for a sweep": (("sweep", "folder", "--out", "o"), ("folder",)),
    "no YAML": (("sweep", "s-yaml.yaml", "--out", "o"), ("s-yaml.yaml", "line")),
    "a list for a sweep": (("sweep", "s-list.yaml", "--out", "o"), ("s-list.yaml",)),
    "an empty sweep": (("sweep", "s-empty.yaml", "--out", "o"), ("s-empty.yaml",)),
    "unknown sweep field": (("sweep", "s-field.yaml", "--out", "o"), ("s-field.yaml", "orderings")),
    "no value": (("sweep", "s-none.yaml", "--out", "o"), ("s-none.yaml", "ordering")),
    "a mapping for a value": (("sweep", "s-dict.yaml", "--out", "o"), ("s-dict.yaml", "ordering")),
    "a list in a list": (("sweep", "s-nested.yaml", "--out", "o"), ("s-nested.yaml", "ordering")),
    "sweep: unknown ordering": (("sweep", "s-policy.yaml", "--out", "o"), ("s-policy.yaml", "ordering", "lifo")),
    "sweep: unknown allotment": (("sweep", "s-allotment.yaml", "--out", "o"), ("s-allotment.yaml", "tuned")),
    "sweep: no lease": (("sweep", "s-lease.yaml", "--out", "o"), ("s-lease.yaml", "lease")),
    "sweep: negative load": (("sweep", "s-load.yaml", "--out", "o"), ("s-load.yaml", "load")),
    "sweep: bad rate": (("sweep", "s-rate.yaml", "--out", "o"), ("s-rate.yaml", "rate", "fast")),
    "sweep: jobs in words": (("sweep", "s-jobs.yaml", "--out", "o"), ("s-jobs.yaml", "jobs", "ten")),
    "sweep: bad seed": (("sweep", "s-seed.yaml", "--out", "o"), ("s-seed.yaml", "seed")),
    "sweep: part of a seed": (("sweep", "s-seed-part.yaml", "--out", "o"), ("s-seed-part.yaml", "seed")),
    "sweep: bad split": (("sweep", "s-split.yaml", "--out", "o"), ("s-split.yaml", "split")),
    "sweep: bad mix": (("sweep", "s-mix.yaml", "--out", "o"), ("s-mix.yaml", "gpu")),
    "sweep: unknown cluster": (("sweep", "s-cluster.yaml", "--out", "o"), ("s-cluster.yaml", "huge")),
    "sweep: negative cores": (("sweep", "s-cpus.yaml", "--out", "o"), ("s-cpus.yaml", "cpus")),
    "sweep: a value twice": (("sweep", "s-twice.yaml", "--out", "o"), ("s-twice.yaml", "seed")),
    "sweep: no trace": (("sweep", "s-nothing.yaml", "--out", "o"), ("s-nothing.yaml", "trace")),
    "sweep: read and drawn": (("sweep", "s-both.yaml", "--out", "o"), ("s-both.yaml", "jobs")),
    "sweep: missing trace": (("sweep", "s-missing.yaml", "--out", "o"), ("gone.csv",)),
    "sweep: too many": (("sweep", "s-many.yaml", "--out", "o"), ("s-many.yaml", "combinations")),
    "sweep: measure beyond": (("sweep", "s-measure.yaml", "--out", "o"), ("s-measure.yaml", "measure")),
    "sweep: set without a value": (("sweep", "s-good.yaml", "--out", "o", "--set", "seed"), ("set", "seed")),
    "sweep: set the unknown": (("sweep", "s-good.yaml", "--out", "o", "--set", "sed=1"), ("sed",)),
    "sweep: set a bad value": (("sweep", "s-good.yaml", "--out", "o", "--set", "ordering=[lifo]"), ("lifo",)),
    "sweep into a file": (("sweep", "s-good.yaml", "--out", "good.csv"), ("good.csv", "not a folder")),
    "sweep into something else": (("sweep", "s-good.yaml", "--out", "folder"), ("folder", "something other")),
    "sweep page to nowhere": (("sweep", "s-good.yaml", "--out", "o", "--html", "gone/r.html"), ("gone/r.html",)),
    # other commands
    "demo into a file": (("demo", "--out", "good.csv"), ("good.csv", "not a folder")),
    "demo into something else": (("demo", "--out", "folder"), ("folder", "something other")),
    "demo of a negative seed": (("demo", "--out", "o", "--seed", "-1"), ("seed",)),
    "compare nothing": (("compare", "gone"), ("gone",)),
    "compare a folder without runs": (("compare", "folder"), ("folder",)),
    "compare to nowhere": (("compare", "run", "--html", "gone/r.html"), ("gone/r.html",)),
    "compare with nobody": (("compare", "run", "--html", "r.html", "--baseline", "lifo"), ("lifo", "baseline")),
    "compare a cut record": (("compare", "cut-run"), ("events.parquet",)),
    "compare half a record": (("compare", "half-run"), ("jobs.parquet",)),
    "explain nothing": (("explain", "gone"), ("gone",)),
    "explain a file": (("explain", "good.csv"), ("good.csv",)),
    "explain nobody": (("explain", "run", "nobody"), ("nobody",)),
    "explain to nowhere": (("explain", "run", "--perfetto", "gone/p.json"), ("gone/p.json",)),
    "explain a cut record": (("explain", "cut-run", "0"), ("events.parquet",)),
    # command lines that cannot be parsed
    "unknown command": (("simulat",), ("simulat",)),
    "unknown option": (("policies", "--jsn"), ("--jsn", "cotenant policies --help")),
    "a number in words": ((*SIMULATE, "--seed", "one"), ("--seed", "cotenant simulate --help")),
    "an option without its value": (("simulate", "--trace"), ("--trace",)),
    "a missing argument": (("sweep", "--out", "o"), ("FILE.yaml", "cotenant sweep --help")),
    "a missing option": (("sweep", "s-good.yaml"), ("--out",)),
    "too many arguments": (("explain", "run", "0", "1"), ("1",)),
    "no workers": (("sweep", "s-good.yaml", "--out", "o", "--workers", "0"), ("--workers",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the cases name."""
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="latin-1")
    (folder / "folder").mkdir()
    (folder / "folder" / "mine.txt").write_text("not a run\n")
    assert cotenant("trace", "convert", folder / "good.csv", "--out", folder / "good.parquet").code == 0
    (folder / "cut.parquet").write_bytes((folder / "good.parquet").read_bytes()[:-40])
    for name in ("run", "cut-run", "half-run"):
        random_record(1, jobs=20, path=folder / name)
    events = folder / "cut-run" / "events.parquet"
    events.write_bytes(events.read_bytes()[:-100])
    (folder / "half-run" / "jobs.parquet").unlink()
    return folder


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, words = CASES[name]
    monkeypatch.chdir(template)
    before = listing(template)
    try:
        result = cotenant(*arguments)
    finally:
        made = listing(template) - before
        for path in sorted(made):
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
    assert (result.code, result.out) == (2, ""), result
    assert result.err.startswith("cotenant: "), result.err
    assert result.err.endswith("\n"), result.err
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err, result.err
    assert "np." not in result.err
    assert not made, f"left behind: {made}"


def test_a_process_of_its_own_prints_no_traceback(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(template)
    for arguments in (("simulate", "--trace", "native:nan.csv"), ("sweep",), ("nonsense",)):
        result = cotenant_process(*arguments)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result


def test_an_old_result_stays_when_a_new_one_is_refused(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(template)
    before = (template / "run" / "run.json").read_bytes()
    assert cotenant("simulate", "--trace", "native:twice.csv", "--out", "run").code == 2
    assert (template / "run" / "run.json").read_bytes() == before
    assert json.loads(before)["label"]


def test_help_and_version_still_work() -> None:
    for arguments in (("--help",), ("simulate", "--help"), ("trace", "generate", "--help"), ("--version",)):
        result = cotenant(*arguments)
        assert (result.code, result.err) == (0, "")
        assert result.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("submit", "--gpus", "0.5.1", "--", "true"), "cotenant: --gpus: '0.5.1' is not a whole number; see "),
        (("load", "--url", "x", "--service", "a=1", "--senders", "0"), "cotenant: --senders: '0' is less than 1; see "),
        (("simulate", "--trace", "t.csv", "--lease", "soon"), "cotenant: --lease: 'soon' is not a quantity"),
        (("run", "--limit", "x", "--", "true"), "cotenant: --limit: 'x' is not a quantity"),
        (("schema", "fleet"), "cotenant: unknown file 'fleet'; known: agent, "),
    ],
)
def test_an_option_has_one_name_in_every_complaint(words: tuple[str, ...], said: str) -> None:
    """Whether typer, a reader of options or the work itself complains; nothing is said of pydantic."""
    done = cotenant(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(said)
    assert done.err.count("\n") == 1
