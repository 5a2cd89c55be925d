"""Faults while memory moves: whoever dies, and whenever, contents survive or the program gets an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_harness import saved, state_cannot_be_written
from heard import heard
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import WITHIN_S, stays, wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.parked import Parked, ParkedTable
from cotenant.agent.memory.parking import Parking
from cotenant.agent.memory.whole import WholeProcesses
from cotenant.agent.processes import key_of
from cotenant.agent.tenants.host_memory import host_memory
from cotenant.agent.tenants.launcher import Launch, register
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.base import Gpu, uuid_bytes

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def driver(here: Node, *orders: dict[str, Any]) -> list[dict[str, Any]]:
    """Orders to the software GPU's checkpoint, past the agent."""
    from cotenant.native.libraries import SOFT_DRIVER, library_path

    done = subprocess.run(
        [sys.executable, "-m", "cotenant.devices.checkpoint", str(library_path(SOFT_DRIVER))],
        env=here.environment,
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def restart(here: Node) -> None:
    here.agent.kill()
    here.agent.wait()
    here.start()


@pytest.mark.parametrize("way", ["out", "in"])
def test_agent_killed_in_the_middle_of_a_move(node: Callable[..., Node], way: str) -> None:
    here = node(1024 * MIB)
    program = here.program("a", memory=700 * MIB)
    assert program.ask("take(400)") == "0"
    wait_for(lambda: saved(here.folder, "a").get("processes"), what="it is written down")
    if way == "in":
        here.call("exchange", out=["a"])

    # connected before the agent is killed, so that the order cannot reach the next agent
    with ControlClient(here.folder, timeout_s=60) as client:

        def move() -> None:
            with contextlib.suppress(WorkError, OSError):
                client.call("exchange", **{way: ["a"]})

        mover = threading.Thread(target=move)
        mover.start()
        time.sleep(0.02)
        restart(here)
        mover.join(WITHIN_S)
    assert program.ask("check()") == "intact"
    wait_for(lambda: here.where("a")["resident_bytes"] == 400 * MIB, what="its return")


@pytest.mark.slow
def test_agent_killed_right_after_it_parked_and_right_after_it_resumed(node: Callable[..., Node]) -> None:
    here = node(2048 * MIB)
    whole, swapped = here.program("a", "none"), here.program("b", "swap")
    plain = Program(here, "plain", None)
    names = ("a", "b", f"pid:{plain.process.pid}")
    programs = (whole, swapped, plain)
    assert [program.ask("take(96)") for program in programs] == ["0"] * 3
    for name in names:
        here.call("park", name=name)
    restart(here)
    assert {row["name"] for row in here.call("parked")["parked"]} == set(names)
    wait_for(lambda: len(here.tenant("b")["pids"]) == 1, what="the return of b")
    for name in names:
        here.call("resume", name=name)
    restart(here)
    assert here.call("parked")["parked"] == []
    assert [program.ask("check()") for program in programs] == ["intact"] * 3


@pytest.mark.parametrize("until", ["lock", "checkpoint"])
def test_agent_killed_while_it_parked(node: Callable[..., Node], until: str) -> None:
    """It wrote down what it was about to do: locked only, the program runs again; checkpointed, it is parked."""
    here = node(1024 * MIB)
    program = here.program("a", "none")
    assert program.ask("take(96)") == "0"
    key = key_of(program.process.pid)
    wait_for(lambda: saved(here.folder, "a").get("processes"), what="it is written down")
    here.agent.kill()
    here.agent.wait()
    steps = ["lock", "checkpoint"][: 1 if until == "lock" else 2]
    assert [a["code"] for a in driver(here, *({"op": op, "pid": key.pid} for op in steps))] == [0] * len(steps)
    state = here.folder / "state.json"
    rows = json.loads(state.read_text())
    uuid = rows["tenants"][0]["spec"]["gpus"] or []
    rows["parked"] = [Parked("a", "checkpoint", tuple(uuid), 96 * MIB + CONTEXT, (key,), by_order=True).as_dict()]
    state.write_text(json.dumps(rows))
    here.start()
    program.tell("check()")
    if until == "checkpoint":
        stays(lambda: [row["name"] for row in here.call("parked")["parked"]] == ["a"])
        here.call("resume", name="a")
    assert program.answer() == "intact"
    assert here.call("parked")["parked"] == []
    assert program.ask("work(0.2)").endswith("intact")


def test_a_map_of_gpus_names_all_of_them(node: Callable[..., Node]) -> None:
    """As drivers want it; a wrong map is refused and harms nothing."""
    here = node(1024 * MIB, count=3)
    first, second, third = (gpu["uuid"] for gpu in here.call("status")["gpus"])
    program = here.program("a", "none", gpus=(first,))
    assert program.ask("take(96)") == "0"
    pid = program.process.pid
    onto = [uuid_bytes(first).hex(), uuid_bytes(third).hex()]
    orders: list[dict[str, Any]] = [{"op": "lock", "pid": pid}, {"op": "checkpoint", "pid": pid}]
    orders += [{"op": "restore", "pid": pid, "onto": onto, "map": named} for named in ("one GPU", "two GPUs")]
    orders += [{"op": "restore", "pid": pid, "onto": [onto[0], "00" * 16], "map": "all GPUs"}]
    orders += [{"op": "state", "pid": pid}, {"op": "restore", "pid": pid, "onto": onto, "map": "all GPUs"}]
    orders += [{"op": "unlock", "pid": pid}]
    answers = driver(here, *orders)
    assert [answer["code"] for answer in answers] == [0, 0, 1, 1, 1, 0, 0, 0]
    assert answers[5]["state"] == "checkpointed"
    assert program.ask("check()") == "intact"
    assert second not in (first, third)


class Driver:
    """A driver that accepts one kind of map."""

    def __init__(self, accepts: str, state: str = "checkpointed") -> None:
        self.accepts, self.state, self.asked = accepts, state, list[str]()

    async def order(self, op: str, pid: int = 0, **more: Any) -> dict[str, Any]:
        from cotenant.devices.checkpoint import CheckpointError

        if op == "state":
            return {"state": self.state}
        if op == "restore":
            self.asked.append(more["map"])
            if more["map"] != self.accepts:
                raise CheckpointError("restore: no (code 1)", 1)
            self.state = "locked"
        if op == "unlock":
            self.state = "running"
        return {}


def moved_with(driver: Driver) -> list[str]:
    whole = WholeProcesses((Gpu("GPU-1", "Test GPU", 8 << 30, 0, kind="soft"),), Ledger())
    whole.checkpointer = driver  # type: ignore[assignment]
    uuids = [f"GPU-0000000{n}-0000-0000-0000-000000000000" for n in (1, 2)]
    parked = Parked("a", "checkpoint", (uuids[0],), 0, (key_of(os.getpid()),))
    with heard() as said:
        asyncio.run(whole.restore(parked, uuids[1]))
    return said


def test_other_maps_are_tried_where_the_driver_wants_another() -> None:
    alone = Driver("one GPU")
    (said,) = moved_with(alone)
    assert alone.asked == ["all GPUs", "two GPUs", "one GPU"]
    assert alone.state == "running"
    assert "was restored with a GPU map that lists one GPU" in said
    everything = Driver("all GPUs")
    assert moved_with(everything) == []
    assert everything.asked == ["all GPUs"]
    with pytest.raises(WorkError, match="all GPUs: restore: no"):
        moved_with(Driver("none"))


def test_what_would_stop_the_agent_itself_is_not_parked(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    program = here.program("a", "none")
    here.call("park", name="a")
    here.call("resume", name="a")
    children = Path(f"/proc/{here.agent.pid}/task/{here.agent.pid}/children").read_text().split()
    assert children  # the helper process that calls the driver
    for pid in (1, os.getpid(), here.agent.pid, *children):
        with pytest.raises(InputError, match="its ancestor, which could not be resumed if parked"):
            here.call("park", name=f"pid:{pid}")
    assert program.ask("work(0.1)").endswith("intact")


def test_a_plain_program_says_what_it_gave_back(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    plain = Program(here, "plain", None)
    assert plain.ask("take(200)") == "0"
    name = f"pid:{plain.process.pid}"
    assert here.call("park", name=name)["freed_bytes"] == 200 * MIB + CONTEXT
    assert [row["name"] for row in here.call("list")["parked"]] == [name]
    here.call("resume", name=name)
    assert here.call("list")["parked"] == []
    assert plain.ask("check()") == "intact"


def test_killed_while_parked(node: Callable[..., Node]) -> None:
    """Whole or by its own moves: its name and its memory are free again."""
    here = node(1024 * MIB)
    for mode in ("swap", "none"):
        program = here.program("a", mode)
        assert program.ask("take(200)") == "0"
        here.call("park", name="a")
        program.process.send_signal(signal.SIGKILL)
        wait_for(lambda: here.call("list")["tenants"] == [], what="its end")
        assert here.call("parked")["parked"] == []


def test_killed_while_it_is_parked_is_said(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    program = here.program("a", memory=700 * MIB)
    assert program.ask("take(400)") == "0"
    program.process.send_signal(signal.SIGSTOP)  # so that the move has not ended when the process is killed

    def under_way() -> bool:
        with pytest.raises((InputError, WorkError)) as refused:
            here.call("resume", name="a")
        return "is not parked" not in str(refused.value)

    def kill_it_on_its_way() -> None:
        wait_for(under_way)
        program.process.kill()

    killer = threading.Thread(target=kill_it_on_its_way)
    killer.start()
    with pytest.raises(WorkError, match=r"ended while it was being parked|could not be moved"):
        here.call("park", name="a")
    killer.join()
    wait_for(lambda: here.call("list")["tenants"] == [], what="its end")


@pytest.mark.parametrize("moment", ["before the move", "during the move"])
def test_a_tenant_that_is_removed_while_it_is_parked_is_said(moment: str) -> None:
    """A tenant whose last process is killed is removed within milliseconds."""
    tenant = Tenant(TenantSpec("a", oversubscribe="swap"), (Gpu("GPU-1", "", 1 << 30, 0),), "", 0, Enforcement())
    tenants, occupants, parked = {"a": tenant}, {"a": SimpleNamespace(resident_bytes=MIB)}, ParkedTable()

    async def ended(when: str) -> bool:
        if moment == when:
            tenants.clear()
            occupants.clear()
        return True

    no: Any = SimpleNamespace()
    checkpoints: Any = SimpleNamespace(settled=lambda name: ended(""), still=lambda *_: ended("before the move"))
    residency: Any = SimpleNamespace(
        evacuate=lambda *_: ended("during the move"), while_busy=lambda _tenant, attempt, _until_s: attempt()
    )
    residents: Any = SimpleNamespace(
        refresh=lambda gpu: SimpleNamespace(occupants=occupants), all_reported=lambda _: asyncio.sleep(0),
        here_bytes=lambda *_: 0,
    )
    registry: Any = SimpleNamespace(tenants=tenants)
    broker: Any = SimpleNamespace(unsuspend=lambda tenant: None)
    parking = Parking(checkpoints, parked, residency, residents, no, registry, broker, no, no)
    with pytest.raises(WorkError, match="a ended while it was being parked"):
        asyncio.run(parking.park("a"))
    assert parked.rows == {}


def test_nothing_is_checkpointed_that_could_be_forgotten(node: Callable[..., Node]) -> None:
    """The state file cannot be written: a restart would leave the program stopped for ever."""
    here = node(1024 * MIB)
    program = here.program("a", "none")
    assert program.ask("take(64)") == "0"
    state_cannot_be_written(here.folder)
    with pytest.raises(WorkError, match="cannot save its state"):
        here.call("park", name="a")
    assert program.ask("work(0.1)").endswith("intact")
    (here.folder / "state.new").rmdir()
    here.call("park", name="a")
    here.call("resume", name="a")
    assert program.ask("check()") == "intact"


def test_more_host_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"exceeds the .* of this machine"):
        host_memory(1 << 50)
    assert host_memory(1 << 20).budget_bytes == 1 << 20


def test_managed_memory_that_is_away_is_free_for_others(node: Callable[..., Node]) -> None:
    here = node(2 * CONTEXT + 320 * MIB)
    one, two = here.program("a", "managed"), Program(here, "plain", None)
    assert one.ask("take(200)") == "0"
    here.call("exchange", out=["a"])
    here.call("exchange", **{"in": ["a"]})
    assert two.ask("take(160)") == "2"  # only 320 - 200 MiB are left
    assert two.ask("give()") == "0"
    here.call("park", name="a")
    assert two.ask("take(240)") == "0"
    assert two.ask("give()") == "0"
    here.call("resume", name="a")
    assert one.ask("check()") == "intact"


def test_what_a_parked_tenant_allocates_comes_when_it_is_resumed(node: Callable[..., Node]) -> None:
    """Also if it had nothing before, and although the card has room: it was freed for somebody else."""
    here = node(1024 * MIB)
    program = here.program("a")
    here.call("park", name="a")
    program.tell("take(64)")
    wait_for(lambda: here.where("a")["movable_bytes"] == 8 * MIB, what="its first block, which waits for contents")
    assert here.where("a")["resident_bytes"] == 0
    here.call("resume", name="a")
    assert program.answer() == "0"
    assert program.ask("check()") == "intact"
    assert here.where("a")["resident_bytes"] == 64 * MIB


@pytest.mark.slow
def test_who_made_way_for_others_comes_back_under_a_new_agent(node: Callable[..., Node]) -> None:
    """Whole processes in turns, and the agent dies while one of them is away: it cannot ask for its turn itself."""
    here = node(CONTEXT + 400 * MIB)
    one = here.program("a", "park")
    assert one.ask("take(200)") == "0"
    two = here.program("b", "park")  # the new program's context makes `a` leave the GPU
    assert two.ask("take(200)") == "0"
    one.tell("check()")
    two.tell("check()")
    wait_for(lambda: len(here.call("parked")["parked"]) == 1, what="one of them to make way")
    restart(here)
    assert one.answer() == two.answer() == "intact"


def test_who_made_way_for_others_stays_away_when_told_to(node: Callable[..., Node]) -> None:
    here = node(CONTEXT + 400 * MIB)
    one = here.program("a", "park")
    assert one.ask("take(200)") == "0"
    two = here.program("b", "park")
    assert two.ask("take(200)") == "0"
    assert [row["by_order"] for row in here.call("parked")["parked"]] == [False]
    assert here.call("park", name="a")["by_order"]
    one.tell("check()")
    assert two.ask("work(0.3)").endswith("intact")
    assert here.tenant("a")["state"] == "parked"
    here.call("resume", name="a")
    assert one.answer() == "intact"


def test_parked_before_it_uses_its_gpu(node: Callable[..., Node]) -> None:
    """Its program has not come to that yet; it waits at its first use."""
    here = node(1024 * MIB)
    client = ControlClient(here.folder)
    here.clients.append(client)
    spec = TenantSpec("a", memory_bytes=520 * MIB, oversubscribe="swap")
    register(client, Launch(here.folder, spec, ["a"]))
    assert here.call("park", name="a")["freed_bytes"] == 0
    program = Program(here, "a", TenantSpec("a"), join=True)
    program.tell("take(64)")
    wait_for(lambda: here.where("a")["movable_bytes"] == 8 * MIB, what="its first block")
    here.call("resume", name="a")
    assert program.answer() == "0"
    assert program.ask("check()") == "intact"
