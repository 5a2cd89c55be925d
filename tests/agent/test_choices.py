"""A declaration that permits a range, and the launchers that choose in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess, declare
from fake_shim import FakeShim, register
from waiting import wait_for

from cotenant.agent.config.choices import one_or_range
from cotenant.agent.config.files import Choices
from cotenant.agent.config.schema import parse_config
from cotenant.core.errors import InputError
from cotenant.core.units import parse_fraction

TEXT = (
    "tenants:\n"
    + "".join(
        f"  - {{name: {name}, request: 10%..50%, limit: 50%..100%, memory: 1GiB..6GiB}}\n"
        for name in ("ada", "bea", "cyd")
    )
    + "  - {name: dan, request: 5%}\n"
)


@pytest.fixture
def agent(short_folder: Path) -> Any:
    """An agent with two GPUs of 8 GiB and four declared tenants."""
    found = AgentProcess(short_folder, config=declare(short_folder, TEXT), gpus=2)
    yield found
    found.close()


def has(agent: AgentProcess, name: str) -> tuple[float, float, int]:
    row = agent.tenant(name)
    return row["request"], row["limit"], row["gpus"][0]["memory_limit_bytes"] >> 30


def spec_of(**entry: Any) -> Any:
    return parse_config({"tenants": [{"name": "ada", **entry}]}, Path("agent.yaml")).tenants[0]


def test_a_range_is_its_least_and_what_may_be_chosen() -> None:
    spec = spec_of(request="10%..50%", memory="500MB..2GiB")
    assert (spec.request, spec.limit, spec.memory_bytes) == (0.1, 1.0, 500_000_000)
    assert spec.choices == Choices(request=(0.1, 0.5), memory_bytes=(500_000_000, 2 << 30))
    assert spec_of(request="10%").choices is None


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"request": "50%..10%"}, "has its bounds in the wrong order; write the lower first"),
        ({"request": "10%.."}, "'' is not a quantity"),
        ({"limit": "10%..20%..30%"}, "is not a quantity"),
        ({"memory": "1..2"}, "'1' has no unit"),
        ({"request": "60%..80%", "limit": "50%..100%"}, "asks for 60%, over its own limit of 50%"),
    ],
)
def test_ranges_that_are_none(entry: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        spec_of(**entry)


def test_a_choice_holds_while_the_program_runs(agent: AgentProcess) -> None:
    assert has(agent, "ada") == (0.1, 0.5, 1)
    with agent.client() as launcher:
        register(launcher, "ada", request=0.5, limit=None, memory_bytes=6 << 30)
        assert has(agent, "ada") == (0.5, 0.5, 6)
    wait_for(lambda: has(agent, "ada") == (0.1, 0.5, 1), what="the launcher has gone without a program")
    with agent.client() as launcher:
        token = register(launcher, "ada", limit=0.8)["token"]
        shim = FakeShim(agent.folder, token)
        assert has(agent, "ada") == (0.1, 0.8, 1)
        register(launcher, "ada", limit=None)
        register(launcher, "ada", limit=0.8)
        with pytest.raises(
            InputError, match="ada is already running, with a limit of 80 %: leave out --request, --limit and --memory"
        ):
            register(launcher, "ada", limit=1.0)
    agent.close()
    agent.start()
    assert has(agent, "ada") == (0.1, 0.8, 1), "its process is still there"
    shim.close()
    del shim


def test_choices_outside_are_refused(agent: AgentProcess) -> None:
    for choice, said in (
        ({"request": 0.6, "limit": None}, "ada may have a request of 10 % to 50 %, not 60 %"),
        ({"limit": 0.4}, "ada may have a limit of 50 % to 100 %, not 40 %"),
        ({"memory_bytes": 7 << 30, "limit": None}, r"ada may have memory of 1.0 GiB to 6.0 GiB, not 7.0 GiB"),
        ({"weight": 2.0, "limit": None}, "which sets its weight: leave out --weight"),
    ):
        with agent.client() as launcher, pytest.raises(InputError, match=said):
            register(launcher, "ada", **choice)
        assert has(agent, "ada") == (0.1, 0.5, 1)
    with agent.client() as launcher, pytest.raises(InputError, match="which sets a request: leave out --request"):
        register(launcher, "dan", request=0.06, limit=None)


def test_a_declared_value_may_be_named(agent: AgentProcess) -> None:
    """A spawn form offers one limit to all users: those whose declaration has just that limit may choose it."""
    with agent.client() as launcher:
        register(launcher, "dan", request=0.05, limit=1.0)
    with agent.client() as launcher, pytest.raises(InputError, match="which sets a limit: leave out --limit"):
        register(launcher, "dan", limit=0.9)


def test_a_choice_goes_to_the_gpu_that_has_room(agent: AgentProcess) -> None:
    """Three at 10 % lie on two GPUs; the choices of 6 GiB need one GPU each, and the third finds none."""
    with agent.client() as launcher:
        for name in ("ada", "cyd"):
            register(launcher, name, limit=None, memory_bytes=6 << 30)
        assert agent.tenant("ada")["gpus"][0]["uuid"] != agent.tenant("cyd")["gpus"][0]["uuid"]
        with pytest.raises(InputError, match="of memory left to promise; bea asks for"):
            register(launcher, "bea", limit=None, memory_bytes=6 << 30)
        assert has(agent, "bea") == (0.1, 0.5, 1)


def test_a_new_configuration_keeps_a_choice_that_it_permits(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        shim = FakeShim(agent.folder, register(launcher, "ada", request=0.3, limit=None)["token"])
        declare(agent.folder, TEXT.replace("10%..50%", "20%..40%"))
        wait_for(lambda: has(agent, "bea")[0] == 0.2)
        assert has(agent, "ada")[0] == 0.3
        declare(agent.folder, TEXT.replace("10%..50%", "5%..25%"))
        wait_for(lambda: has(agent, "bea")[0] == 0.05)
        assert has(agent, "ada")[0] == 0.05, "30 % is no longer permitted"
        shim.close()


@pytest.mark.parametrize("text", ["0%...50%", "0...1", "10%....50%"])
def test_three_dots_are_not_two_and_a_fraction(text: str) -> None:
    with pytest.raises(InputError, match="more than two dots"):
        one_or_range(parse_fraction)(text)
