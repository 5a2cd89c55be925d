"""Wrong files of the public gpulet scheduler name the file, the line and the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.core.serving import ServingPlan
from cotenant.serving.config.gpulet_files import read_modellist, read_problem, read_tasks, write_modellist
from cotenant.serving.config.planning import Problem

CONFIG = {"GPUs": [{"Type": "2080ti", "Num": 2}], "Part": 1, "Interference": 1}


def problem(folder: Path, config: object = CONFIG, devices: object = None) -> tuple[Problem, str]:
    (folder / "tasks.csv").write_text("2\n7,100,108,\nbert,50,22,\n")
    (folder / "sim.json").write_text(json.dumps(config))
    device = None
    if devices is not None:
        device = folder / "device.json"
        device.write_text(json.dumps(devices))
    return read_problem(folder / "tasks.csv", folder / "sim.json", device)


def test_names_and_numbers_of_models(tmp_path: Path) -> None:
    found, planner = problem(tmp_path)
    assert [s.name for s in found.services] == ["resnet50", "bert"]
    assert (planner, len(found.gpus)) == ("gpulet-interference", 2)


@pytest.mark.parametrize(
    ("change", "planner"),
    [
        ({"Interference": 0}, "gpulet"),
        ({"Part": 0}, "temporal"),
        ({"Self Tuning": 1}, "greedy"),
        ({}, "gpulet-interference"),
    ],
)
def test_the_configuration_names_the_planner(tmp_path: Path, change: dict[str, int], planner: str) -> None:
    assert problem(tmp_path, {**CONFIG, **change})[1] == planner


def test_memory_and_partitions_are_taken(tmp_path: Path) -> None:
    devices = {"device_specs": [{"type": "2080ti", "mem_mb": 8000}]}
    found, _ = problem(tmp_path, {**CONFIG, "Avail_Parts": [100, 50], "Latency Ratio": 1.2}, devices)
    profile = found.gpus.profiles[0]
    assert (profile.memory_bytes, profile.margin) == (8_000_000_000, 1.2)
    assert [p.label for p in profile.partitions] == ["50%", "100%"]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", None, "empty"),
        ("two\n", 1, "not the number of tasks"),
        ("2\n7,100,108,\n", 1, "announces 2 tasks but has 1"),
        ("1\n99,100,108,\n", 2, "model id 99"),
        ("1\n7,0,108,\n", 2, "above 0"),
        ("1\n7,nan,108,\n", 2, "above 0"),
        ("1\n7,100\n", 2, "id,rate,SLO"),
    ],
)
def test_wrong_tasks(tmp_path: Path, text: str, line: int | None, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        read_tasks(path)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("config", "devices", "says"),
    [
        ([], None, "not a JSON object"),
        ({}, None, "needs a list"),
        ({"GPUs": [{"Type": "2080ti"}]}, None, "needs Type and Num"),
        ({"GPUs": [{"Type": "4090", "Num": 1}]}, None, "no serving profile"),
        (CONFIG, {"device_specs": [{"type": "3080"}]}, "not in the device config"),
        (CONFIG, {"device_specs": [{"type": "2080ti", "mem_mb": -1}]}, "not a memory"),
        ({**CONFIG, "Latency Ratio": 0.5}, None, "factor of at least 1"),
        ({**CONFIG, "Avail_Parts": [30]}, None, "not in the profile"),
    ],
)
def test_wrong_configurations(tmp_path: Path, config: object, devices: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        problem(tmp_path, config, devices)


def test_an_empty_plan_is_the_word(tmp_path: Path) -> None:
    found, _ = problem(tmp_path)
    text = write_modellist(ServingPlan("p", 2, ()))
    assert text == "EMPTY\n"
    (tmp_path / "m.txt").write_text(text)
    assert read_modellist(tmp_path / "m.txt", found).gpulets == ()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("0,50,0,resnet50,8", "a row is"),
        ("0,50,0,vgg16,8,30", "not among the tasks"),
        ("0,50,0,resnet50,many,30", "number"),
        ("0,50,0,resnet50,8,0", "positive"),
        ("7,50,0,resnet50,8,30", "not among the 2 GPUs"),
        ("0,35,0,resnet50,8,30", "not profiled"),
    ],
)
def test_wrong_model_lists(tmp_path: Path, row: str, says: str) -> None:
    found, _ = problem(tmp_path)
    (tmp_path / "m.txt").write_text(row + "\n")
    with pytest.raises(InputError, match=says):
        read_modellist(tmp_path / "m.txt", found)
