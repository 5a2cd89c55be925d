"""Tenants that are parked while another one returns: contents are right; all end as if moved one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_harness import saved
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import WITHIN_S, wait_for

from cotenant.agent.control.memory_orders import MemoryOrders
from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import InputError, NothingToDoError, WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
SIZE = 200 * MIB
ROOM = 2 * CONTEXT + 264 * MIB  # for one of two programs of SIZE


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def two(node: Callable[..., Node], memory: int = ROOM, **settings: Any) -> tuple[Node, Program, Program]:
    """A GPU with room for one of two programs: `a` is parked, `b` on the GPU."""
    here = node(memory, **settings)
    a, b = here.program("a"), here.program("b")
    assert a.ask("take(200)") == "0"
    here.call("park", name="a")
    assert b.ask("take(200)") == "0"
    return here, a, b


def parked(here: Node) -> dict[str, bool]:
    """The parked tenants, and whether by order; the same as in the state file."""
    rows = {row["name"]: row["by_order"] for row in here.call("parked")["parked"]}
    assert {row["name"] for row in json.loads((here.folder / "state.json").read_text())["parked"]} == set(rows)
    return rows


def stop(here: Node, program: Program, name: str) -> None:
    """Stop a program's processes while its tenant has no turn: orders about its memory wait until it continues."""
    here.call("exchange", **{"in": [name]}, release=False)
    program.process.send_signal(signal.SIGSTOP)


class Order(threading.Thread):
    """An order in a thread of its own; `result` is its answer, or the error that it ended with."""

    def __init__(self, here: Node, op: str, **order: Any) -> None:
        super().__init__(daemon=True)
        self._client, self._op, self._order = ControlClient(here.folder, timeout_s=60), op, order
        self.result: Any = None
        self.start()

    def run(self) -> None:
        with self._client:
            try:
                self.result = self._client.call(self._op, **self._order)
            except (InputError, WorkError, OSError) as error:
                self.result = error

    def get(self) -> Any:
        self.join(WITHIN_S)
        assert not self.is_alive()
        return self.result


@pytest.mark.parametrize("hand", [False, True])
def test_both_change_places(node: Callable[..., Node], hand: bool) -> None:
    here, a, b = two(node, swap_hand=hand, swap_piece=16 * MIB)
    programs = {"a": a, "b": b}
    for comes, leaves in (("a", "b"), ("b", "a"), ("a", "b")):
        answer = here.call("resume", name=comes, instead_of=[leaves])
        (row,) = answer["parked"]
        assert (row["name"], row["freed_bytes"], row["by_order"]) == (leaves, SIZE, True)
        assert answer["failed"] == {}
        assert 0.0 < answer["parked"][0]["seconds"] <= answer["seconds"]
        assert parked(here) == {leaves: True}
        assert (here.where(comes)["resident_bytes"], here.where(leaves)["resident_bytes"]) == (SIZE, 0)
        assert programs[comes].ask("check()") == "intact"
        assert here.tenant(leaves)["state"] == "parked"
    here.call("park", name="a")
    here.call("resume", name="b")
    assert b.ask("check()") == "intact"


def test_all_of_a_victim_leaves_although_less_is_needed(node: Callable[..., Node]) -> None:
    """As `park` does; and several leave, also one that fits beside the others."""
    here, a, b = two(node, 3 * CONTEXT + 400 * MIB)
    c = here.program("c")
    assert c.ask("take(40)") == "0"
    answer = here.call("resume", name="a", instead_of=["b", "c"])
    assert {row["name"]: row["freed_bytes"] for row in answer["parked"]} == {"b": SIZE, "c": 40 * MIB}
    assert parked(here) == {"b": True, "c": True}
    assert [here.where(name)["resident_bytes"] for name in "abc"] == [SIZE, 0, 0]
    assert here.call("resume", name="c")["gpus"]
    here.call("resume", name="b", instead_of=["a"])
    assert [program.ask("check()") for program in (b, c)] == ["intact"] * 2
    here.call("resume", name="a", instead_of=["b"])
    assert a.ask("check()") == "intact"


