"""Best-effort work is held to what the card's clock allows."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heard import heard
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_for

from cotenant.agent.config.colocation import parse_colocation
from cotenant.agent.gate.client import join_floor
from cotenant.agent.gate.floor import CLOCK_S, Floors
from cotenant.agent.ipc.client import ControlClient
from cotenant.bench.colocation_rig import Rig
from cotenant.core.errors import InputError
from cotenant.devices.nvidia import Nvidia
from cotenant.policy.colocation import ColocationSettings, next_duty, settings_for

GPU = "GPU-00000000-0000-0000-0000-000000000001"


class Card:
    """An H200 beside products: 0.856 of its clock at full duty, 0.45 points more for each that is left idle, late."""

    def __init__(self, duty: Callable[[], float], power: float = 1.0) -> None:
        self.duty, self.power = duty, power
        self.now = 1.0
        self.broken = False

    def part(self) -> float:
        if self.broken:
            raise OSError("nvmlDeviceGetClockInfo: 15")
        settled = 1.0 - self.power * (0.144 - 0.45 * (1.0 - self.duty()))
        self.now += (min(1.0, settled) - self.now) / 2  # the clock rate moves half of the way in one look
        return self.now


class Low:
    """A card whose clock stays low, whatever is done."""

    def part(self) -> float:
        return 0.5


def look_at_clock(floors: Floors) -> None:
    """Read the clock and follow it, as the event loop does with a thread between."""
    if floors._clocks.get(GPU) is not None or GPU not in floors._clocks:
        floors._follow(GPU, floors.pages[GPU], *floors._read(GPU, floors._clocks.get(GPU)))


def looked(
    settings: ColocationSettings, looks: int, power: float = 1.0, breaks_at: int = -1
) -> tuple[list[float], list[str]]:
    """Duty after each look, with BE and LS there; what was said."""
    seen: list[float] = []

    async def run() -> None:
        card: list[Card] = []

        def clock_of(gpu: str) -> Card:
            assert gpu == GPU
            card.append(Card(lambda: floors.pages[GPU].layout.duty_cycle_permille / 1000, power))
            return card[0]

        floors = Floors(Path("nowhere"), [GPU], settings, lambda pid: None, clock_of=clock_of)
        floors.pages[GPU].layout.tenants = 1
        for look in range(looks):
            if card:
                card[0].broken = look == breaks_at
            look_at_clock(floors)
            seen.append(floors.pages[GPU].layout.duty_cycle_permille / 1000)
        floors.close()

    with heard() as said:
        asyncio.run(run())
    return seen, said


def test_the_duty_settles_where_the_clock_is_what_is_asked_for() -> None:
    seen, said = looked(ColocationSettings(duty_cycle=0.5, clock=0.92), looks=round(3.0 / CLOCK_S))
    settled = 1.0 - (0.92 - 0.856) / 0.45
    assert seen[round(0.5 / CLOCK_S)] == pytest.approx(settled, abs=0.05)
    assert seen[-1] == pytest.approx(settled, abs=0.01)
    assert said == []


def test_what_is_written_again_each_second_is_the_duty_of_now() -> None:
    async def run() -> float:
        settings = ColocationSettings(duty_cycle=0.5, clock=0.95)
        floors = Floors(Path("nowhere"), [GPU], settings, lambda pid: None, clock_of=lambda gpu: Low())
        for _ in range(20):
            look_at_clock(floors)
        floors.mend()
        duty = floors.pages[GPU].layout.duty_cycle_permille / 1000
        floors.close()
        return duty

    assert asyncio.run(run()) == 0.5


@pytest.mark.parametrize("first_goes_first", [True, False])
def test_whatever_order_servers_go_in_the_agents_own_scheme_is_back(first_goes_first: bool) -> None:
    async def run() -> list[str]:
        floors = Floors(Path("nowhere"), [GPU], settings_for("tidal"), lambda pid: None)
        ends = [floors.lend(settings_for(name)) for name in ("static", "orion")]
        seen = [floors.settings.scheme]
        for end in ends if first_goes_first else ends[::-1]:
            end()
            seen.append(floors.settings.scheme)
        floors.close()
        return seen

    assert asyncio.run(run()) == ["orion", "orion" if first_goes_first else "static", "tidal"]


def test_what_is_set_for_good_outlives_who_had_others_before() -> None:
    async def run() -> str:
        floors = Floors(Path("nowhere"), [GPU], settings_for("tidal"), lambda pid: None)
        end = floors.lend(settings_for("static"))
        floors.configure(settings_for("temporal"))
        end()
        floors.close()
        return floors.settings.scheme

    assert asyncio.run(run()) == "temporal"


def test_looks_that_differ_do_not_move_what_it_settles_at() -> None:
    draw = random.Random(5)
    duty, clocks = 1.0, []
    for look in range(2000):
        clock = 1.0 - (0.144 - 0.45 * (1.0 - duty))
        duty = next_duty(duty, clock + draw.gauss(0, 0.015), 0.92, 0.5)
        clocks += [clock] if look > 50 else []
    assert statistics.fmean(clocks) == pytest.approx(0.92, abs=0.003)


def test_it_is_never_below_what_best_effort_work_keeps() -> None:
    seen, _ = looked(ColocationSettings(duty_cycle=0.95, clock=0.99), looks=60)
    assert min(seen) == seen[-1] == 0.95


def test_where_the_clock_is_up_nothing_is_held() -> None:
    seen, _ = looked(ColocationSettings(duty_cycle=0.5, clock=0.92), looks=60, power=0.2)
    assert set(seen) == {1.0}


def test_a_clock_that_cannot_be_read_any_more_holds_nothing_and_is_told_once() -> None:
    seen, said = looked(ColocationSettings(duty_cycle=0.5, clock=0.92), looks=60, breaks_at=40)
    assert seen[39] < 0.9
    assert set(seen[40:]) == {1.0}
    assert len(said) == 1


def test_a_clock_that_was_never_there_is_told_once() -> None:

    async def run() -> None:
        settings = ColocationSettings(duty_cycle=0.5, clock=0.92)
        floors = Floors(Path("nowhere"), [GPU], settings, lambda pid: None, clock_of=lambda gpu: None)
        for _ in range(3):
            look_at_clock(floors)
        assert floors.status()["gpus"][GPU]["duty_cycle"] == 1.0
        floors.close()

    with heard() as said:
        asyncio.run(run())
    assert len(said) == 1


def test_a_duty_without_a_clock_is_in_force_at_once() -> None:
    assert ColocationSettings(duty_cycle=0.8).rule().duty_cycle_permille == 800
    assert ColocationSettings(duty_cycle=0.8, clock=0.9).rule().duty_cycle_permille == 1000


@given(st.floats(0.1, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 1))
def test_the_next_duty_is_within_its_ends_and_on_the_right_side(
    duty: float, clock: float, wanted: float, least: float
) -> None:
    duty = max(duty, least)
    after = next_duty(duty, clock, wanted, least)
    assert least <= after <= 1
    assert after >= duty if clock >= wanted else after <= duty


def test_settings_are_read_and_refused() -> None:
    found = parse_colocation({"scheme": "tidal", "duty_cycle": "80%", "clock": "93%"})
    assert (found.duty_cycle, found.clock) == (0.8, 0.93)
    for bad in ({"clock": 1.5, "duty_cycle": 0.5}, {"clock": 0.9}):
        with pytest.raises(InputError):
            ColocationSettings(**bad)


def test_a_gpu_that_is_none_has_no_clock() -> None:
    assert Nvidia().card("GPU-none") is None


def standing(rig: Rig) -> dict[str, Any]:
    with ControlClient(rig.bench.folder) as client:
        return dict(client.call("colocation"))


@pytest.mark.timed
def test_an_agent_holds_best_effort_work_where_its_card_says_that_the_clock_is_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card whose clock stays at half of its highest: BE comes down to its least duty, and up without."""
    monkeypatch.setenv("COTENANT_SOFTGPU_CLOCK", "50")
    with Rig("soft", together=False) as rig:
        floor = join_floor(rig.bench.folder, rig.uuid)
        be = rig.be().wait_ready()
        be.ask("load mm4096", 60)
        counts = {}
        for name, changes in (("held", {"duty_cycle": 0.5, "clock": 0.95}), ("free", {})):
            rig.scheme("tidal", **changes)
            be.ask("run 0.6", 60)
            duty = standing(rig)["gpus"][rig.uuid]["duty_cycle"]
            assert duty == (0.5 if changes else 1.0)
            counts[name] = be.ask("run 0.5", 60)["count"]
        floor.close()
    assert counts["held"] < 0.75 * counts["free"]


def test_an_agent_lowers_the_duty_on_a_card_with_a_low_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_SOFTGPU_CLOCK", "50")
    with Rig("soft", together=False) as rig:
        floor = join_floor(rig.bench.folder, rig.uuid)
        be = rig.be().wait_ready()
        be.ask("load mm4096", 60)
        for changes, duty in (({"duty_cycle": 0.5, "clock": 0.95}, 0.5), ({}, 1.0)):
            rig.scheme("tidal", **changes)
            wait_for(lambda: standing(rig)["gpus"][rig.uuid]["duty_cycle"] == duty)  # noqa: B023
            assert be.ask("run 0.1", 60)["count"] > 0
        floor.close()
