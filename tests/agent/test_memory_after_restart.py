"""An agent that was killed and started again moves no memory, and gives none away, before it knows where memory is."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import saved
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import WITHIN_S, stays, wait_for

from cotenant.core.errors import WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
SIZE = 200 * MIB


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


class Later(threading.Thread):
    """A call whose result is fetched later."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work, self.result = work, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except WorkError as error:
            self.result = error

    def get(self) -> Any:
        self.join(WITHIN_S)
        assert not self.is_alive()
        return self.result


def restart_while_stopped(here: Node, *programs: Program) -> None:
    """Restart the agent while the programs are stopped, so that they have not connected to the new agent yet."""
    names = [row["name"] for row in here.call("list")["tenants"]]
    pids = {program.process.pid for program in programs}
    wait_for(lambda: pids <= {pid for name in names for pid, _ in saved(here.folder, name).get("connected") or []})
    for program in programs:
        program.process.send_signal(signal.SIGSTOP)
    here.agent.kill()
    here.agent.wait()
    here.start()


@pytest.mark.parametrize("op", ["park", "preempt", "exchange"])
@pytest.mark.parametrize("mode", ["swap", "park"])
def test_an_order_waits_for_the_programs_of_the_last_agent(node: Callable[..., Node], op: str, mode: str) -> None:
    if (op, mode) == ("exchange", "park"):
        pytest.skip("exchange is for tenants that swap their own memory")
    here = node(2048 * MIB)
    program = here.program("a", mode)
    assert program.ask("take(200)") == "0"
    restart_while_stopped(here, program)
    order: dict[str, Any] = {"park": {"name": "a"}, "preempt": {"gpu": "0"}, "exchange": {"out": ["a"]}}[op]
    done = Later(lambda: here.call(op, **order))
    stays(done.is_alive, what="the order waits for the program")
    program.process.send_signal(signal.SIGCONT)
    answer = done.get()
    assert not isinstance(answer, Exception), answer
    assert (here.where("a")["moves_out"], here.where("a")["resident_bytes"]) == (1, 0)
    if op == "preempt":
        assert answer["freed_bytes"] >= SIZE
    if op == "exchange":
        here.call("exchange", **{"in": ["a"]})
    else:
        here.call("resume", name="a")
    assert program.ask("check()") == "intact"


def test_exchanged_tenants_are_both_waited_for(node: Callable[..., Node]) -> None:
    here = node(2 * CONTEXT + 256 * MIB)
    one, two = here.program("a"), here.program("b")
    assert one.ask("take(200)") == "0"
    here.call("exchange", out=["a"])
    assert two.ask("take(200)") == "0"
    restart_while_stopped(here, one, two)
    done = Later(lambda: here.call("exchange", **{"out": ["b"], "in": ["a"]}))
    stays(done.is_alive, what="the order waits for the programs")
    for program in (one, two):
        program.process.send_signal(signal.SIGCONT)
    assert {move["name"]: move["bytes"] for move in done.get()["moves"]} == {"a": SIZE, "b": SIZE}
    here.call("exchange", **{"out": ["a"], "in": ["b"]})
    assert two.ask("check()") == "intact"


def test_memory_of_a_program_that_has_not_returned_is_not_given_away(node: Callable[..., Node]) -> None:
    """The GPU has more than the agent may give, so the driver would not refuse what does not fit."""
    here = node(2048 * MIB, gpu_memory=2 * CONTEXT + 320 * MIB)
    one, two = here.program("a"), here.program("b")
    assert one.ask("take(200)") == "0"
    restart_while_stopped(here, one)
    two.tell("take(200)")
    taken = Later(two.answer)
    stays(taken.is_alive, what="the allocation waits for the program")
    one.process.send_signal(signal.SIGCONT)
    assert taken.get() == "0"
    assert here.where("a")["resident_bytes"] + here.where("b")["resident_bytes"] <= 320 * MIB
    assert one.ask("check()") == two.ask("check()") == "intact"


def test_a_program_that_ended_is_not_waited_for(node: Callable[..., Node]) -> None:
    here = node(2048 * MIB)
    first, second = here.program("a", memory=900 * MIB), here.joined("a")
    assert first.ask("take(200)") == second.ask("take(96)") == "0"
    restart_while_stopped(here, first)
    wait_for(lambda: here.tenant("a")["pids"].count(second.process.pid))
    done = Later(lambda: here.call("park", name="a"))
    stays(done.is_alive, what="the order waits for the program")
    first.process.kill()
    answer = done.get()
    assert not isinstance(answer, Exception), answer
    assert here.where("a")["resident_bytes"] == 0
    here.call("resume", name="a")
    assert second.ask("check()") == "intact"


@pytest.mark.slow
def test_an_order_fails_if_a_program_does_not_return(node: Callable[..., Node]) -> None:
    """Others then get what the driver reports as free."""
    here = node(2048 * MIB)
    one, two = here.program("a"), here.program("b")
    assert one.ask("take(200)") == "0"
    restart_while_stopped(here, one)
    answer = Later(lambda: here.call("park", name="a")).get()
    assert f"process {one.process.pid}" in str(answer)
    assert isinstance(answer, WorkError)
    assert two.ask("take(200)") == "0"
    assert here.call("parked")["parked"] == []
    one.process.send_signal(signal.SIGCONT)
    wait_for(lambda: here.where("a")["resident_bytes"] == SIZE)
    here.call("park", name="a")
    assert here.where("a")["resident_bytes"] == 0
    here.call("resume", name="a")
    assert one.ask("check()") == "intact"
