"""Best-effort programs divide the bound in flight with those that work, not with those that are only there."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_loop import VirtualLoop
from waiting import wait_for

from cotenant.abi.tenant_page import SlotLayout
from cotenant.agent.gate.client import join_floor
from cotenant.agent.gate.shares import Shares, slot_of
from cotenant.bench.colocation_rig import Rig
from cotenant.policy.colocation import APART, LOOK_NS, QUIET_NS, ColocationSettings

GPU = "GPU-00000000-0000-0000-0000-000000000001"


def test_the_slot_of_a_process_is_found_by_its_pid_and_gpu() -> None:
    pages = [SimpleNamespace(slots=[object(), object()]) for _ in range(2)]
    session = lambda pid, page: SimpleNamespace(  # noqa: E731
        peer=SimpleNamespace(pid=pid), closed=False, page=page, slots={0: "other", 1: GPU}
    )
    tenant: Any = SimpleNamespace(sessions=[session(7, pages[0]), session(8, pages[1])])
    assert slot_of(tenant, 8, GPU) is pages[1].slots[1]
    assert slot_of(tenant, 9, GPU) is None
    tenant.sessions.append(session(8, pages[0]))
    assert slot_of(tenant, 8, GPU) is None  # two processes of different containers may look the same to the agent


def looked(count: int, works: list[set[int]], blind: bool = False) -> list[list[int]]:
    """What the slots say after each look; `works`: who launched just before it."""
    slots = [SlotLayout() for _ in range(count)]
    now = [QUIET_NS * 10]
    seen = []

    async def run() -> None:
        shares = Shares(lambda: now[0])
        for i, slot in enumerate(slots):
            shares.join(i, lambda slot=slot, i=i: None if blind and i == 0 else slot)
        seen.append([slot.floor_parts for slot in slots])
        for busy in works:
            now[0] += QUIET_NS
            for i in busy:
                slots[i].floor_ns = now[0] - 1
            shares.look()
            seen.append([slot.floor_parts for slot in slots])
        shares.close()

    asyncio.run(run())
    return seen


def test_slots_say_who_divides() -> None:
    seen = looked(3, [{0}, {0}, {0, 2}, {0, 2}, {2}, {2}, set(), set()])
    assert seen == [
        [1, APART, APART],
        [1, APART, APART],
        [1, APART, APART],
        [2, APART, APART],
        [2, APART, 2],
        [APART, APART, 2],
        [APART, APART, 1],
        [APART, APART, 3],
        [3, 3, 3],
    ]


def test_looks_come_as_often_as_the_settings_of_now_say() -> None:
    """Work in flight of one look has ended by the next one; settings may have changed since somebody joined."""

    async def run() -> list[float]:
        loop, looks = asyncio.get_running_loop(), list[float]()
        shares = Shares(lambda: looks.append(loop.time()) or 0)
        shares.join(1, lambda: None)
        shares.join(2, lambda: None)
        shares.configure(ColocationSettings(in_flight_us=50_000))
        await asyncio.sleep(1.0)
        shares.close()
        return looks

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        first, second, third, *_ = runner.run(run())
    assert first == pytest.approx(LOOK_NS / 1e9), "due under the settings of before"
    assert (second - first, third - second) == (pytest.approx(0.2), pytest.approx(0.2))


def test_where_one_cannot_be_looked_at_all_divide() -> None:
    # 0: the process uses the number on the page, which counts all tenants
    assert looked(2, [set(), set()], blind=True)[-1] == [0, 2]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("soft", together=True) as started:
        started.scheme("tidal", heartbeat_timeout_ms=5_000)
        yield started


def test_an_idle_program_does_not_halve_the_bound_of_a_working_one(rig: Rig) -> None:
    floor = join_floor(rig.bench.folder, rig.uuid)
    programs = [rig.be(f"be{i}") for i in range(2)]
    for program in programs:
        program.wait_ready()
        program.ask("load mm2048", 60)

    def counted() -> int:
        return int(rig.scheme("tidal")["gpus"][rig.uuid]["best_effort_counted"])

    wait_for(lambda: counted() == 2, what="both are idle: either may begin with its half")
    programs[0].tell("run 600")
    wait_for(lambda: counted() == 1, what="one works")
    programs[1].tell("run 600")
    wait_for(lambda: counted() == 2, what="both work")
    programs[1].process.send_signal(signal.SIGSTOP)
    wait_for(lambda: counted() == 1, what="one works again")
    for program in programs:
        program.process.kill()
    floor.close()
    wait_for(lambda: rig.scheme("tidal")["gpus"][rig.uuid]["best_effort_processes"] == 0, what="all have gone")
    assert counted() == 0
