"""Orders to park a tenant under time slices soon after the agent was killed and started again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agent_harness import saved
from swap_node import CONTEXT, MIB, Node, nodes_in, under_way
from waiting import wait_for

from cotenant.core.errors import WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
MEMORY = CONTEXT + 200 * MIB


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def kill(here: Node) -> None:
    here.agent.kill()
    here.agent.wait()


@pytest.mark.parametrize(("mechanism", "launched"), [("slices", "without"), ("slices", "before"), ("time", "before")])
def test_memory_stays_until_work_that_no_agent_knows_has_ended(
    node: Callable[..., Node], mechanism: str, launched: str
) -> None:
    """Work that was launched while no agent ran, or in a turn of an agent that was killed."""
    here = node(1024 * MIB)
    a = here.program("a", memory=MEMORY, mechanism=mechanism)
    assert a.ask("take(200)") == "0"
    assert a.ask("work(0.01)").endswith("intact")
    wait_for(lambda: saved(here.folder, "a").get("processes"), what="it is written down")
    if launched == "before":
        assert a.ask("hold_work()") == "0"
    kill(here)
    if launched == "without":
        assert a.ask("hold_work()") == "0"
    here.start()
    wait_for(lambda: here.where("a")["resident_bytes"] == 200 * MIB, what="its return to the new agent")
    with pytest.raises(WorkError, match="launched while no agent ran has not ended"):
        here.call("park", name="a", timeout_s=0.1)
    assert (here.tenant("a")["state"], here.where("a")["resident_bytes"]) == ("running", 200 * MIB)
    with ThreadPoolExecutor() as pool:
        parking = pool.submit(here.call, "park", name="a")
        wait_for(lambda: under_way(here, "a"))
        assert here.where("a")["resident_bytes"] == 200 * MIB
        a.ask("end_work()")
        assert parking.result()["freed_bytes"] == 200 * MIB
    here.call("resume", name="a")
    assert a.ask("work(0.1)").endswith("intact")


def test_memory_is_allocated_while_such_work_goes_on(node: Callable[..., Node]) -> None:
    """Also if the tenant was parked, so that new memory gets its place on the GPU only later."""
    here = node(1024 * MIB)
    a = here.program("a", memory=CONTEXT + 400 * MIB, mechanism="slices")
    assert a.ask("take(200)") == "0"
    here.call("park", name="a")
    kill(here)
    assert a.ask("work(0.1)").endswith("intact")
    assert a.ask("hold_work()") == "0"
    here.start()
    wait_for(lambda: here.tenant("a")["pids"], what="its return to the new agent")
    assert a.ask("raw('cuMemAlloc_v2', byref(c_uint64()), c_size_t(96 << 20))") == "0"
    wait_for(lambda: here.where("a")["movable_bytes"] == 296 * MIB)
    assert here.where("a")["resident_bytes"] == 200 * MIB
    a.ask("end_work()")
    wait_for(lambda: here.where("a")["resident_bytes"] == 0, what="it leaves again")
    here.call("resume", name="a")
    assert a.ask("work(0.1)").endswith("intact")
