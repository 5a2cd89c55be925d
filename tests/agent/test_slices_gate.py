"""Best-effort programs beside a service under time slices: launches that are held back, kernels that are preempted."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from test_slices import Node, node
from waiting import wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.slices.enforcer import LONG_KERNEL_AGO_NS
from cotenant.bench.harness import Program
from cotenant.policy.shares.slice_settings import BRIEF_US, TINY_US

__all__ = ["node"]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


# Launches kernels of the given length in ns. Answers each line with the time slices of all channel groups, or a line
# "pause" with the longest time in s that may have passed between two launches. A line "set" sets the slices first.
LOOPS = """
import os, sys, threading, time
from cotenant.bench.driver import Driver
from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup
from cotenant.softgpu.controls import SoftIoctl
cuda, length = Driver(), int(sys.argv[1])
begun, longest = time.monotonic(), 0.0
cuda.launch(length); cuda.synchronise()
controls = ChannelControls("software", SoftIoctl())
fd = os.open(os.environ["COTENANT_SOFTGPU_STATE"], os.O_RDWR)
def answer():
    for line in sys.stdin:
        if line == "pause\\n":
            since = begun
            print(max(time.monotonic() - since, longest), flush=True)
            continue
        found = []
        for client in range(3):
            group = ChannelGroup(0xc1d00000 | client, 0, 0, 0x5c000000 | client << 4, ())
            try:
                if line == "set\\n": controls.set_slice(fd, group, 40000)
                found.append(controls.slice_us(fd, group))
            except WorkError: pass
        print(found, flush=True)
    os._exit(0)
threading.Thread(target=answer, daemon=True).start()
print("ready loops", flush=True)
while True:
    now = time.monotonic()
    cuda.launch(length)
    longest, begun = max(longest, time.monotonic() - begun), now
    cuda.synchronise()
"""

# Launches as many kernels of 1 ms, one after the other, as a line says. Answers with the number of those that were
# launched LINGER_NS or more after the end of the one before, as far as its own clock tells.
FOLLOWING = """
import sys, time
from cotenant.bench.driver import Driver
cuda, length, linger = Driver(), 1_000_000, int(sys.argv[1])
cuda.launch(length); cuda.synchronise()
print("ready following", flush=True)
for line in sys.stdin:
    late, before = 0, time.monotonic_ns()
    for number in range(int(line)):
        begin = time.monotonic_ns()
        cuda.launch(length)
        late += number > 0 and time.monotonic_ns() - before >= length + linger
        before = begin
        cuda.synchronise()
    print(late, flush=True)
"""
LINGER_NS = 60_000  # native/shim/floor/holder.c


def loops(node: Node, name: str, kernel_ns: int) -> Program:
    (node.folder / "loops.py").write_text(LOOPS)
    spec = TenantSpec(name, mechanism="slices", best_effort=True)
    program = node.tenant(name, spec, program=["loops", str(kernel_ns)])
    program.wait_ready()
    return program


def slices(program: Program, order: str = "") -> list[int]:
    return list(program.ask(order, None))


def test_a_service_preempts_long_kernels_and_waits_for_short_ones(node: Node) -> None:
    node.service(20, 1)
    programs = {name: loops(node, name, kernel_ns) for name, kernel_ns in (("short", 50_000), ("long", 5_000_000))}
    # each program sees the channel groups of all programs; the agent hears of a new one a moment after it works
    wait_for(lambda: {BRIEF_US, TINY_US} <= set(slices(programs["short"])))
    for _ in range(10):
        tiny = TINY_US in slices(programs["long"])
        # a program that the machine holds up for so long has launched no long kernel lately
        assert tiny or programs["long"].ask("pause", None) > LONG_KERNEL_AGO_NS / 1e9
        time.sleep(0.1)


def test_between_two_requests_that_follow_each_other_no_best_effort_work_starts(node: Node) -> None:
    """One that waited for the other is launched within some microseconds, and would else wait for a foreign kernel."""
    (node.folder / "following.py").write_text(FOLLOWING)
    spec = TenantSpec("service", mechanism="slices", latency_sensitive=True)
    service = node.tenant("service", spec, program=["following", str(LINGER_NS)]).wait_ready()
    uuid = node.clients[0].call("status")["gpus"][0]["uuid"]

    def flag() -> dict[str, Any]:
        (holder,) = node.clients[0].call("colocation")["gpus"][uuid]["holders"]
        return dict(holder)

    wait_for(lambda: not flag()["up"])
    before = flag()["raises"]
    late = int(service.ask("300", None))  # type: ignore[call-overload]
    # a flag that is cleared at once is set for each of the 300; a loaded machine may pause the service between some
    assert 1 <= flag()["raises"] - before <= 1 + late


def test_a_slice_that_changes_once_is_restored_without_a_warning(node: Node) -> None:
    """libcuda sets the slice of a new group itself, after the shim has reported it."""
    program = loops(node, "loops", 50_000)
    assert node.agent is not None
    state = Path(f"/proc/{node.agent.pid}/stat")
    node.agent.send_signal(signal.SIGSTOP)  # otherwise it may restore the slice before the program has read it
    wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    assert set(slices(program, "set")) == {40_000}
    node.agent.send_signal(signal.SIGCONT)
    wait_for(lambda: 40_000 not in slices(program))
    assert node.warnings("loops") == []
