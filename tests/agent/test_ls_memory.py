"""An LS service's weights: on the card and nowhere else, or back within a stated time, whatever BE takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swap_node import CONTEXT, MIB, Node, Program

from cotenant.agent.config.files import TenantSpec
from cotenant.core.errors import InputError


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[int], Node]]:
    nodes: list[Node] = []

    def start(memory: int) -> Node:
        nodes.append(Node(tmp_path, memory))
        return nodes[-1]

    yield start
    for started in nodes:
        started.close()


def service(here: Node, mode: str) -> Program:
    """An LS service of 256 MiB of weights, 700 MiB reserved."""
    spec = TenantSpec("ls", memory_bytes=700 * MIB, latency_sensitive=True, oversubscribe=mode)
    started = Program(here, "ls", spec)
    assert started.ask("take(256)") == "0"
    return started


def training(here: Node, memory_mib: int) -> Program:
    """A BE tenant whose contents can move to host memory."""
    spec = TenantSpec("be", memory_bytes=memory_mib * MIB, oversubscribe="swap", best_effort=True)
    return Program(here, "be", spec)


def test_a_service_that_stays_is_resident_whatever_be_takes(node: Callable[[int], Node]) -> None:
    """BE is promised what LS has not reserved, and no page of LS moves for it."""
    here = node(2 * CONTEXT + 960 * MIB)
    ls = service(here, "none")
    with pytest.raises(InputError, match="left to promise"):
        training(here, 900)
    be = training(here, 700)
    assert be.ask("take(600)") == "2", "its context and 444 MiB are left"
    assert be.ask("check()") == "intact"
    assert ls.ask("take(188)") == "0", "the rest of what it reserved is there, below its cap"
    assert ls.ask("work(0.2)").endswith("intact")
    assert here.tenant("ls")["gpus"][0].get("residency") is None


def test_a_service_that_was_moved_out_is_back_for_its_next_request(node: Callable[[int], Node]) -> None:
    """It may be moved while it rests (`--oversubscribe swap`); its next request moves BE out and itself in."""
    here = node(2 * CONTEXT + 448 * MIB)
    ls, be = service(here, "swap"), training(here, 700)
    assert be.ask("take(400)") == "0"
    away = 256 * MIB - here.where("ls")["resident_bytes"]
    assert away > 100 * MIB
    be.tell("work(2)")
    assert ls.ask("check()") == "intact"
    assert here.where("ls")["moved_in_bytes"] >= away, "BE may have had its next turn since"
    assert be.answer().endswith("intact")
