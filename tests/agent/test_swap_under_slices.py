"""Tenants that share by hardware time slices, and whose memory leaves the GPU when they are parked."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import wait_for

from cotenant.core.errors import InputError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
SIZE = 200 * MIB
MEMORY = CONTEXT + SIZE
ROOM = MEMORY + CONTEXT + 64 * MIB  # for one of two programs, and the other one's context


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def program(here: Node, name: str, memory: int = MEMORY) -> Program:
    return here.program(name, memory=memory, mechanism="slices")


def two(node: Callable[..., Node], memory: int = ROOM) -> tuple[Node, Program, Program]:
    """A GPU with room for one of two programs: `a` is parked, `b` on the GPU."""
    here = node(memory)
    a = program(here, "a")
    assert a.ask("take(200)") == "0"
    here.call("park", name="a")
    b = program(here, "b")
    assert b.ask("take(200)") == "0"
    return here, a, b


def test_two_change_places_and_keep_their_contents(node: Callable[..., Node]) -> None:
    here, a, b = two(node)
    programs = {"a": a, "b": b}
    for comes, leaves in (("a", "b"), ("b", "a"), ("a", "b")):
        answer = here.call("resume", name=comes, instead_of=[leaves])
        assert answer["failed"] == {}
        assert [row["freed_bytes"] for row in answer["parked"]] == [SIZE]
        assert (here.where(comes)["resident_bytes"], here.where(leaves)["resident_bytes"]) == (SIZE, 0)
        assert programs[comes].ask("work(0.1)").endswith("intact")
        assert here.tenant(leaves)["state"] == "parked"


def test_work_goes_on_after_a_move_in_its_middle(node: Callable[..., Node]) -> None:
    here = node(ROOM)
    a = program(here, "a")
    assert a.ask("take(200)") == "0"
    before = here.tenant("a")["launches"]
    a.tell("work(2)")
    wait_for(lambda: here.tenant("a")["launches"] > before + 100)
    here.call("park", name="a")
    assert here.where("a")["resident_bytes"] == 0
    stopped = here.tenant("a")["launches"]
    b = program(here, "b")
    assert b.ask("take(200)") == "0"
    assert b.ask("work(0.2)").endswith("intact")
    assert here.tenant("a")["launches"] == stopped
    here.call("resume", name="a", instead_of=["b"])
    assert a.answer().endswith("intact")
    assert a.ask("work(0.1)").endswith("intact")


def test_both_run_at_the_same_time_where_both_fit(node: Callable[..., Node]) -> None:
    here = node(2 * MEMORY + 64 * MIB)
    both = [program(here, name) for name in ("a", "b")]
    for each in both:
        assert each.ask("take(200)") == "0"
        each.tell("work(1)")
    assert all(each.answer().endswith("intact") for each in both)
    assert here.call("status")["turns"] == 0
    assert [here.tenant(name)["gpus"][0]["turns"] for name in ("a", "b")] == [0, 0]


def test_nobody_is_moved_without_an_order(node: Callable[..., Node]) -> None:
    """A tenant without turns keeps its memory, so a second one that does not fit is refused."""
    here = node(ROOM)
    a = program(here, "a")
    assert a.ask("take(200)") == "0"
    with pytest.raises(InputError, match=r"memory|GiB|MiB"):
        program(here, "b")
    with pytest.raises(InputError, match="oversubscribe: park under slices: without turns only swap is possible"):
        here.program("c", "park", mechanism="slices")
    assert here.where("a")["resident_bytes"] == SIZE


@pytest.mark.parametrize("parked", ["a", "b"])
def test_a_new_agent_keeps_the_parked_one_parked(node: Callable[..., Node], parked: str) -> None:
    """Whichever it admits first, the parked one or the one that has its place."""
    here, *both = two(node)
    programs = dict(zip(("a", "b"), both, strict=True))
    if parked == "b":
        here.call("resume", name="a", instead_of=["b"])
    runs = "b" if parked == "a" else "a"
    programs[parked].tell("work(0.1)")
    here.agent.send_signal(signal.SIGKILL)
    here.agent.wait()
    here.start()
    assert programs[runs].ask("work(0.2)").endswith("intact")
    assert here.tenant(parked)["state"] == "parked"
    answer = here.call("resume", name=parked, instead_of=[runs])
    assert answer["failed"] == {}
    assert programs[parked].answer().endswith("intact")
    here.call("resume", name=runs, instead_of=[parked])
    assert programs[runs].ask("check()") == "intact"


def test_a_parked_tenant_is_changed_whoever_has_its_place(node: Callable[..., Node]) -> None:
    here, a, _ = two(node)
    here.call("set", name="a", limit=0.5)
    assert here.tenant("a")["limit"] == 0.5
    with pytest.raises(InputError, match="left to promise"):
        here.call("resume", name="a")
    here.call("resume", name="a", instead_of=["b"])
    assert a.ask("work(0.1)").endswith("intact")


@pytest.mark.parametrize("killed", ["a", "b"])
def test_one_that_ends_leaves_room(node: Callable[..., Node], killed: str) -> None:
    here, a, b = two(node)
    {"a": a, "b": b}[killed].process.kill()
    wait_for(lambda: killed not in {row["name"] for row in here.call("list")["tenants"]})
    if killed == "b":
        here.call("resume", name="a")
        assert a.ask("check()") == "intact"
        return
    new = program(here, "c", CONTEXT + 8 * MIB)
    assert new.ask("take(8)") == "0"
    assert b.ask("check()") == "intact"
