"""Somebody dies or hangs beside the others: whoever is left goes on within a second. The steps are the card's."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.abi.protocol import FLOOR_SOCKET
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.gate.client import join_floor
from cotenant.bench.colocation_rig import Rig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))

import colocation_faults as steps

WITHIN_MS = 1000.0


@pytest.fixture(autouse=True)
def software_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "GPU", "soft")
    monkeypatch.setattr(steps, "TOGETHER", False)


def test_ls_is_killed_while_it_holds_the_floor() -> None:
    # A busy machine may keep the holder from its heartbeat for longer than the default timeout of it. With a longer one
    # it is the agent, which sees the holder's end, that lets best-effort work go on.
    found = steps.ls_killed(heartbeat_timeout_ms=60_000)
    assert found["launches_while_held"] == 0
    assert 0 <= found["be_goes_on_after_ms"] < 60_000


@pytest.mark.parametrize("kind", ["best_effort", "latency_sensitive"])
def test_who_could_not_join_the_floor_at_first_is_on_it_a_little_later(kind: str) -> None:
    """The agent was too busy to answer: the program says so, works meanwhile, and tries again."""
    with Rig("soft", together=False) as rig:
        there, away = rig.bench.folder / FLOOR_SOCKET, rig.bench.folder / "away"
        there.rename(away)
        spec = TenantSpec("late", mechanism="time", **{kind: True})  # type: ignore[arg-type]
        program = rig.tenant(spec, ["cotenant.bench.be_loads", "driver"]).wait_ready()
        program.ask("load mm2048", 60)
        wait_for(lambda: [w for w in rig.tenants()["late"]["warnings"] if "could not be joined" in str(w)])
        away.rename(there)

        def on_it() -> int:
            floor = rig.scheme("tidal")["gpus"][rig.uuid]
            return int(floor["best_effort_processes"]) + len(floor["holders"])

        wait_for(lambda: on_it() == 1, what="it has joined")
        if kind == "latency_sensitive":
            return
        # On a busy machine the agent would find that the program needs run-ahead, and the program would launch kernels
        # that wait on the device.
        rig.scheme("tidal", run_ahead="never", heartbeat_timeout_ms=60_000)
        floor = join_floor(rig.bench.folder, rig.uuid)
        floor.raise_()
        program.tell("times 0.3")
        time.sleep(0.3)
        down = time.monotonic_ns()
        floor.lower()
        assert len([at for at in program.answer()["times_ns"] if at < down]) < 3
        floor.close()


@pytest.mark.timed
def test_be_is_killed_or_stopped_inside_a_kernel() -> None:
    for how, seen in steps.be_killed().items():
        assert seen["ls_requests"] > 150, how
        assert seen["ls_max_ms"] < WITHIN_MS, how


@pytest.mark.timed
def test_the_agent_is_killed_and_comes_back() -> None:
    """Both sides go on without it (fail open), and are on the floor of the next one."""
    found: dict[str, Any] = steps.agent_restarted()
    assert found["ls_max_ms"] < WITHIN_MS
    assert found["be_longest_gap_ms"] < WITHIN_MS
    (floor,) = found["floor"].values()
    assert floor["best_effort_processes"] == 1
    assert len(floor["holders"]) == 1
    assert floor["holders"][0]["raises"] > 0
