"""Faults of tenants under time slices whose memory leaves the GPU when they are parked."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agent_harness import AgentProcess, declare, gpu_uuid, saved
from fake_shim import FakeShim, register
from swap_node import CONTEXT, MIB, Node, Program, nodes_in, under_way
from waiting import WITHIN_S, wait_for

from cotenant.abi.protocol import MessageType
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
ALLOCATE = "raw('cuMemAlloc_v2', byref(c_uint64()), c_size_t(8 << 20))"
SIZE = 200 * MIB
MEMORY = CONTEXT + SIZE


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def program(here: Node, memory: int = MEMORY, name: str = "a") -> Program:
    return here.program(name, memory=memory, mechanism="slices")


@pytest.mark.parametrize("order", ["park", "resume"])
def test_agent_killed_in_the_middle_of_a_move(node: Callable[..., Node], order: str) -> None:
    here = node(1024 * MIB)
    a = program(here, CONTEXT + 400 * MIB)
    assert a.ask("take(400)") == "0"
    wait_for(lambda: saved(here.folder, "a").get("processes"), what="it is written down")
    if order == "resume":
        here.call("park", name="a")
    with ControlClient(here.folder, timeout_s=60) as client:

        def move() -> None:
            with contextlib.suppress(WorkError, OSError):
                client.call(order, name="a")

        mover = threading.Thread(target=move)
        mover.start()
        wait_for(lambda: under_way(here, "a") or not mover.is_alive())
        here.agent.kill()
        here.agent.wait()
        here.start()
        mover.join(WITHIN_S)
    a.tell("work(0.1)")
    if here.tenant("a")["state"] == "parked":
        here.call("resume", name="a")
    assert a.answer().endswith("intact")
    assert here.where("a")["resident_bytes"] == 400 * MIB
    here.call("park", name="a")
    assert here.where("a")["resident_bytes"] == 0


def test_what_returned_while_no_agent_ran_leaves_again(node: Callable[..., Node]) -> None:
    """Without an agent a parked tenant restores its memory and runs. The next agent knows that it was parked."""
    here = node(2 * MEMORY + 64 * MIB)
    a, b = program(here), program(here, name="b")
    assert a.ask("take(200)") == b.ask("take(200)") == "0"
    here.call("park", name="a")
    here.agent.kill()
    here.agent.wait()
    assert a.ask("work(0.1)").endswith("intact")
    here.start()
    wait_for(lambda: here.tenant("a")["pids"], what="its connection to the new agent")
    wait_for(lambda: here.where("a")["movable_bytes"] == SIZE and here.where("a")["resident_bytes"] == 0)
    assert here.tenant("a")["state"] == "parked"
    assert b.ask("work(0.1)").endswith("intact")
    here.call("resume", name="a")
    assert a.ask("work(0.1)").endswith("intact")


def test_a_parked_tenant_of_several_processes(node: Callable[..., Node]) -> None:
    """Also one that connects, and allocates, while the tenant is parked."""
    here = node(1600 * MIB)
    a = program(here, 1200 * MIB)
    second = here.joined("a")
    assert a.ask("take(100)") == second.ask("take(50)") == "0"
    a.tell("work(1)")
    second.tell("work(1)")
    here.call("park", name="a")
    third = here.joined("a")
    assert third.ask(ALLOCATE) == "0"
    assert here.where("a")["resident_bytes"] == 0
    third.tell("work(0.1)")
    here.call("resume", name="a")
    for each in (a, second, third):
        assert each.answer().endswith("intact")


def test_memory_that_is_allocated_during_a_move(node: Callable[..., Node]) -> None:
    """Nothing of it stays on the GPU while the tenant is parked."""
    here = node(1600 * MIB)
    a = program(here, 1500 * MIB)
    second = here.joined("a")
    assert a.ask("take(200)") == second.ask("take(200)") == "0"
    for each in (a, second):
        each.tell(f"max({ALLOCATE} or time.sleep(0.01) or 0 for _ in range(30))")
    for _ in range(3):
        here.call("park", name="a")
        assert here.where("a")["resident_bytes"] == 0
        here.call("resume", name="a")
    assert a.answer() == second.answer() == "0"
    for each in (a, second):
        assert each.ask("work(0.1)").endswith("intact")
    assert here.where("a")["resident_bytes"] == (2 * 200 + 2 * 30 * 8) * MIB


@pytest.mark.parametrize("order", ["park", "resume"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_is_killed_while_memory_moves(node: Callable[..., Node], order: str, killed: int) -> None:
    """The tenant's other process keeps its contents, and goes on."""
    here = node(1600 * MIB)
    both = [program(here, 1400 * MIB), here.joined("a")]
    assert [each.ask("take(400)") for each in both] == ["0", "0"]
    if order == "resume":
        here.call("park", name="a")
    with ThreadPoolExecutor() as pool:
        moving = pool.submit(here.call, order, name="a")
        wait_for(lambda: under_way(here, "a") or moving.done())
        both[killed].process.kill()
        both[killed].process.wait()
        assert moving.exception() is None
    if order == "park":
        assert here.where("a")["resident_bytes"] == 0
        here.call("resume", name="a")
    assert both[1 - killed].ask("work(0.1)").endswith("intact")
    assert here.where("a")["resident_bytes"] == 400 * MIB
    here.call("park", name="a")
    late = here.joined("a")
    here.call("resume", name="a")
    assert late.ask("take(400)") == "0"
    assert late.ask("work(0.1)").endswith("intact")


