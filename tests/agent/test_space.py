"""Room for what is about to be taken: contexts, programs that are parked whole, cards on which others hold memory."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swap_node import CONTEXT, MIB, Node, Program, nodes_in

from cotenant.agent.config.files import AgentConfig, InForce, TenantSpec
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.parked import Parked, ParkedTable
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.residents import Residents
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.hold import PausedTurn
from cotenant.devices.base import Gpu

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


@pytest.mark.parametrize("mode", ["swap", "park"])
def test_a_third_tenant_can_start_on_a_full_card(node: Callable[..., Node], mode: str) -> None:
    """Its context has to be there at once: the others make way, though they run."""
    here = node(3 * CONTEXT + 200 * MIB, swap_memory=4096 * MIB)
    first = [here.program(name, mode, 700 * MIB) for name in ("a", "b")]
    # 200 of the 456 MiB that two contexts leave must stay free for a third program, whose context takes 256
    assert [program.ask("take(200)") for program in first] == ["0", "0"]
    for program in first:
        program.tell("work(1)")
    third = here.program("c", mode, 700 * MIB)
    assert third.ask("take(96)") == "0"
    assert third.ask("check()") == "intact"
    assert all(program.answer().endswith("intact") for program in first)


def test_a_program_that_is_parked_whole_parks_others_for_its_memory(node: Callable[..., Node]) -> None:
    here = node(2 * CONTEXT + 500 * MIB, swap_memory=4096 * MIB)
    one, two = (here.program(name, "park", 900 * MIB) for name in ("a", "b"))
    assert one.ask("take(200)") == "0"
    assert two.ask("take(200)") == "0"
    assert one.ask("take(320)") == "0"  # refused, because 520 + 200 MiB exceed the 500 MiB that two contexts leave
    assert here.tenant("a")["gpus"][0]["memory_used_bytes"] == 520 * MIB + CONTEXT
    assert two.ask("check()") == "intact"
    assert one.ask("check()") == "intact"


def test_memory_held_by_a_stranger_is_found_out(node: Callable[..., Node]) -> None:
    """An unknown program holds a third of the card, far over what a first guess allows for: tenants share the rest,
    and what the stranger gives back is used again."""
    here = node(2 * CONTEXT + 1024 * MIB, context_reserve=CONTEXT)
    stranger = Program(here, "stranger", None)
    assert stranger.ask("take(256)") == "0"  # 512 MiB with the context of this program
    programs = [here.program(name, "swap", 700 * MIB) for name in ("a", "b")]
    # two contexts leave 512 MiB
    assert [program.ask("take(304)") for program in programs] == ["0", "0"]
    for program in programs:
        program.tell("work(0.8)")
    assert all(program.answer().endswith("intact") for program in programs)
    # each program makes the other one leave the GPU
    assert [program.ask("check()") for program in programs * 2] == ["intact"] * 4
    assert min(here.where(name)["moves_in"] for name in ("a", "b")) > 0
    stranger.process.kill()
    stranger.process.wait()
    assert programs[0].ask("take(128)") == "0"
    assert [program.ask("check()") for program in programs] == ["intact", "intact"]


def test_a_tenant_that_makes_room_gets_no_turn_meanwhile(node: Callable[..., Node], short_folder: Path) -> None:
    """It would hand it back at once and ask again: thousands of turns, and a move that starves."""
    here = node(2 * CONTEXT + 320 * MIB)
    one, two = (here.program(name) for name in ("a", "b"))
    assert one.ask("take(240)") == "0"
    one.tell("work(2)")
    assert two.ask("take(240)") == "0"
    two.tell("work(1)")
    assert one.answer().endswith("intact")
    assert two.answer().endswith("intact")
    for name in ("a", "b"):
        row = here.tenant(name)
        assert row["gpus"][0]["turns"] < 100 + 100 * row["age_s"], "turns are of 20 ms and more"


def test_what_several_ask_for_at_once_is_waited_for(node: Callable[..., Node]) -> None:
    """Three grow at the same time: what each has asked for and not taken stands in the way for a moment only."""
    here = node(3 * CONTEXT + 520 * MIB, swap_memory=4096 * MIB)
    programs = [here.program(name, "swap", 700 * MIB) for name in ("a", "b", "c")]
    answers: list[str] = []

    def grow(program: Program) -> None:
        answers.append(program.ask("take(360, 120)"))
        answers.append(program.ask("check()"))

    threads = [threading.Thread(target=grow, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == ["0", "0", "0", "intact", "intact", "intact"], (answers, here.said())


class Turns:
    """As much of the broker as a switch looks at: a turn of `a` that waits for its memory."""

    def __init__(self) -> None:
        self.turns = SimpleNamespace(line=lambda gpu, now_ns: [])
        self.paused: asyncio.Queue[Any] = asyncio.Queue()
        self.floors: list[int] = []

    def holds(self, tenant: object, gpu: str) -> bool:
        return False

    def waits(self, paused: PausedTurn) -> bool:
        return paused.epoch == 7

    def resume_turn(self, paused: PausedTurn, floor_ns: int) -> None:
        self.floors.append(floor_ns)


def test_time_in_which_others_moved_makes_no_turn_longer() -> None:
    """A turn pays for its own move of 30 ms, not for the second in which somebody else moved before."""
    took_s = 0.03
    gpu = Gpu("g", "GPU", 1024 * MIB, 0, kind="soft")
    tenants = {
        name: Tenant(TenantSpec(name, oversubscribe="park"), (gpu,), "", 0, Enforcement()) for name in ("a", "b")
    }
    registry: Any = SimpleNamespace(
        gpus={"g": gpu}, tenants=tenants, on_gpu=lambda uuid: list(tenants.values()), takes_turns=lambda tenant: True
    )
    parked = ParkedTable()
    for name in tenants:  # together they need more than the card has
        parked.rows[name] = Parked(name, "checkpoint", ("g",), 800 * MIB)
    in_force = InForce(AgentConfig(most_moving=0.25))

    class Driver:
        async def bring(self, tenant: Tenant) -> None:
            await asyncio.sleep(took_s)
            del parked.rows[tenant.name]

    async def run() -> tuple[list[int], int]:
        turns: Any = Turns()
        residents = Residents(registry, Ledger(), parked, in_force)
        residents.last_move_ns["g"] = 10**12
        residents.refresh("g")
        made: Any = (residents, registry, Ledger(), parked, turns, Driver(), in_force, lambda: None)
        running = asyncio.create_task(Residency(*made).run())
        for epoch in (7, 6):  # the turn of the second epoch has been taken back, so nothing is done for it
            turns.paused.put_nowait(PausedTurn(tenants["a"], "g", epoch))
        while not turns.floors:
            await asyncio.sleep(0.01)
        running.cancel()
        return turns.floors, residents.last_move_ns["g"]

    floors, moved_ns = asyncio.run(run())
    assert took_s * 1e9 <= moved_ns < 10**12
    assert floors == [pytest.approx(moved_ns * 3, abs=1)]  # moved_ns x (1 - 0.25) / 0.25


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swap", "park", "managed"])
def test_a_context_that_nobody_reckoned_with_finds_room(node: Callable[..., Node], mode: str) -> None:
    """Nothing is reserved for contexts, so the sums say that all fits; the driver says that it does not."""
    here = node(3 * CONTEXT + 200 * MIB, swap_memory=4096 * MIB, context_reserve=0)
    first = [here.program(name, mode, 700 * MIB) for name in ("a", "b")]
    assert [program.ask("take(200)") for program in first] == ["0", "0"]
    assert [program.ask("work(0.1)").split()[1] for program in first] == ["intact", "intact"]
    third = here.program("c", mode, 700 * MIB)
    assert third.ask("take(48)") == "0"
    assert [program.ask("check()") for program in (third, *first)] == ["intact"] * 3


def test_what_a_program_parked_whole_takes_is_refused_by_the_driver_first(node: Callable[..., Node]) -> None:
    """Nothing is reserved for contexts, and two of them take half of the card."""
    here = node(2 * CONTEXT + 500 * MIB, swap_memory=4096 * MIB, context_reserve=0)
    one, two = (here.program(name, "park", 900 * MIB) for name in ("a", "b"))
    assert one.ask("take(320)") == "0"
    assert two.ask("take(520)") == "0"
    assert [row["name"] for row in here.call("parked")["parked"]] == ["a"]
    assert one.ask("check()") == "intact"
    assert two.ask("check()") == "intact"
