"""A strict subset of Helm's templates, enough for our chart: an unknown action is an error. Also finds and runs the
real Helm."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"\{\{-? *(.*?) *-?\}\}")
_PATH = r"\.((?:Values|Release|Chart)(?:\.[A-Za-z]+)+)"
_CONDITION = re.compile(rf"^if {_PATH}$")
_VALUE = re.compile(rf"^toJson {_PATH}$")
_FORMAT = re.compile(rf'^printf ("(?:[^"\\]|\\.)*")((?: {_PATH})+) \| toJson$')


def render(chart: Path, chosen: dict[str, Any], namespace: str, release: str) -> list[dict[str, Any]]:
    """All objects of a release of a chart, with the given values (a tree) in place of its own."""
    values = merge(yaml.safe_load((chart / "values.yaml").read_text()), chosen)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    scope = {
        "Values": values,
        "Release": {"Namespace": namespace, "Name": release, "Service": "Helm"},
        "Chart": {"Name": about["name"], "Version": about["version"]},
        "fullname": fullname(release if about["name"] in release else f"{release}-{about['name']}"),
    }
    found = []
    for path in sorted((chart / "templates").glob("*.yaml")):
        text = "\n".join(_lines(path.read_text().splitlines(), scope))
        found += [thing for thing in yaml.safe_load_all(text) if thing is not None]
    return found


def fullname(name: str) -> str:
    """A name that Kubernetes accepts for every object: the name itself, or with a hash."""
    if re.fullmatch("[a-z][a-z0-9-]{0,39}", name):
        return name
    return f"c-{name.replace('.', '-')[:28]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _lines(lines: list[str], scope: dict[str, Any]) -> list[str]:
    out: list[str] = []
    shown = [True]
    for line in lines:
        action = _ACTION.search(line)
        if action is None:
            if shown[-1]:
                out.append(line)
            continue
        said = action.group(1)
        if condition := _CONDITION.match(said):
            assert line.strip() == action.group(0), "a condition stands alone"
            shown.append(shown[-1] and bool(look_up(scope, condition.group(1))))
        elif said == "end":
            shown.pop()
        elif shown[-1]:
            out.append(line.replace(action.group(0), _evaluate(said, scope)))
            assert "{{" not in out[-1], f"more than one action: {line}"
    assert shown == [True], "every if has its end"
    return out


def _evaluate(said: str, scope: dict[str, Any]) -> str:
    if said == 'include "cotenant.fullname" .':
        return str(scope["fullname"])
    if value := _VALUE.match(said):
        return json.dumps(look_up(scope, value.group(1)))
    formatted = _FORMAT.match(said)
    assert formatted is not None, f"unknown action {said!r}"
    text = json.loads(formatted.group(1))
    for path in re.findall(_PATH, formatted.group(2)):
        value = look_up(scope, path)
        text = text.replace("%v", json.dumps(value) if isinstance(value, bool) else str(value), 1)
    assert "%" not in text
    return json.dumps(text)


def look_up(scope: dict[str, Any], path: str) -> Any:
    """A value by its path; KeyError where there is none."""
    node: Any = scope
    for step in path.split("."):
        node = node[step]
    return node


def merge(before: Any, over: Any) -> Any:
    """Merge values as Helm does: maps are merged, null removes a key, anything else is replaced."""
    if not isinstance(before, dict) or not isinstance(over, dict):
        return over
    found = before | {key: merge(before.get(key), value) for key, value in over.items()}
    return {key: value for key, value in found.items() if value is not None}


def real() -> str | None:
    """The Helm of this machine ($HELM or on the path), if it has one."""
    return os.environ.get("HELM") or shutil.which("helm")


def run(helm: str, *arguments: str) -> str:
    """Run Helm; returns its output. AssertionError quotes what it printed."""
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
