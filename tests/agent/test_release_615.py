"""bench/gpu/release_615.py, for machines with release 615 or newer, on the stand-ins: every step has an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.softgpu import mps as mps_standin
from cotenant.softgpu.cgroups import FolderCgroups

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "release_615.py"
UUID = "GPU-636f7465-6e61-6e74-3073-6f6674677075"  # UUID of the software GPU's first card
STEPS = ("namespaces", "weights", "lending", "faults", "partition_faults", "clients", "gate")


@pytest.mark.slow
@pytest.mark.parametrize("release", ["615", "620"])
def test_every_question_about_mps_has_an_answer(short_folder: Path, release: str) -> None:
    command = mps_standin.install(short_folder)
    groups = FolderCgroups.make(short_folder / "cgroup", dmem=False, memory_bytes=16 << 30)
    environment = os.environ | {
        "COTENANT_SOFTGPU_STATE": str(short_folder / "gpu"), "COTENANT_SOFTGPU_CGROUPS": str(groups.root),
        "COTENANT_SOFTGPU_MPS": str(command), "MPS_STANDIN_RELEASE": release, "MPS_STANDIN_GPUS": f"{UUID}=132",
        "PATH": f"{short_folder}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "soft", "COTENANT_615_S": "0.2",
        "COTENANT_615_CLIENTS": "3",
    }  # fmt: skip
    out = short_folder / "out.json"
    asked = [sys.executable, str(SCRIPT), str(out), ",".join(STEPS)]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    faults = {row["step"]: row["error"] for row in rows if row["row"] == "fault"}
    found = {row["row"]: row for row in rows}
    newer = {name: f"{name}: what this asks about comes with release 620" for name in ("weights", "lending")}
    assert faults == (newer if release == "615" else {})
    assert set(found) - {"machine", "fault"} == {*STEPS} - faults.keys()
    assert found["namespaces"]["sms"][0] == 66
    assert found["clients"]["taken"] == 3
    assert found["gate"]["not_enforced"] == {"be": [], "ls": []}
    assert found["gate"]["be_alone"] > 0
    assert found["gate"]["beside"]["ls"] > 0
    for row in ("faults", "partition_faults"):
        assert (found[row]["other_code"], found[row]["next_code"]) == (0, 0)


@pytest.mark.parametrize("wrong", [(), ("--help",), ("out.json", "costs,luck"), ("out.json", "costs", "more")])
def test_wrong_arguments_get_the_usage_with_the_steps(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPT), *wrong]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr.startswith("usage: release_615.py OUT.json [STEP,...]\nsteps: costs, ")
