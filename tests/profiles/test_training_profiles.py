"""Profile files of training jobs: the documented example, and what is wrong with others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.work import Jobs
from cotenant.policy.jobs.arrays import PROPORTIONAL
from cotenant.policy.jobs.demand import build_workload
from cotenant.profiles.training.tables import load_profiles

PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"


def example() -> dict[str, Any]:
    block = re.search(r"^    \{\n(?:    .*\n)+", PAGE.read_text(), re.MULTILINE)
    assert block is not None
    found: dict[str, Any] = json.loads(block.group())
    return found


def written(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps(content))
    return path


def test_the_documented_example(tmp_path: Path) -> None:
    profiles = load_profiles(written(tmp_path, example()))
    bert = profiles.models["bert"]
    assert profiles.classes == {"language": ("bert",)}
    assert (bert.ideal_cpus_per_gpu, bert.ideal_memory_gb_per_gpu) == (6, 62.5)
    assert bert.speed(2, 100) == pytest.approx(0.75)  # half way between 1 and 3 cores
    assert bert.speed(0.5, 62.5) == pytest.approx(0.25)  # half a core prepares half of the data that one core prepares
    assert bert.speed(100, 1000) == pytest.approx(1.1)


def test_speed_on_another_gpu_and_over_nodes(tmp_path: Path) -> None:
    content = example()
    speeds = content["models"]["bert"]["gpu_speed"]
    speeds["A100"] = speeds.pop("A100-40GB")  # another spelling of a name in the catalog
    profiles = load_profiles(written(tmp_path, content))
    groups = [NodeGroup(1, 8, find_gpu(gpu), 24, 500 * 10**9) for gpu in ("V100-16GB", "A100-40GB")]
    jobs = Jobs.build(1, id=["a"], arrival_s=[0.0], model=["bert"], gpus=[2], iterations=[1.0])
    demand = build_workload(jobs, profiles, Cluster(tuple(groups))).demand
    np.testing.assert_allclose(demand.amount["iteration_s"][PROPORTIONAL, 0], [0.35, 0.35 / 2.3])
    assert demand.type["multi_node_factor"][0] == 0.85


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"throughput": [[1, 1]]}, "models.bert.throughput"),
        ({"throughput": [[0, 1]] * 4}, "models.bert.throughput"),
        ({"iteration_s": -1}, "models.bert.iteration_s"),
        ({"multi_node_factor": 0}, "models.bert.multi_node_factor"),
        ({"multi_node_factor": True}, "models.bert.multi_node_factor"),
        ({"multi_node_factor": 1.5}, "models.bert.multi_node_factor"),
        ({"ideal": 3}, "models.bert.ideal"),
        ({"gpu_speed": [1]}, "models.bert.gpu_speed"),
        ({"gpu_speed": {"Z80": 1}}, "models.bert.gpu_speed.Z80"),
        ({"gpu_speed": {"V100-16GB": "fast"}}, "models.bert.gpu_speed.V100-16GB"),
        ({"two_speed": {"three": {"iteration_s": 1, "speedup": 2, "cpus_per_gpu": 6}}}, "models.bert.two_speed.three"),
        ({"two_speed": {"3": 1}}, "models.bert.two_speed.3"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    content = example()
    content["models"]["bert"] |= change
    path = written(tmp_path, content)
    with pytest.raises(InputError) as caught:
        load_profiles(path)
    assert (caught.value.field, caught.value.file) == (field, str(path))
