"""The models file of the how-to as it is written there: programs as tenants of an agent that the server starts."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import cotenant
from models_door import door
from waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "language-models.md"


def written() -> dict[str, Any]:
    """The file of the how-to: three models with room for two on a software GPU."""
    section = PAGE.read_text().split("## Without a GPU\n")[1]
    lines = section[section.index("    gpus:") :].splitlines()
    content: dict[str, Any] = yaml.safe_load(textwrap.dedent("\n".join(lines[: lines.index("")])))
    for row in content["models"]:
        row["command"] = row["command"].replace("cotenant ", f"{sys.executable} -m cotenant.cli.main ", 1)
    return content


@pytest.mark.parametrize(("wanted", "mechanism"), [({}, "time"), ({"mechanism": "slices"}, "slices")])
def test_the_file_of_the_howto_runs(tmp_path: Path, wanted: dict[str, str], mechanism: str) -> None:
    content = written()
    with door(tmp_path, *content["models"], gpus=content["gpus"] | wanted) as it:
        for name in ("a", "b", "c", "a"):
            status, _, answer = it.chat(name, max_tokens=2)
            assert (status, answer["choices"][0]["message"]["content"].count(f"{name}/")) == (200, 2)
        states = [it.row(name)["state"] for name in "abc"]
        assert sorted(states) == ["evicted", "resident", "resident"]
        folder = it.ask(None, "/cotenant/status")[2]["agent"]
        # one of b and c has left while a returned, by one order to the agent
        left = next(name for name in "bc" if it.row(name)["state"] == "evicted")
        assert [it.row(name)["switches"] for name in ("a", left)] == [
            {"start": 1, "evict": 1, "bring": 1}, {"start": 1, "evict": 1}
        ]  # fmt: skip
        said = (Path(folder) / "agent.log").read_text()
        assert f"a returns instead of {left}: all memory was moved" in said
        listed = cotenant("ps", "--dir", folder)
        assert listed.code == 0, listed.err
        assert all(f"\n{name} " in listed.out or f" {name} " in listed.out for name in "abc")
        tenants = json.loads(cotenant("ps", "--dir", folder, "--json").out)["tenants"]
        assert {(row["mechanism"], row["oversubscribe"]) for row in tenants} == {(mechanism, "swap")}
    assert not Path(folder).exists()


def test_a_models_request_is_that_of_its_tenant_wherever_it_moves(tmp_path: Path) -> None:
    """The requests of all three are 100 %, and two fit the GPU at a time."""
    content = written()
    for row, request in zip(content["models"], ("60%", 0.3, "10%"), strict=True):
        row["request"] = request
    with door(tmp_path, *content["models"], gpus=content["gpus"]) as it:
        for name in "abca":
            assert it.chat(name, max_tokens=1)[0] == 200
        folder = it.ask(None, "/cotenant/status")[2]["agent"]
        tenants = json.loads(cotenant("ps", "--dir", folder, "--json").out)["tenants"]
        assert {row["name"]: row["request"] for row in tenants} == {"a": 0.6, "b": 0.3, "c": 0.1}


@pytest.mark.timed
def test_a_model_returns_while_another_one_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a link of 200 MB/s each move of 200 MiB takes a second."""
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "softgpu"))
    monkeypatch.setenv("COTENANT_SOFTGPU_LINK_MBPS", "200")
    content = written()
    names = "ab"
    with door(tmp_path, *content["models"][:2], gpus=content["gpus"] | {"memory": "300MiB"}) as it:
        for name in names:
            assert it.chat(name, max_tokens=1)[0] == 200
        found = []
        for name, other in ("ab", "ba", "ab"):
            before = it.row(other)["switch_s"].get("evict", 0.0), it.row(name)["switch_s"].get("bring", 0.0)
            used_s = time.monotonic()
            wait_for(lambda start_s=used_s: time.monotonic() - start_s > 2.1, what="the end of a model's patience")
            began_s = time.monotonic()
            assert it.chat(name, max_tokens=1)[0] == 200
            first_s = time.monotonic() - began_s
            evict_s = it.row(other)["switch_s"]["evict"] - before[0]
            found.append((first_s, evict_s, it.row(name)["switch_s"]["bring"] - before[1]))
        print([tuple(round(s, 2) for s in each) for each in found])
        assert all(evict_s > 0.8 for _, evict_s, _ in found)
        assert min(first_s / (evict_s + bring_s) for first_s, evict_s, bring_s in found) < 0.75


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
