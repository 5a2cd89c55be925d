"""A shell completes the values of options and arguments, also of an agent that runs, and never shows a traceback."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cotenant.cli import complete
from cotenant.cli.main import VERBS
from cotenant.cli.policies import policy_lists


def parameter(verb: str, name: str, sub: str = "") -> Any:
    command: Any = typer.main.get_command(importlib.import_module(VERBS[verb][0]).app)
    complete.attach(verb, command)
    command = command.commands[sub] if sub else command
    return next(each for each in command.params if name in (each.name, *each.opts))


def completed(verb: str, name: str, incomplete: str = "", sub: str = "") -> list[str]:
    return [item.value for item in parameter(verb, name, sub).shell_complete(None, incomplete)]


@pytest.mark.parametrize("kind", ["ordering", "allotment", "placement"])
def test_policies_are_those_of_the_lists(kind: str) -> None:
    assert completed("simulate", f"--{kind}") == list(policy_lists()[kind])
    assert completed("fleet", f"--{kind}", sub="up") == list(policy_lists()[kind])


def test_only_what_begins_so_is_offered() -> None:
    assert completed("simulate", "--ordering", "las") == ["las", "las-queues"]
    assert completed("run", "--mechanism", "s") == ["slices"]
    assert completed("agent", "--discipline", "t") == ["temporal"]
    assert completed("serve", "--colocation", "ti") == ["tidal"]
    assert completed("plan", "--planner", "gp") == ["gpulet", "gpulet-interference"]
    assert completed("mig", "--gpu", "H200", sub="plan") == ["H200"]
    assert completed("schema", "kind", "s") == ["services", "sweep"]
    assert completed("experiment", "file", "game") == ["game"]


def test_a_value_says_what_it_is() -> None:
    (item,) = parameter("simulate", "--ordering").shell_complete(None, "fifo")
    assert item.help == policy_lists()["ordering"]["fifo"]


def test_without_an_agent_or_a_fleet_there_is_nothing_to_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_DIR", str(tmp_path))
    monkeypatch.setenv("COTENANT_FLEET", str(tmp_path))
    assert completed("set", "name") == []
    assert completed("cancel", "ids") == []


def test_names_are_those_of_options_that_exist() -> None:
    for verb, sources in complete.OF_VERB.items():
        command: Any = typer.main.get_command(importlib.import_module(VERBS[verb][0]).app)
        parts = [command, *getattr(command, "commands", {}).values()]
        names = {name for part in parts for each in part.params for name in (each.name, *each.opts)}
        assert names & sources.keys(), verb
    options = {
        name
        for module, _ in VERBS.values()
        for command in [typer.main.get_command(importlib.import_module(module).app)]
        for part in (command, *getattr(command, "commands", {}).values())
        for each in part.params
        for name in each.opts
    }
    assert complete.SOURCES.keys() <= options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("simulate --ordering las", ["las", "las-queues"]), ("nonsense x", []), ("sch", ["schema"]),
        ("simulate philly:a.csv --arr", ["--arrivals"]),  # a job trace, refused only when the command runs
    ],
)  # fmt: skip
def test_a_shell_gets_them(words: str, expected: list[str]) -> None:
    """As bash asks: the words in variables, the answer a line each."""
    typed = ["cotenant", *words.split()]
    env = os.environ | {
        "_COTENANT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(typed),
        "COMP_CWORD": str(len(typed) - 1),
    }
    code = "import sys; sys.argv = ['cotenant']; from cotenant.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected
    assert "Traceback" not in done.stderr
