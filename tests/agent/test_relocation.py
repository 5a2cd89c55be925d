"""A program that comes back on another GPU: its launches and copies go by the floor and the link of that one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swap_node import MIB, Node, nodes_in
from waiting import wait_for

from cotenant.agent.gate.client import join_floor


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(tmp_path) as make:
        yield make


def two_gpus(node: Callable[..., Node], **settings: object) -> tuple[Node, list[str]]:
    here = node(1024 * MIB, count=2, **settings)
    return here, [gpu["uuid"] for gpu in here.call("status")["gpus"]]


def copied(here: Node) -> int:
    """Copies of the tenant that its GPU's page has seen."""
    ways = here.tenant("a")["gpus"][0]["copies"]
    return sum(ways[way]["chunks"] + ways[way]["small_copies"] for way in ways if isinstance(ways[way], dict))


def test_copies_take_turns_where_the_program_is(node: Callable[..., Node]) -> None:
    here, (home, away) = two_gpus(node)
    program = here.program("a", "none", gpus=(home,), copy_weight=2.0)
    assert program.ask("take(64)") == "0"
    assert copied(here) > 0
    for gpu in (away, home):
        here.call("park", name="a")
        here.call("resume", name="a", gpu=gpu)
        assert here.tenant("a")["gpus"][0]["uuid"] == gpu
        assert copied(here) == 0, "a queue of its own there"
        assert program.ask("check()") == "intact"
        assert copied(here) > 0


def test_best_effort_work_goes_by_the_floor_of_the_gpu_it_is_on(node: Callable[..., Node]) -> None:
    # a flag that is set once stays set for the whole test, however slow the machine is
    here, (home, away) = two_gpus(node, colocation={"scheme": "temporal", "heartbeat_timeout_ms": 60_000})
    program = here.program("a", "none", gpus=(home,), best_effort=True)
    assert program.ask("take(8)") == "0"
    assert program.ask("work(0.1)").endswith("intact")
    here.call("park", name="a")
    here.call("resume", name="a", gpu=away)
    old, new = join_floor(here.folder, home), join_floor(here.folder, away)
    try:
        old.raise_()
        assert program.ask("work(0.1)").endswith("intact"), "the old GPU's floor is no longer its business"
        old.lower()
        new.raise_()
        program.tell("work(0.1)")
        wait_for(lambda: here.tenant("a")["gpus"][0]["floor"] == "held off")
        new.lower()
        assert program.answer().endswith("intact")
    finally:
        old.close()
        new.close()


def test_it_is_found_again_by_an_agent_that_comes_back(node: Callable[..., Node]) -> None:
    here, (home, away) = two_gpus(node)
    program = here.program("a", "none", gpus=(home,))
    assert program.ask("take(64)") == "0"
    here.call("park", name="a")
    here.call("resume", name="a", gpu=away)
    here.agent.kill()
    here.agent.wait()
    here.start()
    assert program.ask("work(0.2)").endswith("intact")
    assert here.tenant("a")["gpus"][0]["uuid"] == away
