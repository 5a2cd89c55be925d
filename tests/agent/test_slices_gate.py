"""Best-effort programs beside a service under time slices: launches that are held back, kernels that are preempted."""

from __future__ import annotations

import json
import shutil
import time

import pytest
from test_slices import Node, node
from waiting import wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.policy.shares.slices import BRIEF_US, TINY_US

__all__ = ["node"]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


# Launches kernels of a length in ns, and answers each line with the slices of its process.
LOOPS = """
import os, sys, threading
from cotenant.bench.driver import Driver
from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup
from cotenant.softgpu.controls import SoftIoctl
cuda, length = Driver(), int(sys.argv[1])
cuda.launch(length); cuda.synchronise()
controls = ChannelControls("software", SoftIoctl())
fd = os.open(os.environ["COTENANT_SOFTGPU_STATE"], os.O_RDWR)
def answer():
    for line in sys.stdin:
        found = []
        for client in range(3):
            group = ChannelGroup(0xc1d00000 | client, 0, 0, 0x5c000000 | client << 4, ())
            try: found.append(controls.slice_us(fd, group))
            except WorkError: pass
        print(found, flush=True)
    os._exit(0)
threading.Thread(target=answer, daemon=True).start()
print("ready loops", flush=True)
while True:
    cuda.launch(length); cuda.synchronise()
"""


def test_a_service_preempts_long_kernels_and_waits_for_short_ones(node: Node) -> None:
    node.service(20, 1)
    (node.folder / "loops.py").write_text(LOOPS)
    programs = {}
    for name, kernel_ns in (("short", 50_000), ("long", 5_000_000)):
        spec = TenantSpec(name, mechanism="slices", best_effort=True)
        programs[name] = node.tenant(name, spec, program=["loops", str(kernel_ns)])
        programs[name].wait_ready()

    def slices(name: str) -> list[int]:
        pipe, answers = programs[name].process.stdin, programs[name].process.stdout
        assert pipe is not None
        assert answers is not None
        pipe.write("\n")
        pipe.flush()
        return list(json.loads(answers.readline()))

    wait_for(lambda: BRIEF_US in slices("short"))  # each program sees the groups of all
    for _ in range(10):
        assert TINY_US in slices("long")
        time.sleep(0.1)


def test_between_two_requests_that_follow_each_other_no_best_effort_work_starts(node: Node) -> None:
    """One that waited for the other is launched within some microseconds, and would else wait for a foreign kernel."""
    service = node.service(0, 1)
    uuid = node.clients[0].call("status")["gpus"][0]["uuid"]

    def raises() -> int:
        return sum(holder["raises"] for holder in node.clients[0].call("colocation")["gpus"][uuid]["holders"])

    before = raises()
    assert service.process.stdin is not None
    assert service.process.stdout is not None
    service.process.stdin.write("100\n")
    service.process.stdin.flush()
    service.process.stdout.readline()
    assert 1 <= raises() - before <= 50  # a loaded machine may pause the service between two