def test_no_other_order_for_any_of_them_meanwhile(node: Callable[..., Node]) -> None:
    here, a, b = two(node)
    stop(here, b, "b")
    order = Order(here, "resume", name="a", instead_of=["b"])
    wait_for(lambda: here.where("b")["moving"], what="the order to begin")
    for op, name, more in (
        ("park", "b", {}), ("resume", "a", {}), ("resume", "a", {"instead_of": ["b"]}), ("resume", "b", {})
    ):  # fmt: skip
        with pytest.raises(WorkError, match="is already being parked or resumed"):
            here.call(op, name=name, **more)
    b.process.send_signal(signal.SIGCONT)
    assert order.get()["failed"] == {}
    assert a.ask("check()") == "intact"


def test_a_return_that_is_refused_leaves_both_parked(node: Callable[..., Node]) -> None:
    """A program of no tenant has the memory that the agent counts as free."""
    here = node(3 * CONTEXT + 264 * MIB)
    a, b, stranger = here.program("a"), here.program("b"), Program(here, "stranger", None)
    assert a.ask("take(200)") == "0"
    here.call("park", name="a")
    assert b.ask("take(120)") == stranger.ask("take(96)") == "0"
    with pytest.raises(WorkError, match="a cannot be brought back"):
        here.call("resume", name="a", instead_of=["b"], timeout_s=0.2)
    assert parked(here) == {"a": True, "b": True}
    assert here.where("b")["resident_bytes"] == 0
    assert stranger.ask("give()") == "0"
    here.call("resume", name="a")
    assert a.ask("check()") == "intact"
    here.call("resume", name="b", instead_of=["a"])
    assert b.ask("check()") == "intact"


@pytest.mark.parametrize("killed", ["a", "b"])
def test_one_of_them_ends_in_the_middle(node: Callable[..., Node], killed: str) -> None:
    here, a, b = two(node)
    dead, alive = (a, b) if killed == "a" else (b, a)
    stop(here, b, "b")
    order = Order(here, "resume", name="a", instead_of=["b"])
    wait_for(lambda: here.where("b")["moving"], what="the order to begin")
    dead.process.kill()
    dead.process.wait()
    b.process.send_signal(signal.SIGCONT)
    answer = order.get()
    if killed == "b":
        assert "b ended" in answer["failed"]["b"]
        assert answer["parked"] == []
        assert parked(here) == {}
    else:
        assert parked(here).get("b") is True
        here.call("resume", name="b")
    assert alive.ask("check()") == "intact"


@pytest.mark.parametrize("stopped", ["a", "b"])
def test_the_agent_is_killed_in_the_middle(node: Callable[..., Node], stopped: str) -> None:
    """The order is given again, and carries out what is left."""
    here, a, b = two(node)
    wait_for(lambda: all(saved(here.folder, name).get("connected") for name in "ab"), what="it is written down")
    still = a if stopped == "a" else b
    if stopped == "b":
        stop(here, b, "b")
    else:
        a.process.send_signal(signal.SIGSTOP)
    order = Order(here, "resume", name="a", instead_of=["b"])
    wait_for(lambda: here.where("b")["moving"], what="the order to begin")
    if stopped == "a":
        wait_for(lambda: here.where("b")["resident_bytes"] < SIZE, what="the other one to leave")
    here.agent.kill()
    here.agent.wait()
    still.process.send_signal(signal.SIGCONT)
    assert isinstance(order.get(), (WorkError, OSError))
    here.start()
    assert parked(here) == {"a": True}
    answer = here.call("resume", name="a", instead_of=["b"])
    assert ([row["name"] for row in answer["parked"]], answer["failed"]) == (["b"], {})
    assert parked(here) == {"b": True}
    assert (here.where("a")["resident_bytes"], here.where("b")["resident_bytes"]) == (SIZE, 0)
    assert a.ask("check()") == "intact"
    with pytest.raises(NothingToDoError, match="a is not parked"):
        here.call("resume", name="a", instead_of=["b"])
    here.call("resume", name="b", instead_of=["a"])
    assert b.ask("check()") == "intact"


