"""Best-effort work that is launched before its time, and waits for the floor on the device: real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.abi.floor import FloorRole, WorkClass
from cotenant.abi.protocol import FLOOR_SOCKET
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.gate import page as floor_page
from cotenant.agent.gate.client import Floor, _Mapping, join_floor
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program, with_source
from cotenant.devices.base import uuid_bytes

MS = 1_000_000
HEARTBEAT_MS = 60_000  # longer than any test
HOLDER = """
import sys, time
from pathlib import Path
from cotenant.agent.gate.client import join_floor
floor = join_floor(Path(sys.argv[1]), sys.argv[2])
print(time.monotonic_ns(), flush=True)
floor.raise_()
print("up", flush=True)
sys.stdin.read()
"""

LEAVER = """
import ctypes
import sys
from cotenant.bench.driver import Driver
cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
libc.__cxa_atexit.argtypes = [ctypes.c_void_p] * 3
libc.__cxa_atexit(ctypes.cast(cuda.cuCtxSynchronize, ctypes.c_void_p), None, None)
driver = Driver()
print("ready", driver.name, flush=True)
for count in (300, 100):
    for _ in range(count):
        driver.launch(26_000)
    if count == 300:
        driver.synchronise()
        print("{}", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def rig() -> Iterator[tuple[Rig, Program]]:
    with Rig("soft", together=True, settings={"fail": "open"}) as started:
        be = started.be(below=True).wait_ready()
        be.ask("load mm2048", 60)
        started.scheme("tidal", run_ahead="always")  # for every program
        # while no LS process has joined, no launch is limited and nothing is learned
        floor = join_floor(started.bench.folder, started.uuid)
        be.ask("run 0.1")
        floor.close()
        yield started, be


def done_by(block: dict[str, Any], at_ns: int) -> int:
    """Units that had ended by then."""
    return max((count for at, count, _ in block["marks"] if at < at_ns), default=0)


def held(be: Program, floor: Floor, order: str, seconds: float) -> tuple[dict[str, Any], int]:
    """What BE answers to an order that it gets while the floor is up, for so long, and when that fell."""
    floor.raise_()
    be.tell(order)
    time.sleep(seconds)
    down = time.monotonic_ns()
    floor.lower()
    return be.answer(), down


def test_a_best_effort_process_may_write_the_second_page_alone(rig: tuple[Rig, Program]) -> None:
    _, be = rig
    maps = Path(f"/proc/{be.process.pid}/maps").read_text().splitlines()
    pages = {line.split("memfd:")[1].split()[0]: line.split()[1] for line in maps if "memfd:cotenant-floor" in line}
    assert pages == {"cotenant-floor": "r--s", "cotenant-floor-words": "rw-s"}


def test_what_is_launched_while_the_floor_is_up_runs_when_it_falls(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=HEARTBEAT_MS)
    floor = join_floor(started.bench.folder, started.uuid)
    be.ask("run 0.1")
    for seconds in (0.25, 2.0, 10.0):  # on a busy machine the program may get its processor late
        answer, down = held(be, floor, f"times {seconds + 0.05}", seconds)
        ahead = len([at for at in answer["times_ns"] if at < down])
        if ahead > 0:
            break
    assert 0 < ahead < 1000, "20 ms of 26 us each, and no more"
    block, down = held(be, floor, "run 0.3", 0.25)
    assert done_by(block, down) == 0
    assert block["count"] > 0
    floor.close()


def test_either_of_two_services_holds_it(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=HEARTBEAT_MS)
    # more floors than one 64-bit word of the page holds
    floors = [join_floor(started.bench.folder, started.uuid) for _ in range(6)]
    for number in (0, 5):
        be.ask("run 0.05")
        answer, down = held(be, floors[number], "run 0.2", 0.15)
        assert done_by(answer, down) == 0, number
    for floor in floors:
        floor.close()


def test_a_silent_holder_is_not_waited_for_for_ever(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=100)
    floor = join_floor(started.bench.folder, started.uuid)
    floor.raise_()
    assert be.ask("run 0.3")["count"] > 0
    assert floor.mapping.raised[floor.mapping.holder] == WorkClass.UNKNOWN, "not the best-effort process's to lower"
    floor.close()


def test_words_that_belong_to_nobody_hold_nothing_for_long(rig: tuple[Rig, Program]) -> None:
    """Any best-effort process can write there."""
    started, be = rig
    floor = join_floor(started.bench.folder, started.uuid)
    be.ask("run 0.1")
    words = floor.mapping.words.raised
    words[1] = words[0] = 7
    assert be.ask("run 0.3")["count"] > 0
    floor.close()


def test_a_service_that_is_killed_while_the_agent_is_dead_lets_go(rig: tuple[Rig, Program]) -> None:
    """Nobody is left who could lower for it but the process that waits."""
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=1_000)
    command = [sys.executable, "-c", HOLDER, str(started.bench.folder), started.uuid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        believed_until = int(holder.stdout.readline()) + 1_000 * MS
        assert holder.stdout.readline() == "up\n"
        be.tell("run 0.5")
        time.sleep(0.1)
        assert started.bench.agent is not None
        started.bench.agent.kill()
        started.bench.agent.wait()
        holder.kill()
        killed = time.monotonic_ns()
    block = be.answer()
    assert done_by(block, min(killed, believed_until)) == 0
    assert block["count"] > 0


def test_the_service_holds_it_again_where_it_was_not_believed_for_a_while(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=100)
    floor = join_floor(started.bench.folder, started.uuid)
    floor.raise_()
    be.ask("run 0.2")
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=HEARTBEAT_MS)
    answer, down = held(be, floor, "run 0.2", 0.15)
    assert done_by(answer, down) == 0
    floor.close()


