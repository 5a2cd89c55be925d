"""The example of elastic policies in docs/commands.md runs as it is written, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cotenant.profiles.training.elastic import SHIPPED, load_elastic
from cotenant.workloads.jobs.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## cotenant simulate --policy gavel | sia | ...\n"


def test_the_example_runs_as_it_is_written(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    section = page.split(SECTION)[1].split("\n## ")[0]
    block = re.search(r"(?:^    .*\n)+", section, re.MULTILINE)
    assert block is not None
    script = f'cotenant() {{ {sys.executable} -m cotenant.cli.main "$@"; }}\n{textwrap.dedent(block[0])}'
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["jobs_completed"] == 20
    assert answer["solver"]["timed_out"] == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_a_drawn_job_runs_on_every_gpu_model_of_its_profiles(name: str) -> None:
    profiles = load_elastic(name)
    counts = {int(part.split(":")[0]) for part in PRESETS[name].gpu_mix.split(",")}
    gpus = {gpu for model in profiles.models.values() for gpu in model.rate}
    able = {
        model.name for model in profiles.models.values() if all(counts <= set(model.rate.get(gpu, {})) for gpu in gpus)
    }
    assert set(PRESETS[name].models) == able
