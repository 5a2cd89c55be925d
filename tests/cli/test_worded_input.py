"""Wrong values of options and files, said in the project's words with units, and wrong names with the nearest known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from command import cotenant

TRACE = "id,arrival_s,gpus,duration_s,model\na,0,1,600,res50\n"
SERVICES = "services:\n  - {name: a, model: resnet50, rate_rps: 10, slo_ms: 100}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.csv").write_text(TRACE)
    (tmp_path / "h200.yaml").write_text("gpus: {count: 1, model: H200}\n" + SERVICES.replace("resnet50", "bert"))
    (tmp_path / "a100.yaml").write_text("gpus: {count: 1, model: A100-80GB}\nmechanism: time\n" + SERVICES)
    many = SERVICES.replace("10,", "100000,")
    (tmp_path / "many.yaml").write_text("gpus: {count: 1, model: H200}\nreplan: {headroom: 1.2}\n" + many)
    (tmp_path / "models.yaml").write_text("models:\n  - {name: a, memory: 30GiB}\n")
    (tmp_path / "s.yaml.gz").write_bytes(gzip.compress(b"services: []"))
    (tmp_path / "sia.csv").write_text("name,time,application,num_replicas,batch_size\na,0,bert,1,8\n")
    (tmp_path / "none.yaml").write_text("nodes: []\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SIMULATE = ("simulate", "--trace", "t.csv", "--cluster", "1x8")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SIMULATE, "--ordering", "fifoo"), "did you mean fifo?"),
        ((*SIMULATE, "--allotment", "tunee"), "did you mean tune?"),
        ((*SIMULATE, "--placement", "firstfit"), "did you mean first-fit?"),
        ((*SIMULATE, "--default-profile", "rse50"), "did you mean res50?"),
        ((*SIMULATE, "--record", "al"), "--record: 'al' is not auto, all or no-moves; did you mean all?"),
        (("trace", "generate", "--jobs", "5", "--like", "gavle"), "did you mean gavel?"),
        (("experiment", "gamee"), "did you mean game?"),
        (("plan", "h200.yaml", "--planner", "exct"), "did you mean exact?"),
        (("trace", "inspect", "azure-llm:x.csv"), "cotenant simulate --serving MODELS.yaml --trace azure-llm:x.csv"),
        (("trace", "inspect", "burstgp:x.csv"), "did you mean burstgpt:x.csv?"),
        (("trace", "inspect", "phily:x.csv"), "did you mean philly:x.csv?"),
        (("trace", "convert", "sia:sia.csv", "--out", "o.csv"), "a workload of Sia has no durations"),
        (("plan", "h200.yaml", "--autoscale", "r.csv", "--period", "0s"), "a period must be above 0 s, not '0s'"),
        (("plan", "s.yaml.gz"), "the file is compressed; unpack it with: gunzip -k s.yaml.gz"),
        (("plan", "models.yaml", "--profile", "8b", "--rate", "1e12"), "is over the limit of 1,000,000 requests/s"),
        (("serve", "models.yaml"), "field models[0].command: is missing: the program that serves the model"),
        (("plan", "h200.yaml"), "did you mean bert_base?"),
        ((*SIMULATE, "--lease", "0s"), "--lease: '0s' is not above 0 s"),
        ((*SIMULATE, "--lease", "1e300s"), "--lease: '1e300s' is over 365 d"),
        ((*SIMULATE, "--policy", "sia", "--lease", "0s"), "--lease: '0s' is not above 0 s"),
        ((*SIMULATE, "--reserve-after", "0s"), "--reserve-after: '0s' is not above 0 s"),
        ((*SIMULATE, "--allotment", "optimal", "--solver-limit", "2h"), "--solver-limit: '2h' is over 60 min"),
        ((*SIMULATE, "--storage-mbps", "inf"), "--storage-mbps: inf is not above 0 and below 1,000,000,000"),
        ((*SIMULATE, "--ordering", "gittins", "--gittins-sample", "x"), "--gittins-sample: unknown trace format"),
        ((*SIMULATE, "--arrivals", "poison"), "--arrivals: unknown arrivals 'poison'"),
        (("simulate", "--trace", "t.csv", "--cluster", "none.yaml"), "[] is too short: at least 1 entry is needed"),
    ],
)
def test_a_wrong_value_is_said_in_plain_words(words: tuple[str, ...], said: str) -> None:
    got = cotenant(*words)
    assert got.code == 2, got.err
    assert said in got.err


@pytest.mark.usefixtures("folder")
def test_time_slices_use_the_whole_gpu_of_a_profile_of_mig_slices() -> None:
    got = cotenant("plan", "a100.yaml", "--json")
    assert got.code == 0, got.err
    assert '"7g"' in got.out


@pytest.mark.usefixtures("folder")
def test_the_rate_that_is_not_planned_names_the_headroom() -> None:
    got = cotenant("plan", "many.yaml")
    assert "of the 120,000.0 requests/s (100,000 with a headroom of 1.2) for a" in got.out
    assert "of 1 GPU\n" in got.out


@pytest.mark.usefixtures("folder")
def test_plans_and_simulations_of_models_need_no_commands() -> None:
    got = cotenant("simulate", "--serving", "models.yaml", "--profile", "8b", "--rate", "0.1", "--duration", "20s")
    assert got.code == 0, got.err


@pytest.mark.usefixtures("folder")
def test_gpus_without_watts_are_named_where_the_energy_is_missing() -> None:
    got = cotenant(*SIMULATE, "--gpu", "GH200")
    assert "No energy of runs with GH200: the watts of these GPUs are not known." in got.out
    assert "No energy" not in cotenant(*SIMULATE, "--gpu", "H200").out


@pytest.mark.usefixtures("folder")
def test_explain_names_the_gpu_model_on_a_mixed_cluster() -> None:
    Path("mixed.yaml").write_text("nodes:\n  - {gpus: 1, gpu: A100-40GB}\n  - {gpus: 1, gpu: T4}\n")
    Path("t.csv").write_text(TRACE + "b,0,1,600,res50\n")
    assert cotenant("simulate", "--trace", "t.csv", "--cluster", "mixed.yaml", "--out", "run").code == 0
    said = cotenant("explain", "run", "a").out + cotenant("explain", "run", "b").out
    assert "1 A100-40GB GPU of node 0" in said
    assert "1 T4 GPU of node 1" in said


@pytest.mark.usefixtures("folder")
def test_a_generated_trace_has_the_requested_and_the_drawn_load() -> None:
    words = ("trace", "generate", "--jobs", "9", "--load", "90%", "--cluster", "1x8", "--out", "o.csv", "--json")
    content = json.loads(cotenant(*words).out)
    assert content["offered_load"] == pytest.approx(0.9)
    gpu_s, end_s = content["gpu_hours"] * 3600, content["span_s"]
    assert content["drawn_load"] == pytest.approx(gpu_s / end_s / 8)


@pytest.mark.usefixtures("folder")
def test_an_interrupted_sweep_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cotenant.sim.jobs.sweep.run_sweep", interrupted)
    Path("s.yaml").write_text("jobs: 5\ncluster: 1x8\nload: 0.9\n")
    got = cotenant("sweep", "s.yaml", "--out", "o")
    assert (got.code, got.err.count("interrupted")) == (130, 1), got.err
