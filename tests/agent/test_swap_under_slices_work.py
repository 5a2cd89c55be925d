"""What programs do on the GPU and on the host while they are parked and resumed under time slices."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from swap_node import CONTEXT, MIB, Node, Program, nodes_in

from cotenant.core.errors import WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
SCRIPT = Path(__file__).with_name("work_program.py")


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def parked_while(here: Node, program: Program, line: str, least: int = 3) -> str:
    """Park and resume the tenant as long as its program works on this line; the program's answer."""
    moves = 0
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(program.ask, line)
        try:
            while moves < least or not answer.done():
                here.call("park", name="a")
                assert here.where("a")["resident_bytes"] == 0
                here.call("resume", name="a")
                moves += 1
        except BaseException:
            program.process.kill()  # so that nothing waits for its answer
            raise
        return answer.result()


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_work_of_every_kind_waits_for_its_memory(node: Callable[..., Node], seed: int) -> None:
    """Copies, memsets, graphs, pools, mapped memory, callbacks, events: a program that touches memory which is not on
    the GPU ends, since the software GPU unmaps it.
    """
    here = node(1024 * MIB)
    a = here.program("a", memory=CONTEXT + 256 * MIB, script=SCRIPT, mechanism="slices")
    assert parked_while(here, a, f"work({seed}, 3)").endswith("right")


@pytest.mark.parametrize(("kind", "flags"), [("blocking", 0), ("not blocking", 1)])
def test_memory_stays_while_other_streams_than_the_captured_one_work(
    node: Callable[..., Node], kind: str, flags: int
) -> None:
    """The driver does not tell of the default stream while a stream that synchronises with it is captured."""
    here = node(1024 * MIB)
    a = here.program("a", memory=CONTEXT + 200 * MIB, mechanism="slices")
    assert a.ask("take(200)") == "0"
    assert a.ask("work(0.01)").endswith("intact")
    assert a.ask("hold_work()") == "0"
    assert a.ask(f"begin_capture({flags})") == "0"
    with pytest.raises(WorkError, match="did not end within"):
        here.call("park", name="a", timeout_s=0.3)
    assert here.where("a")["resident_bytes"] == 200 * MIB
    a.ask("end_work()")
    if kind == "not blocking":
        here.call("park", name="a")
    assert a.ask("end_capture()") == "0"
    if kind == "blocking":
        here.call("park", name="a")
    here.call("resume", name="a")
    assert a.ask("work(0.1)").endswith("intact")


def test_a_program_forks_while_its_memory_moves(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    a = here.program("a", memory=CONTEXT + 256 * MIB, script=SCRIPT, mechanism="slices")
    assert a.ask("work(1, 0.2)").endswith("right")
    assert parked_while(here, a, "forks(60)") == "0"
    assert a.ask("work(1, 0.2)").endswith("right")


def test_a_program_starts_others_while_its_memory_moves(node: Callable[..., Node]) -> None:
    here = node(1600 * MIB)
    a = here.program("a", memory=2 * CONTEXT + 512 * MIB, script=SCRIPT, mechanism="slices")
    assert a.ask("work(1, 0.2)").endswith("right")
    assert parked_while(here, a, "child(2, 1)").endswith("right")
    assert a.ask("work(1, 0.2)").endswith("right")
