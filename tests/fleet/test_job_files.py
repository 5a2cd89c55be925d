"""Job files and options: what is right is read, what is wrong is one sentence with its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotenant.core.errors import InputError
from cotenant.fleet.jobs import JobSpec, job_from_values, read_job_file, spec_from_dict


def test_a_job_file_is_read_with_units_and_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: train-a\n"
        "command: [python, train.py]\n"
        "gpus: 2\n"
        "cpus: 3\n"
        "memory: 16GiB\n"
        "profile: profiles/train-a.json\n"
        "duration: 2h\n"
        "env: {SEED: '1'}\n"
        "retries: 1\n"
        "grace: 45s\n"
    )
    assert read_job_file(file) == JobSpec(
        name="train-a", command=("python", "train.py"), gpus=2, cpus=3, memory_bytes=16 << 30,
        profile=str(tmp_path / "profiles/train-a.json"), duration_s=7200.0, env={"SEED": "1"}, retries=1, grace_s=45.0,
        workdir=str(tmp_path),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "gpus", "slice_"),
    [({"share": "30%"}, 0.3, None), ({"share": 0.25}, 0.25, None), ({"slice": "2g"}, 0.285, "2g"),
     ({"slice": "7g.80gb"}, 1.0, "7g.80gb"), ({}, 1.0, None)],
)  # fmt: skip
def test_shares_and_slices(given: dict[str, Any], gpus: float, slice_: str | None, tmp_path: Path) -> None:
    spec = job_from_values({"command": ["true"]} | given, tmp_path)
    assert (spec.gpus, spec.slice) == (gpus, slice_)


@pytest.mark.parametrize(
    ("command", "name"),
    [(["python", "work/train.py", "--lr", "1"], "train.py"), (["sleep", "5"], "sleep"), (["/usr/bin/env"], "env")],
)
def test_a_job_without_a_name_has_its_programs(command: list[str], name: str, tmp_path: Path) -> None:
    assert job_from_values({"command": command}, tmp_path).name == name


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"command": None}, "command", "is missing"),
    ({"command": "python train.py"}, "command", "a single string"),
    ({"command": []}, "command", "must be a list of words"),
    ({"command": ["sleep", 5]}, "command", "put numbers in quotes"),
    ({"command": [""]}, "command", "the program is expected"),
    ({"name": "a b"}, "name", "not a job name"),
    ({"name": "../x"}, "name", "not a job name"),
    ({"name": "a\n"}, "name", "not a job name"),
    ({"name": 7}, "name", "put it in quotes"),
    ({"gpus": 0}, "gpus", "not a number of GPUs"),
    ({"gpus": -1}, "gpus", "not a number of GPUs"),
    ({"gpus": 1.5}, "gpus", "must be a whole number of GPUs"),
    ({"gpus": "two"}, "gpus", "not a number of GPUs"),
    ({"gpus": True}, "gpus", "not a number of GPUs"),
    ({"gpus": 1, "share": "30%"}, "share", "give only one of"),
    ({"share": "130%"}, "share", "over 100%"),
    ({"share": 0}, "share", "less than 1%"),
    ({"share": [1]}, "share", "not a quantity"),
    ({"slice": "8g"}, "slice", "not a MIG slice"),
    ({"cpus": 0}, "cpus", "above 0"),
    ({"cpus": float("nan")}, "cpus", "above 0"),
    ({"memory": "16 GX"}, "memory", "unknown memory unit"),
    ({"memory": "0"}, "memory", "over 0"),
    ({"duration": "soon"}, "duration", "not a quantity"),
    ({"retries": -1}, "retries", "must be at least 0"),
    ({"retries": 1.5}, "retries", "not a whole number"),
    ({"priority": "high"}, "priority", "not a whole number"),
    ({"env": ["A=1"]}, "env", "NAME: value"),
    ({"env": {"A B": "1"}}, "env", "name of an environment variable"),
    ({"env": {"A\n": "1"}}, "env", "name of an environment variable"),
    ({"env": {"A": 1}}, "env.A", "put it in quotes"),
    ({"grace": "3d"}, "grace", "0 s to a day"),
    ({"processes": "three"}, "processes", "must be gpu or node"),
    ({"workdir": "/no/such/folder"}, "workdir", "not a folder"),
    ({"mechanism": "whole"}, "mechanism", "not one of time, mps"),
    ({"gpuz": 1}, "gpuz", "not a field of a job"),
]


@pytest.mark.parametrize(("given", "field", "says"), WRONG)
def test_what_is_wrong_is_one_sentence_with_its_field(
    given: dict[str, Any], field: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        job_from_values({"command": ["true"]} | given, tmp_path)
    assert caught.value.field == field
    assert says in caught.value.message
    assert "\n" not in str(caught.value)


def test_the_file_is_named_too(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: [true]\n")  # YAML reads `true` as a boolean
    with pytest.raises(InputError, match=r"job\.yaml, line 1, field command: 'True' is not a string"):
        read_job_file(file)
    file.write_text("command: [a\n")
    with pytest.raises(InputError, match=r"job\.yaml, line 2: not valid YAML"):
        read_job_file(file)


@pytest.mark.parametrize("data", [{"name": "a"}, {"command": ["true"]}, {"name": "a", "command": 5},
                                  {"name": "a", "command": ["true"], "gpus": None, "spec": 1},
                                  {"name": "a", "command": ["true", "\ud800"]},
                                  {"name": "a", "command": ["true"], "env": {"A": "\ud800"}},
                                  {"name": "a", "command": ["true"], "workdir": "\ud800"},
                                  {"name": "a", "command": ["true"], "gpus": [1]}])  # fmt: skip
def test_what_comes_over_the_socket_is_checked_again(data: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        spec_from_dict(data)


def test_a_spec_survives_the_store() -> None:
    spec = JobSpec("a", ("true", "x"), 0.5, cpus=1.5, env={"A": "b"}, retries=2, processes="node", deadline_s=9.0)
    assert spec_from_dict(spec.to_dict()) == spec
