"""`cotenant simulate --policy` with elastic policies, as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cotenant.cli.policies import policy_lists

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