def test_a_stopped_process_is_not_parked_and_runs_later(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    a = program(here)
    assert a.ask("take(200)") == "0"
    assert a.ask("work(0.1)").endswith("intact")
    a.process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{a.process.pid}/task")
    wait_for(lambda: all(") T " in (task / "stat").read_text() for task in tasks.iterdir()), what="its stop")
    with pytest.raises(WorkError, match="did not end within"):
        here.call("park", name="a", timeout_s=0.2)
    assert here.tenant("a")["state"] == "running"
    a.process.send_signal(signal.SIGCONT)
    assert a.ask("work(0.1)").endswith("intact")
    here.call("park", name="a")
    here.call("resume", name="a")
    assert a.ask("work(0.1)").endswith("intact")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("slices", "none"), ("slices", "swap")),
        (("slices", "swap"), ("slices", "none")),
        (("slices", "swap"), ("time", "swap")),
    ],
)
def test_a_changed_file_does_not_change_how_a_running_program_shares(
    node: Callable[..., Node], before: tuple[str, str], after: tuple[str, str]
) -> None:
    """The program has begun with the former settings: its gate and its memory do not follow."""

    def row(mechanism: str, oversubscribe: str) -> dict[str, str]:
        return {"name": "a", "memory": f"{MEMORY}B", "mechanism": mechanism, "oversubscribe": oversubscribe}

    here = node(1024 * MIB, tenants=[row(*before)])
    a = here.joined("a")
    assert a.ask("take(200)") == "0"
    here.call("park", name="a")
    file = here.folder / "agent.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tenants": [row(*after)]}))
    fault = wait_for(lambda: here.call("status")["config_fault"], what="the changed file")
    assert "cannot be changed while programs of the tenant run" in fault
    shown = here.tenant("a")
    assert (shown["mechanism"], shown["oversubscribe"], shown["state"]) == (*before, "parked")
    here.call("resume", name="a")
    assert a.ask("work(0.1)").endswith("intact")


def test_a_changed_file_names_slices_that_the_driver_refuses(
    start_agent: Callable[..., AgentProcess], short_folder: Path
) -> None:
    """A tenant that runs has turns then, and so have one that does not run and one that the file newly names."""
    row = "- {name: %s, mechanism: slices, oversubscribe: swap, memory: 1MiB, limit: %s}\n"

    def declared(limit: float, *names: str) -> str:
        return declare(short_folder, "tenants:\n" + "".join(row % (name, limit) for name in names))

    agent = start_agent(config=declared(1.0, "runs", "rests"))
    with agent.client() as client, open("/dev/null", "rb") as odd:
        token = client.call("register", tenant={"name": "runs"}, join=True)["token"]
        shim = FakeShim(agent.folder, token)
        shim.attach(gpu_uuid(0))
        channel_group(shim, odd.fileno())
        shim.wait(MessageType.PAGE_UPDATE)
        declared(0.5, "runs", "rests", "new")
        wait_for(lambda: {row["name"] for row in agent.call("list")["tenants"]} == {"runs", "rests", "new"})
        assert agent.call("status")["config_fault"] == ""
        found = {row["name"]: (row["mechanism"], row["limit"]) for row in agent.call("list")["tenants"]}
        assert found == dict.fromkeys(("runs", "rests", "new"), ("time", 0.5))


def channel_group(shim: FakeShim, fd: int) -> None:
    """A channel group that this descriptor does not control."""
    values = {"client": 0xC1D00000, "device": 1, "subdevice": 2, "group": 3, "channel_count": 1, "compute": 1}
    data = wire.pack(MessageType.CHANNEL_GROUP, values | {"channels": bytes([4, 0, 0, 0])})
    socket.send_fds(shim.socket, [data], [fd])


def test_a_turn_without_end_ends_when_its_tenant_takes_turns(agent: AgentProcess) -> None:
    """The driver refuses the controls after a tenant that oversubscribes has begun to run."""
    with agent.client() as client, open("/dev/null", "rb") as odd:
        terms = {"mechanism": "slices", "oversubscribe": "swap", "memory_bytes": 1 << 20}
        shim = FakeShim(agent.folder, register(client, "first", **terms)["token"])
        slot = shim.attach(gpu_uuid(0))
        assert shim.page is not None
        page = shim.page.slots[slot]
        assert not page.flags & SlotFlag.UNGATED
        endless = shim.take(slot)["epoch"]
        assert page.epoch == endless
        channel_group(shim, odd.fileno())
        shim.wait(MessageType.PAGE_UPDATE)
        assert agent.tenant("first")["mechanism"] == "time"
        assert not page.flags & SlotFlag.UNFENCED
        assert page.epoch != endless
        shim.release(endless, slot, more=True)
        turn = shim.take(slot)["epoch"]
        assert turn > endless
        assert page.epoch == turn
        assert agent.tenant("first")["gpus"][0]["holding"]
