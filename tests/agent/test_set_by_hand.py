"""Values that `cotenant set` gave declared tenants, across edits of the file and restarts of the agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess, declare, saved
from command import cotenant
from fake_shim import FakeShim, register
from waiting import wait_for

from cotenant.core.errors import InputError

TEXT = """
tenants:
  - {name: a, request: 20%, limit: 60%, memory: 2GiB, priority: 1}
  - {name: b, limit: 50%}
  - {name: c, request: 10%..30%, limit: 90%}
"""


@pytest.fixture
def agent(short_folder: Path) -> Iterator[AgentProcess]:
    found = AgentProcess(short_folder, config=declare(short_folder, TEXT))
    yield found
    found.close()


def edited(agent: AgentProcess, *changes: tuple[str, str]) -> None:
    """Change the file as told, and the limit of b, by which the agent shows that it has read the file."""
    text = (agent.folder / "agent.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    limit = round(agent.tenant("b")["limit"] * 100)
    declare(agent.folder, text.replace(f"{{name: b, limit: {limit}%", f"{{name: b, limit: {limit + 1}%"))
    wait_for(lambda: agent.tenant("b")["limit"] == (limit + 1) / 100, what="the file is read")


def restarted(agent: AgentProcess, text: str = "") -> None:
    agent.kill()
    if text:
        declare(agent.folder, text)
    agent.start()


def has(agent: AgentProcess) -> tuple[float, float, int, int]:
    row = agent.tenant("a")
    return row["request"], row["limit"], row["gpus"][0]["memory_limit_bytes"] >> 30, row["priority"]


def test_edits_of_other_settings_and_restarts_keep_a_set_value(agent: AgentProcess) -> None:
    agent.call("set", name="a", limit=0.45, memory_bytes=3 << 30, priority=4)
    edited(agent)
    assert has(agent) == (0.2, 0.45, 3, 4)
    restarted(agent)
    assert has(agent) == (0.2, 0.45, 3, 4)
    edited(agent, ("request: 20%", "request: 25%"))
    assert has(agent) == (0.25, 0.45, 3, 4)
    assert agent.tenant("a")["set_by_hand"] == {
        "limit": {"value": 0.45, "file": 0.6},
        "memory_bytes": {"value": 3 << 30, "file": 2 << 30},
        "priority": {"value": 4, "file": 1},
    }
    assert agent.tenant("b")["set_by_hand"] == {}


@pytest.mark.parametrize("while_down", [False, True])
def test_a_new_value_in_the_file_wins_and_is_logged(agent: AgentProcess, while_down: bool) -> None:
    agent.call("set", name="a", limit=0.45, priority=4)
    if while_down:
        restarted(agent, TEXT.replace("limit: 60%", "limit: 70%"))
    else:
        edited(agent, ("limit: 60%", "limit: 70%"))
    assert has(agent) == (0.2, 0.7, 2, 4)
    assert agent.tenant("a")["set_by_hand"] == {"priority": {"value": 4, "file": 1}}
    told = [line for line in agent.said().splitlines() if "set by hand" in line]
    assert len(told) == 1
    assert "a: limit 45 %, set by hand, is replaced by 70 %" in told[0]
    edited(agent, ("limit: 70%", "limit: 60%"))
    assert has(agent) == (0.2, 0.6, 2, 4), "what was replaced does not return"


def test_a_value_that_contradicts_the_tenants_new_line_gives_way(agent: AgentProcess) -> None:
    agent.call("set", name="a", limit=0.45)
    edited(agent, ("request: 20%", "request: 50%"))
    assert has(agent) == (0.5, 0.6, 2, 1)
    assert "a: limit 45 %, set by hand, is replaced by 60 %" in agent.said()
    assert not agent.call("list")["agent"]["config_fault"]


@pytest.mark.parametrize("while_down", [False, True])
def test_removing_the_tenant_ends_a_set_value(agent: AgentProcess, while_down: bool) -> None:
    agent.call("set", name="a", limit=0.45)
    with agent.client() as launcher:
        shim = FakeShim(agent.folder, register(launcher, "a", limit=None)["token"])
        wait_for(lambda: saved(agent.folder, "a")["processes"], what="the next agent can know the process")
        line = TEXT.splitlines()[2]
        if while_down:
            restarted(agent, TEXT.replace(line, ""))
        else:
            edited(agent, (line, ""))
        assert agent.tenant("a")["set_by_hand"] == {}
        declare(agent.folder, TEXT)
        wait_for(lambda: has(agent) == (0.2, 0.6, 2, 1), what="the tenant is declared again")
        shim.close()


def test_the_files_own_value_set_again_is_no_set_value(agent: AgentProcess) -> None:
    agent.call("set", name="a", limit=0.45)
    assert agent.call("set", name="a", limit=0.6)["set_by_hand"] == {}
    edited(agent, ("limit: 60%", "limit: 70%"))
    assert has(agent)[1] == 0.7
    assert "set by hand" not in agent.said()


def test_a_set_value_takes_the_place_of_a_range(agent: AgentProcess) -> None:
    assert agent.call("set", name="c", request=0.2)["set_by_hand"] == {"request": {"value": 0.2, "file": [0.1, 0.3]}}
    with agent.client() as launcher:
        with pytest.raises(InputError, match="c has request 20 %, set by hand: leave out --request"):
            register(launcher, "c", request=0.3, limit=None)
        register(launcher, "c", request=0.0, limit=0.9)
    wait_for(lambda: agent.tenant("c")["state"] == "declared", what="the launcher has gone without a program")
    agent.close()
    agent.start()
    assert agent.tenant("c")["request"] == 0.2
    edited(agent)
    assert agent.tenant("c")["request"] == 0.2
    assert agent.call("set", name="c", request=0.1)["set_by_hand"] == {}
    with agent.client() as launcher:
        register(launcher, "c", request=0.3, limit=None)
        assert agent.tenant("c")["request"] == 0.3


def test_set_says_until_when_and_ps_what_the_file_has(agent: AgentProcess) -> None:
    said = cotenant("set", "a", "--limit", "45%", "--dir", agent.folder).out
    assert said.endswith("holds at once; kept until the value in the agent's configuration file changes\n")
    assert "a: limit 45 % was set by hand; the configuration file has 60 %" in cotenant("ps", "--dir", agent.folder).out
    assert cotenant("set", "a", "--limit", "60%", "--dir", agent.folder).out.endswith("holds at once\n")
    assert "by hand" not in cotenant("ps", "--dir", agent.folder).out
