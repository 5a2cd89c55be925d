"""The agent dies at any step while tenants under time slices are parked and resumed, and is started again."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import wait_for

from cotenant.core.errors import WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
SIZE = 200 * MIB
MEMORY = {"a": 2 * CONTEXT + SIZE, "b": CONTEXT + SIZE}  # `a` has two processes
ROOM = 3 * CONTEXT + SIZE + 64 * MIB  # for the memory of one of the two
MORTAL = [sys.executable, str(Path(__file__).with_name("mortal_agent.py"))]


class Pair:
    """Two tenants of which one has room: `a` is parked, `b` on the GPU."""

    def __init__(self, here: Node) -> None:
        self.here = here
        self.programs: dict[str, list[Program]] = {"a": [self._add("a"), here.joined("a")]}
        first, second = self.programs["a"]
        assert (first.ask("take(120)"), second.ask("take(80)")) == ("0", "0")
        here.call("park", name="a")
        self.programs["b"] = [self._add("b")]
        assert self.programs["b"][0].ask("take(200)") == "0"

    def _add(self, name: str) -> Program:
        return self.here.program(name, memory=MEMORY[name], mechanism="slices")

    def is_parked(self, name: str) -> bool:
        return bool(self.here.tenant(name)["state"] == "parked")

    def put(self, here: str, away: str) -> None:
        """Orders after which one of the two is on the GPU, and the other parked."""
        if not self.is_parked(away):
            self.here.call("park", name=away)
        if self.is_parked(here):
            self.here.call("resume", name=here)

    def check(self) -> None:
        """Whoever is not parked runs; nothing is on the GPU of who is; no contents are lost."""
        for name, programs in self.programs.items():
            wait_for(lambda name=name: len(self.here.tenant(name)["pids"]) == len(self.programs[name]))
            if self.is_parked(name):
                wait_for(lambda name=name: self.has(name) == (SIZE, 0), what=f"{name} leaves again")
            else:
                assert [each.ask("work(0.02)").split()[1] for each in programs] == ["intact"] * len(programs)
                assert self.has(name) == (SIZE, SIZE)

    def has(self, name: str) -> tuple[int, int]:
        """Bytes of a tenant that can be moved, and how many of them are on the GPU."""
        row = self.here.where(name)
        return row["movable_bytes"], row["resident_bytes"]


@pytest.fixture
def pair(short_folder: Path) -> Iterator[Pair]:
    with nodes_in(short_folder) as make:
        yield Pair(make(ROOM, command=MORTAL))


ORDERS: dict[str, Callable[[Node], object]] = {
    "park": lambda here: here.call("park", name="b"),
    "resume": lambda here: here.call("resume", name="a"),
    "change": lambda here: here.call("resume", name="a", instead_of=["b"]),
}


def dies(pair: Pair, order: str, step: int) -> bool:
    """Give an order to an agent that dies at this step. Returns False if the order was done before."""
    if order == "resume":
        pair.here.call("park", name="b")
    mortal = pair.here.folder / "mortal"
    mortal.with_suffix(".new").write_text(str(step))
    mortal.with_suffix(".new").rename(mortal)
    with contextlib.suppress(WorkError):
        ORDERS[order](pair.here)
    try:
        mortal.unlink()
    except FileNotFoundError:  # the agent has died
        pair.here.agent.wait()
        pair.here.start()
        return True
    return False


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [(3, 8), pytest.param(range(1, 200), marks=pytest.mark.slow)])
def test_agent_killed_at_a_step_of_an_order(pair: Pair, order: str, steps: range | tuple[int, ...]) -> None:
    for step in steps:
        died = dies(pair, order, step)
        if not died:
            assert step > 8, "an order has more steps"
            break
        pair.check()
        pair.put("a", "b")
        pair.put("b", "a")
    assert not died or len(steps) < 100
    pair.check()
