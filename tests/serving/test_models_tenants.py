"""The models file of the how-to as it is written there: programs as tenants of an agent that the server starts."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml
from command import cotenant
from models_door import door

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "language-models.md"


def written() -> dict[str, Any]:
    """The file of the how-to: three models with room for two on a software GPU."""
    section = PAGE.read_text().split("## Without a GPU\n")[1]
    lines = section[section.index("    gpus:") :].splitlines()
    content: dict[str, Any] = yaml.safe_load(textwrap.dedent("\n".join(lines[: lines.index("")])))
    for row in content["models"]:
        row["command"] = row["command"].replace("cotenant ", f"{sys.executable} -m cotenant.cli.main ", 1)
    return content


def test_the_file_of_the_howto_runs(tmp_path: Path) -> None:
    content = written()
    with door(tmp_path, *content["models"], gpus=content["gpus"]) as it:
        for name in ("a", "b", "c", "a"):
            status, _, answer = it.chat(name, max_tokens=2)
            assert (status, answer["choices"][0]["message"]["content"].count(f"{name}/")) == (200, 2)
        states = [it.row(name)["state"] for name in "abc"]
        assert sorted(states) == ["evicted", "resident", "resident"]
        folder = it.ask(None, "/cotenant/status")[2]["agent"]
        listed = cotenant("ps", "--dir", folder)
        assert listed.code == 0, listed.err
        assert all(f"\n{name} " in listed.out or f" {name} " in listed.out for name in "abc")
    assert not Path(folder).exists()


def test_models_that_share_an_mps_server_are_stopped_for_another(tmp_path: Path) -> None:
    """Under MPS there are no turns between which memory could be evicted."""
    content = written()
    with door(tmp_path, *content["models"], gpus=content["gpus"] | {"mechanism": "mps"}) as it:
        for name in ("a", "b", "c", "a"):
            assert it.chat(name, max_tokens=2)[0] == 200
        assert sorted(it.row(name)["state"] for name in "abc") == ["cold", "resident", "resident"]
        folder = it.ask(None, "/cotenant/status")[2]["agent"]
        tenants = json.loads(cotenant("ps", "--dir", folder, "--json").out)["tenants"]
        assert [row["mechanism"] for row in tenants] == ["mps", "mps"]
