"""The floor: its page against the header, who may join, and an unmodified best-effort program that keeps off it."""

from __future__ import annotations

import math
import mmap
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess
from waiting import wait_for

from cotenant.abi.floor import FLOOR_BYTES, FLOOR_HOLDERS, FLOOR_MAGIC, FloorRole, WorkClass
from cotenant.abi.protocol import FLOOR_SOCKET
from cotenant.agent.config.colocation import parse_colocation
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.config.schema import load
from cotenant.agent.gate import page as floor_page
from cotenant.agent.gate.client import join_floor
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.core.errors import InputError
from cotenant.devices.base import uuid_bytes

HEARTBEAT_MS = 60_000  # longer than any test

# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(start_agent: Any) -> AgentProcess:
    started: AgentProcess = start_agent()
    return started


def uuid_of(agent: AgentProcess) -> str:
    return str(agent.call("status")["gpus"][0]["uuid"])


def ask(agent: AgentProcess, message: bytes) -> tuple[bytes, list[int]]:
    """What the floor's socket answers, with descriptors; b"" when it hangs up."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(str(agent.folder / FLOOR_SOCKET))
    connection.send(message)
    reply, fds, *_ = socket.recv_fds(connection, 512, 2)
    connection.close()
    return reply, list(fds)


def test_only_ls_gets_a_writable_page_and_its_size_is_sealed(agent: AgentProcess) -> None:
    reply, fds = ask(agent, floor_page.pack_join(uuid_bytes(uuid_of(agent)), FloorRole.LATENCY_SENSITIVE))
    assert floor_page.holder_of(reply) == 0
    mmap.mmap(fds[0], FLOOR_BYTES).close()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fds[0], 0)
    os.close(fds[0])


@pytest.mark.parametrize("what", ["stranger", "unknown gpu", "unknown role", "short", "other message"])
def test_who_may_not_join_is_hung_up_on(agent: AgentProcess, what: str) -> None:
    uuid = uuid_bytes(uuid_of(agent))
    good = floor_page.pack_join(uuid, FloorRole.LATENCY_SENSITIVE)
    message = {
        "stranger": floor_page.pack_join(uuid, FloorRole.BEST_EFFORT),  # not a tenant of this agent
        "unknown gpu": floor_page.pack_join(bytes(16), FloorRole.LATENCY_SENSITIVE),
        "unknown role": floor_page.pack_join(uuid, 9),
        "short": good[:100],
        "other message": good[:6] + b"\x01\x00" + good[8:],
    }[what]
    assert ask(agent, message) == (b"", [])
    assert agent.call("status")["gpus"]  # the agent still works


def test_holders_are_told_apart_and_a_place_is_given_again(agent: AgentProcess) -> None:
    uuid = uuid_of(agent)
    agent.call("colocation", heartbeat_timeout_ms=HEARTBEAT_MS)
    first, second = join_floor(agent.folder, uuid), join_floor(agent.folder, uuid)
    first.raise_()
    holders = agent.call("colocation")["gpus"][uuid]["holders"]
    assert [h["up"] for h in holders] == [True, False]
    assert all(h["pid"] == os.getpid() for h in holders)
    first.close()
    wait_for(lambda: len(agent.call("colocation")["gpus"][uuid]["holders"]) == 1)
    third = join_floor(agent.folder, uuid)
    assert len(agent.call("colocation")["gpus"][uuid]["holders"]) == 2
    second.close()
    third.close()


def test_work_that_is_on_its_way_raises_the_floor_for_who_will_do_it(agent: AgentProcess) -> None:
    uuid = uuid_of(agent)
    agent.call("colocation", heartbeat_timeout_ms=HEARTBEAT_MS)
    sender = join_floor(agent.folder, uuid)
    code = "import sys; from pathlib import Path; from cotenant.agent.gate.client import join_floor\n"
    code += (
        "floor = join_floor(Path(sys.argv[1]), sys.argv[2]); print(flush=True); sys.stdin.readline(); floor.lower()\n"
    )
    code += "print(flush=True); sys.stdin.readline()"
    command = [sys.executable, "-c", code, str(agent.folder), uuid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.readline()
        assert not sender.raise_for(os.getppid()), "nobody on the floor"
        for how in ("work", "dies"):
            assert sender.raise_for(worker.pid, WorkClass.MEMORY)
            assert list(sender.mapping.raised)[:3] == [0, WorkClass.MEMORY, 0]
            assert sender.others_up()
            if how == "work":
                worker.stdin.write("\n")
                worker.stdin.flush()
                worker.stdout.readline()
                assert not sender.others_up(), "who has done the work lowers"
        assert [h["raises"] for h in agent.call("colocation")["gpus"][uuid]["holders"]] == [0, 0]
        worker.kill()
    wait_for(lambda: not sender.others_up(), what="what the dead would have done is lowered")
    assert not sender.raise_for(worker.pid)
    sender.close()


def test_the_page_is_full_after_64_holders(agent: AgentProcess) -> None:
    uuid = uuid_of(agent)
    floors = [join_floor(agent.folder, uuid) for _ in range(FLOOR_HOLDERS)]
    with pytest.raises(Exception, match="did not let this process join the LS gate"):
        join_floor(agent.folder, uuid)
    for floor in floors:
        floor.close()


def test_a_page_that_was_written_over_is_mended(agent: AgentProcess) -> None:
    """An LS process may write there; noise from one must neither shut others out nor hold the floor for ever."""
    uuid = uuid_of(agent)
    floor, other = join_floor(agent.folder, uuid), join_floor(agent.folder, uuid)
    noise = random.Random(5)
    floor.mapping.memory[:] = bytes(noise.getrandbits(8) for _ in range(FLOOR_BYTES))
    wait_for(lambda: floor.mapping.layout.magic == FLOOR_MAGIC, what="the agent writes its part again")
    wait_for(lambda: "the agent restored them" in (agent.folder / "agent.log").read_text(), what="and says so")
    third = join_floor(agent.folder, uuid)
    state = agent.call("colocation")["gpus"][uuid]
    assert state["bounded"]
    assert len(state["holders"]) == 3
    assert sum(bool(up) for up in floor.mapping.raised[2:]) == 0
    assert not third.others_up(), "signs of life from the far future are none"
    for each in (floor, other, third):
        each.close()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_scheme_is_set_and_brings_its_own_times(agent: AgentProcess) -> None:
    assert agent.call("colocation")["scheme"] == "tidal"
    assert agent.call("colocation", scheme="orion")["in_flight_us"] == 160
    assert agent.call("colocation", scheme="tidal", in_flight_us=50)["in_flight_us"] == 50
    for wrong in (
        {"scheme": "best"},
        {"in_flight_us": 0},
        {"in_flight_us": "x"},
        {"overlap": 2.0},
        {"in_flight_us": math.inf},
        {"heartbeat_timeout_ms": math.nan},
        {"sm_threshold": 1.5},
        {"intervall_ns": 60_000},
    ):
        with pytest.raises(InputError):
            agent.call("colocation", **wrong)
    assert agent.call("colocation")["in_flight_us"] == 50


def test_whole_numbers_may_be_written_as_others_are(agent: AgentProcess) -> None:
    """What the page cannot hold must not stay in the settings: it would keep all later ones out."""
    found = agent.call("colocation", in_flight_us=2e2, sm_threshold=3.0)
    assert (found["in_flight_us"], found["sm_threshold"]) == (200, 3)
    assert agent.call("colocation", scheme="orion")["scheme"] == "orion"


def test_settings_are_read_from_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(
        "colocation: {scheme: tidal, in_flight_us: 200, overlap: 5%, heartbeat_timeout_ms: 1000, run_ahead: never}\n"
    )
    found = load(str(path)).colocation
    assert (found.in_flight_us, found.overlap, found.heartbeat_timeout_ms) == (200, 0.05, 1000)
    assert found.run_ahead == "never"
    assert parse_colocation("static").scheme == "static"
    path.write_text("tenants: [{name: a, best_effort: true, in_flight_us: 400}]\n")
    assert load(str(path)).tenants[0].in_flight_us == 400
    path.write_text("tenants: [{name: a, in_flight_us: 400}]\n")
    with pytest.raises(InputError, match="only to best-effort tenants"):
        load(str(path))
    path.write_text("tenants: [{name: a, in_flight_us: 2000000}]\n")
    with pytest.raises(InputError, match="between 1 and 1000000 us"):
        load(str(path))
    for wrong, why in (
        ("in_flight_uss: 200", "did you mean in_flight_us"),
        ("in_flight_us: 200us", "'200us' is not a whole number"),
    ):
        path.write_text(f"colocation: {{{wrong}}}\n")
        with pytest.raises(InputError, match=why):
            load(str(path))


# -- an unmodified program ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Rig, Program]]:
    with Rig("soft", together=False) as started:
        be = started.be().wait_ready()
        be.ask("load mm2048", 60)
        yield started, be


def test_it_does_not_launch_while_the_floor_is_up(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", run_ahead="never", heartbeat_timeout_ms=HEARTBEAT_MS)
    floor = join_floor(started.bench.folder, started.uuid)
    assert be.ask("run 0.1")["count"] > 0
    floor.raise_()
    be.tell("times 0.5")
    time.sleep(0.2)
    down = time.monotonic_ns()
    floor.lower()
    times = be.answer()["times_ns"]
    floor.close()
    assert times
    assert not [at for at in times if at < down]


def test_a_silent_holder_is_not_waited_for_for_ever(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", heartbeat_timeout_ms=100)
    floor = join_floor(started.bench.folder, started.uuid)
    floor.raise_()
    assert be.ask("run 0.3")["count"] > 0
    floor.raise_()
    # a time in the future, which makes no sense
    floor.mapping.raised_ns[floor.mapping.holder] = time.monotonic_ns() + 10**15
    assert be.ask("run 0.3")["count"] > 0
    floor.close()


def test_schemes_without_a_gate_do_not_wait(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("mps-plus", heartbeat_timeout_ms=HEARTBEAT_MS)
    floor = join_floor(started.bench.folder, started.uuid)
    floor.raise_()
    begun = time.monotonic_ns()
    over = begun + (HEARTBEAT_MS - 1_000) * 1_000_000
    be.tell("times 0.2")
    assert any(begun < at < over for at in be.answer()["times_ns"]), "it launched while it was up"
    floor.close()
    started.scheme("tidal")


@pytest.mark.timed
def test_an_unmodified_latency_sensitive_program_holds_the_floor_while_it_works(rig: tuple[Rig, Program]) -> None:
    """The program under the shim launches and waits; BE is let in between its bursts, and only there."""
    started, be = rig
    started.scheme("tidal", heartbeat_timeout_ms=HEARTBEAT_MS)
    spec = TenantSpec("ls", mechanism="time", latency_sensitive=True)
    ls = started.tenant(spec, ["cotenant.bench.be_loads", started.bench.backend]).wait_ready()
    ls.ask("load mm16384", 60)  # kernels of 13 ms, so that a host that is late for a moment leaves no gap on the GPU

    def up() -> bool:
        return any(h["up"] for h in started.scheme("tidal")["gpus"][started.uuid]["holders"])

    wait_for(lambda: not up(), what="the floor falls when nothing is left")
    ls.tell("run 0.6")
    time.sleep(0.2)
    assert up()
    be.tell("times 0.6")
    block = ls.answer()
    times = be.answer()["times_ns"]
    wait_for(lambda: not up(), what="the floor falls at the end")
    inside = [at for at in times if at < block["end_ns"] - 50_000_000]
    after = [at for at in times if at > block["end_ns"]]
    assert len(inside) < 5
    assert len(after) > 20
    ls.close()


def soonest_20(times: list[int]) -> float:
    """Least time in which 20 launches went, of the first 170, in ns; infinite if a busy machine let fewer go."""
    return min((last - first for first, last in zip(times[:150], times[20:170], strict=False)), default=math.inf)


def test_a_tenant_may_have_more_in_flight_than_the_scheme_says(rig: tuple[Rig, Program]) -> None:
    """What fits is launched at once, instead of one after the other."""
    started, _ = rig
    started.scheme("tidal", heartbeat_timeout_ms=HEARTBEAT_MS)
    deep = TenantSpec("deep", mechanism="time", best_effort=True, in_flight_us=5_000)
    be = started.tenant(deep, ["cotenant.bench.be_loads", started.bench.backend]).wait_ready()
    floor = join_floor(started.bench.folder, started.uuid)  # an LS process has joined the gate
    be.ask("load mm2048", 60)
    # The kernels take 25 us. At the start, 200 of them fit into 5 ms. Within the scheme's 100 us, each 20 of them would
    # take at least 400 us. A busy machine takes longer for many of them, but not for all.
    wait_for(lambda: soonest_20(be.ask("times 0.05")["times_ns"]) < 300_000)
    floor.close()
    be.close()


def test_where_nobody_is_latency_sensitive_nothing_is_bounded(rig: tuple[Rig, Program]) -> None:
    """The bound costs work and protects nobody; it is there once somebody joins, and for a while after a start."""
    started, be = rig
    started.scheme("tidal", heartbeat_timeout_ms=HEARTBEAT_MS)

    def bounded() -> bool:
        return bool(started.scheme("tidal")["gpus"][started.uuid]["bounded"])

    def waited_after(order: str) -> float:
        """All of the waits so far, and some or all of those of the order: a program publishes them now and then."""
        before = started.tenants()["be"]["launches"]
        be.ask(order)
        wait_for(lambda: started.tenants()["be"]["launches"] > before, what="it has published them")
        return float(started.tenants()["be"]["gate_wait_s"])

    wait_for(lambda: not bounded(), what="nobody has joined")
    waited = waited_after("times 0.1")
    assert waited_after("times 0.3") < waited + 0.05
    floor = join_floor(started.bench.folder, started.uuid)
    assert bounded()

    def waits_for_those_in_flight() -> bool:
        be.ask("times 0.3")
        return bool(started.tenants()["be"]["gate_wait_s"] > waited + 0.1)

    wait_for(waits_for_those_in_flight)
    floor.close()
    wait_for(lambda: not bounded(), what="the last one has left")


def test_who_is_held_off_is_told(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", heartbeat_timeout_ms=HEARTBEAT_MS)

    def standing() -> str:
        return str(started.tenants()["be"]["gpus"][0]["floor"])

    floor = join_floor(started.bench.folder, started.uuid)
    assert standing() == ""
    with floor.held():
        assert standing() == "held off"
        started.scheme("mps-plus")
        assert standing() == "", "nothing is held off under this scheme"
        started.scheme("tidal")
    assert standing() == ""
    floor.close()
    assert be.ask("run 0.05")["count"] > 0


def test_the_agent_counts_best_effort_processes_and_their_waits(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    floor = join_floor(started.bench.folder, started.uuid)
    # launches must wait on the host, since waits on the GPU are not counted
    state = started.scheme("tidal", run_ahead="never", heartbeat_timeout_ms=HEARTBEAT_MS)["gpus"][started.uuid]
    assert be.ask("run 0.05")["count"] > 0
    before_s = started.tenants()["be"]["gate_wait_s"]

    def has_waited() -> bool:
        """A wait counts once it has ended; only then is it known whether the program launched under the flag."""
        with floor.held():
            be.begin(0.05)
            assert started.tenants()["be"]["gpus"][0]["floor"] == "held off"
        assert be.result()["count"] > 0
        return bool(started.tenants()["be"]["gate_wait_s"] > before_s)

    wait_for(has_waited)
    floor.close()
    assert state["best_effort_processes"] == 1
    assert not started.tenants()["be"]["warnings"]
