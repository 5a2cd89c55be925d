"""The models file of the how-to as it is written there: programs as tenants of an agent that the server starts."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import yaml
from command import cotenant
from models_door import door

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "language-models.md"


def test_the_file_of_the_howto_runs(tmp_path: Path) -> None:
    """Three models with room for two."""
    section = PAGE.read_text().split("## Without a GPU\n")[1]
    lines = section[section.index("    gpus:") :].splitlines()
    content = yaml.safe_load(textwrap.dedent("\n".join(lines[: lines.index("")])))
    for row in content["models"]:
        row["command"] = row["command"].replace("cotenant ", f"{sys.executable} -m cotenant.cli.main ", 1)
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
