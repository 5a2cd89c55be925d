"""`cotenant simulate --policy` with elastic policies, as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.cli.policies import policy_lists
from cotenant.core.metrics.summary import summarise
from cotenant.core.record.reader import read_record

CLUSTER = """
nodes:
  - {count: 1, gpus: 4, gpu: V100-16GB, cpus: 16, memory: 100GiB}
  - {count: 1, gpus: 8, gpu: K80, cpus: 32, memory: 400GiB}
"""
MODEL = "ResNet-50 (batch size 64)"


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, ...]:
    """Four jobs on two GPU models."""
    rows = [f"j{i},{i * 60},1,{1000 + 500 * i},{MODEL}" for i in range(4)]
    (tmp_path / "t.csv").write_text("\n".join(["id,arrival_s,gpus,duration_s,model", *rows]) + "\n")
    (tmp_path / "c.yaml").write_text(CLUSTER)
    return ("simulate", "--trace", f"native:{tmp_path / 't.csv'}", "--cluster", str(tmp_path / "c.yaml"))


def test_an_elastic_policy_gives_result_keys_and_a_page(call: Any, run: tuple[str, ...], tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    code, text, err = call(*run, "--policy", "gavel", "--lease", "60s", "--json", "--html", page)
    assert code == 0, err  # at a first run, stderr also says that code is compiled
    answer = json.loads(text)
    assert answer["jobs_completed"] == 4
    # Every job fits on the V100s, for which its duration holds, and starts in the first round after its arrival.
    assert answer["jct_s"]["mean"] == pytest.approx((1000 + 1500 + 2000 + 2500) / 4)
    assert answer["solver"]["solves"] >= 1
    assert answer["energy"]["total_j"] > answer["energy"]["jobs_j"] > 0
    assert "gavel" in page.read_text()


def test_the_table_says_what_the_program_missed(call: Any, run: tuple[str, ...]) -> None:
    code, text, _ = call(*run, "--policy", "sia-fast", "--profiles", "gavel", "--restart-cost", "30s")
    assert code == 0
    assert "largest gap" in text


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (
            ("--policy", "gavel", "--ordering", "las"),
            "--ordering: is for job policies; policy gavel does not have it",
        ),
        (("--policy", "gavel", "--layout", "3,3"), "--layout is for partition policies"),
        (("--policy", "pollux", "--profiles", "gavel"), "one GPU model"),
        (("--policy", "gavel", "--profiles", "nowhere.json"), "nowhere.json"),
        (("--policy", "gavel", "--lease", "0s"), "lease"),
        (("--policy", "sia"), "know none of the cluster"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, run: tuple[str, ...], more: tuple[str, ...], word: str) -> None:
    code, _, err = call(*run, *more)
    assert code == 2
    assert word in err


def test_jobs_without_a_profile_are_told_what_runs(call: Any, run: tuple[str, ...], tmp_path: Path) -> None:
    """Followed, the advice works: also for jobs on 8 GPUs, on which not every model was measured."""
    (tmp_path / "t.csv").write_text("id,arrival_s,gpus,duration_s,model\na,0,1,100,gnmt\nb,0,8,100,gnmt\n")
    code, _, err = call(*run, "--policy", "gavel")
    assert code == 2
    assert "trace generate --like gavel" in err
    advised = re.search(r"--default-profile NAME, such as '([^']+)'", err)
    assert advised is not None
    code, text, err = call(*run, "--policy", "gavel", "--default-profile", advised[1], "--json")
    assert code == 0, err
    assert json.loads(text)["jobs_completed"] == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gavell", "mean gavel?"), ("Mso", "mean miso?"), ("Sia", "mean sia?"), ("las", "--ordering las"), ("zzz", "")],
)
def test_an_unknown_policy_is_answered_with_all_names(call: Any, name: str, hint: str) -> None:
    """Before any file is read: the trace does not exist."""
    code, _, err = call("simulate", "--trace", "nowhere.csv", "--cluster", "1x8", "--policy", name)
    assert code == 2
    assert f"unknown policy {name!r}" in err
    assert hint in err
    known = err.rpartition("known: ")[2].strip().split(", ")
    assert set(known) == set(policy_lists()["policy"])


SPOT = "hp1,1000,8,3600,m,1\nsp1,0,4,3600,m,0\nsp2,0,4,3600,m,0\nsp3,10,4,1800,m,0\n"


@pytest.fixture
def spot(tmp_path: Path) -> tuple[str, ...]:
    """A guaranteed job that preempts two spot jobs, and a third spot job, on one node of 8 GPUs."""
    rate = {"A100-40GB": {str(n): n for n in (1, 2, 4, 8)}}
    (tmp_path / "e.json").write_text(json.dumps({"models": {"m": {"class": "image", "rate": rate}}}))
    (tmp_path / "t.csv").write_text("id,arrival_s,gpus,duration_s,model,priority\n" + SPOT)
    where = ("simulate", "--trace", f"native:{tmp_path / 't.csv'}", "--cluster", "1x8")
    return (*where, "--profiles", str(tmp_path / "e.json"), "--restart-cost", "0s", "--policy", "spot")


def test_spot_jobs_run_once_no_guaranteed_job_is_expected(call: Any, spot: tuple[str, ...], tmp_path: Path) -> None:
    code, text, err = call(*spot, "--json", "--jct-csv", tmp_path / "jct.csv")
    assert code == 0, err
    assert json.loads(text)["jobs_completed"] == 4
    # The guaranteed job waits for the round of 5 minutes that begins at 1200 s.
    assert f"hp1,{1200 + 3600 - 1000}\n" in (tmp_path / "jct.csv").read_text()


def test_jobs_left_waiting_are_part_of_the_result(
    call: Any, spot: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that never starts spot jobs: the record is whole, and the exit code and a sentence say what it lacks."""
    monkeypatch.setattr("cotenant.policy.elastic.spot.predicted_rise", lambda demand: np.full(demand.shape[1], 99.0))
    code, text, err = call(*spot, "--json", "--out", tmp_path / "run")
    assert code == 1
    assert "policy spot left 3 jobs waiting (first: job sp1)" in err
    answer = json.loads(text)
    assert (answer["jobs_completed"], answer["jobs_unfinished"]) == (1, 3)
    assert summarise(read_record(tmp_path / "run"))["jobs_unfinished"] == 3