def test_who_raises_the_page_of_an_agent_that_was_started_again_holds_nobody_for_ever(rig: tuple[Rig, Program]) -> None:
    """A service may come to the new page after those who wait, and leave the old one as it was: up."""
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=HEARTBEAT_MS)
    floor = join_floor(started.bench.folder, started.uuid)
    be.ask("run 0.1")
    old = floor.mapping
    floor.raise_()
    be.tell("run 0.5")
    time.sleep(0.1)
    agent = started.bench.agent
    assert agent is not None
    agent.kill()
    agent.wait()
    started.bench.agent = subprocess.Popen(
        agent.args, stderr=started.bench.log, stdout=started.bench.log, env=with_source(started.bench.environment)
    )
    wait_for(lambda: floor.mapping is not old, what="the service has moved")
    floor.lower()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        old.show(old.holder, WorkClass.UNKNOWN)
    assert be.answer()["count"] > 0
    floor.close()


def test_a_service_that_streams_cannot_see_is_waited_for_by_the_host(rig: tuple[Rig, Program]) -> None:
    """One of an older version: it writes the first page alone."""
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=HEARTBEAT_MS)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(started.bench.folder / FLOOR_SOCKET))
    connection.send(floor_page.pack_join(uuid_bytes(started.uuid), FloorRole.LATENCY_SENSITIVE))
    reply, fds, *_ = socket.recv_fds(connection, 512, 2)
    holder = floor_page.holder_of(reply)
    assert holder is not None
    assert not floor_page.words_follow(reply)
    old = _Mapping(connection, list(fds), holder)
    be.ask("run 0.05")
    old.raise_(WorkClass.UNKNOWN)
    be.tell("times 0.3")
    time.sleep(0.2)
    down = time.monotonic_ns()
    old.lower()
    assert len([at for at in be.answer()["times_ns"] if at < down]) < 3
    connection.close()


def test_what_is_not_launched_before_its_time_is_bounded_by_the_host(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", run_ahead="never", heartbeat_timeout_ms=HEARTBEAT_MS)
    floor = join_floor(started.bench.folder, started.uuid)
    be.ask("run 0.1")
    answer, down = held(be, floor, "times 0.2", 0.15)
    assert len([at for at in answer["times_ns"] if at < down]) < 3
    floor.close()


@pytest.mark.timed
@pytest.mark.parametrize(("load", "ahead"), [("train-resnet50", True), ("mm4096", False)])
def test_who_needs_it_runs_ahead_and_who_does_not_is_bounded_by_the_host(
    rig: tuple[Rig, Program], load: str, ahead: bool
) -> None:
    """A step of 700 kernels of 18 us whose host takes 26 us for each, and products of 0.2 ms in a row."""
    started, be = rig
    started.scheme("tidal", heartbeat_timeout_ms=HEARTBEAT_MS)
    be.ask(f"load {load}", 60)
    floor = join_floor(started.bench.folder, started.uuid)
    be.ask("run 2.3")  # what ran before had two seconds
    answer, down = held(be, floor, "times 0.7", 0.6)
    launched = len([at for at in answer["times_ns"] if at < down])
    assert launched == (1 if ahead else 0)
    floor.close()


def test_a_program_ends_while_its_work_is_held(rig: tuple[Rig, Program]) -> None:
    started, be = rig
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=HEARTBEAT_MS)
    floor = join_floor(started.bench.folder, started.uuid)
    floor.raise_()
    be.tell("run 1")
    time.sleep(0.1)
    be.process.kill()
    be.process.wait()
    wait_for(
        lambda: started.scheme("tidal")["gpus"][started.uuid]["best_effort_processes"] == 0, what="the floor knows"
    )
    floor.close()


def test_a_program_whose_exit_handlers_wait_for_held_work_ends(
    rig: tuple[Rig, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler runs after the shim's, and the service hangs."""
    started, be = rig
    be.close()  # this program would lower the gate in place of the one that leaves
    (tmp_path / "leaver.py").write_text(LEAVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    started.bench.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    started.scheme("tidal", run_ahead="always", heartbeat_timeout_ms=300)
    floor = join_floor(started.bench.folder, started.uuid)
    spec = TenantSpec("leaver", mechanism="mps", best_effort=True)
    leaver = started.tenant(spec, ["leaver"]).wait_ready()
    leaver.answer()
    began = time.monotonic()
    floor.raise_()
    leaver.tell("go")
    assert leaver.process.wait(60) == 0
    assert time.monotonic() - began > 0.2, "its work was held"
    floor.close()