@pytest.mark.slow
def test_a_victim_that_does_not_answer_stays_and_is_named(node: Callable[..., Node]) -> None:
    here, a, b = two(node)
    stop(here, b, "b")
    began = time.monotonic()
    with pytest.raises(WorkError, match="a cannot be brought back"):
        here.call("resume", name="a", instead_of=["b"], timeout_s=50.0)
    assert time.monotonic() - began < 35.0, "it does not wait for space that b keeps"
    assert parked(here) == {"a": True}
    b.process.kill()
    b.process.wait()
    here.call("resume", name="a")
    assert a.ask("check()") == "intact"


def test_programs_that_the_driver_moves_leave_before(node: Callable[..., Node]) -> None:
    here = node(2 * CONTEXT + 264 * MIB)
    a = here.program("a")
    assert a.ask("take(200)") == "0"
    here.call("park", name="a")
    whole = here.program("whole", "park")
    assert whole.ask("take(200)") == "0"
    answer = here.call("resume", name="a", instead_of=["whole"])
    assert [(row["name"], row["method"]) for row in answer["parked"]] == [("whole", "checkpoint")]
    assert parked(here) == {"whole": True}
    assert a.ask("check()") == "intact"
    # the other way round: `whole` returns to space that is free before
    answer = here.call("resume", name="whole", instead_of=["a"])
    assert [(row["name"], row["method"]) for row in answer["parked"]] == [("a", "swap")]
    assert whole.ask("check()") == "intact"


def test_names_that_are_parked_or_unknown_do_not_stop_the_return(node: Callable[..., Node]) -> None:
    here, a, _ = two(node)
    here.call("park", name="b")
    answer = here.call("resume", name="a", instead_of=["b", "nobody"])
    assert [row["name"] for row in answer["parked"]] == ["b"]
    assert "there is no tenant 'nobody'" in answer["failed"]["nobody"]
    assert a.ask("check()") == "intact"
    here.call("park", name="a")
    for wrong in (["a"], ["b", "b"]):
        with pytest.raises(InputError, match="only once"):
            here.call("resume", name="a", instead_of=wrong)
    with pytest.raises(InputError, match="list"):
        here.call("resume", name="a", instead_of="b")
    assert parked(here) == {"a": True, "b": True}


def test_whoever_gives_the_order_may_move_all_of_them() -> None:
    asked: list[Any] = []

    async def resume(*order: Any) -> dict[str, Any]:
        asked.append(order)
        return {}

    no: Any = None
    tenants = {name: SimpleNamespace(uid=uid) for name, uid in (("a", 1000), ("b", 1000), ("other", 1001))}
    registry: Any = SimpleNamespace(tenants=tenants)
    orders = MemoryOrders(SimpleNamespace(resume=resume), no, no, no, registry, no)  # type: ignore[arg-type]
    caller: Any = SimpleNamespace(trusted=False, peer=SimpleNamespace(uid=1000))
    with pytest.raises(InputError, match="other is not a tenant of user 1000"):
        asyncio.run(orders.resume(caller, {"name": "a", "instead_of": ["b", "other"]}))
    assert not asked
    asyncio.run(orders.resume(caller, {"name": "a", "instead_of": ["b"]}))
    assert asked == [("a", None, 60.0, ["b"])]


@pytest.mark.timed
def test_memory_moves_in_both_directions_at_the_same_time(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a link of 200 MB/s each of both moves takes a second."""
    monkeypatch.setenv("COTENANT_SOFTGPU_LINK_MBPS", "200")
    here, a, b = two(node, swap_piece=16 * MIB)
    apart: list[float] = []
    for _ in range(2):
        apart.append(here.call("park", name="b")["seconds"] + here.call("resume", name="a")["seconds"])
        apart.append(here.call("park", name="a")["seconds"] + here.call("resume", name="b")["seconds"])
    together = []
    for comes, leaves in (("a", "b"), ("b", "a")) * 2:
        with contextlib.suppress(NothingToDoError):
            here.call("park", name=comes)
        together.append(here.call("resume", name=comes, instead_of=[leaves])["seconds"])
    print(f"apart {min(apart):.2f} s, together {min(together):.2f} s")
    assert min(together) < 0.75 * min(apart)
    assert parked(here) == {"a": True}
    assert b.ask("check()") == "intact"
    here.call("resume", name="a", instead_of=["b"])
    assert a.ask("check()") == "intact"