PHILLY = "timestamp,duration,num_gpus,cluster\n2017-10-03 00:00:00,600,1,a\n2017-10-03 00:05:00,600,1,b\n"
NODES = "id,arrival_s,gpus,duration_s,gpu_models,priority\n"
NODES += "a,0,8,3600,H800,1\nb,0,4,600,L40S|A10,0\nc,0,4,600,A10,0\n"


@pytest.mark.parametrize("drawn", [False, True])
def test_the_default_profile_is_that_of_jobs_without_a_model(call: Any, tmp_path: Path, drawn: bool) -> None:
    """Gavel's profiles have no speech models, which the default split asks for."""
    (tmp_path / "p.csv").write_text(PHILLY)
    where = ("--cluster", "1x8", "--gpu", "V100-16GB")
    run = ("simulate", "--trace", f"philly:{tmp_path / 'p.csv'}", *where, "--policy", "gavel", "--json")
    code, text, err = call(*run, "--default-profile", MODEL, "--out", tmp_path / "run")
    assert code == 0, err
    assert json.loads(text)["jct_s"]["p999"] <= 600 + 360
    code, _, err = call(*run, "--default-profile", MODEL, "--split", "0,0,1")
    assert code == 2
    assert "no speech models" in err
    jobs = "jobs: 5\nrate: 60/h" if drawn else f"trace: philly:{tmp_path / 'p.csv'}"
    (tmp_path / "s.yaml").write_text(
        f"{jobs}\ncluster: 1x8\ngpu: V100-16GB\npolicy: [gavel, spot]\ndefault_profile: {MODEL}\ngpu_mix: 1:1\n"
    )
    code, text, err = call("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out", "--workers", "1", "--json")
    assert code == 0, err
    assert [r["jobs_completed"] for r in json.loads(text)["runs"]] == [5 if drawn else 2] * 2


def test_spot_needs_no_speeds_if_jobs_name_their_gpus(call: Any, tmp_path: Path) -> None:
    groups = "".join(
        f"  - {{count: 1, gpus: 8, gpu: {gpu}, cpus: 16, memory: 100GiB}}\n" for gpu in ("H100-80GB", "A10")
    )
    (tmp_path / "c.yaml").write_text(f"nodes:\n{groups}")
    (tmp_path / "t.csv").write_text(NODES)
    run = ("simulate", "--trace", f"native:{tmp_path / 't.csv'}", "--cluster", tmp_path / "c.yaml", "--json")
    for policy in ("spot", "spot-greedy"):
        code, text, err = call(*run, "--policy", policy, "--jct-csv", tmp_path / "jct.csv")
        assert code == 0, err
        assert json.loads(text)["slowdown"]["p999"] == pytest.approx(1.0)
        assert (tmp_path / "jct.csv").read_text().splitlines()[1:] == ["a,3600", "b,600", "c,600"]
    code, _, err = call(*run, "--policy", "gavel")
    assert code == 2
    (tmp_path / "t.csv").write_text(NODES.replace("4,600,A10", "9,600,A10"))
    code, _, err = call(*run, "--policy", "spot")
    assert code == 2
    assert "job c asks for 9 GPUs of model A10; the cluster has 8 H100-80GB, 8 A10" in err
