"""Tenants under the hardware's time slices on the software GPU: shares, limits, services, faults, and tampering."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess, gpu_uuid
from fake_shim import FakeShim, register
from waiting import wait_for

from cotenant.abi.protocol import MessageType, Status
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc import wire
from cotenant.bench.harness import Bench, Program, with_source
from cotenant.core.errors import InputError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")

KERNEL_NS = 20_000_000  # ns; long kernels, so that a queue outlasts the delays of a test machine's scheduler
# Serves one LS request of one kernel after each pause, and prints how long each took, in ms.
# Arguments: pause and length of the kernel, in ms.
SERVICE = """
import sys, time
from cotenant.bench.driver import Driver
cuda = Driver()
pause, kernel_ns = float(sys.argv[1]) / 1e3, int(float(sys.argv[2]) * 1e6)
cuda.launch(kernel_ns); cuda.synchronise()
print("ready service", flush=True)
for line in sys.stdin:
    times = []
    for _ in range(int(line)):
        time.sleep(pause)
        begin = time.monotonic(); cuda.launch(kernel_ns); cuda.synchronise()
        times.append((time.monotonic() - begin) * 1e3)
    print(sorted(times), flush=True)
"""


# Two ranks on two GPUs. Each launches some kernels, then a short one and a wait in the stream for the peer's, as a
# collective does.
GANG = """
import ctypes as C, mmap, os, sys, time
from cotenant.bench.driver import SOFT_IMAGE
steps, base = int(sys.argv[1]), mmap.mmap(-1, 4096)
def rank(number):
    cu, P, V = C.CDLL("libcuda.so.1"), C.c_void_p, C.c_uint64
    def ck(code):
        if code: os._exit(3)
    address = C.addressof(C.c_char.from_buffer(base))
    context, module, kernel, stream, device, seen = P(), P(), P(), P(), C.c_int(), V()
    ck(cu.cuInit(0)); ck(cu.cuDeviceGet(C.byref(device), number))
    ck(cu.cuDevicePrimaryCtxRetain(C.byref(context), device)); ck(cu.cuCtxSetCurrent(context))
    ck(cu.cuModuleLoadData(C.byref(module), SOFT_IMAGE)); ck(cu.cuModuleGetFunction(C.byref(kernel), module, b"timed"))
    ck(cu.cuStreamCreate(C.byref(stream), 1)); ck(cu.cuMemHostRegister_v2(P(address), C.c_size_t(4096), 2))
    ck(cu.cuMemHostGetDevicePointer_v2(C.byref(seen), P(address), 0))
    lengths = [(P * 1)(C.cast(C.pointer(C.c_uint64(ns)), P)) for ns in (3000000, 200000)]
    for step in range(1, steps + 1):
        for length in [lengths[0]] * 4 + [lengths[1]]:
            ck(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, length, None))
        ck(cu.cuStreamWriteValue32_v2(stream, V(seen.value + 64 * number), step, 0))
        ck(cu.cuStreamWaitValue32_v2(stream, V(seen.value + 64 * (1 - number)), step, 0))
        ck(cu.cuStreamSynchronize(stream))
    os._exit(0)
pids = []
for number in (0, 1):
    pids.append(os.fork())
    if pids[-1] == 0: rank(number)
print("ready gang", flush=True)
sys.exit(sum(os.waitpid(pid, 0)[1] for pid in pids) != 0)
"""


class Node(Bench):
    """A benchmark's agent, whose tenants are under slices."""

    def start(self, name: str, arguments: Any, environment: Any, core: int | None = None) -> Program:
        """Programs of a test lie in its folder."""
        return super().start(name, arguments, dict(environment) | {"PYTHONPATH": str(self.folder)}, core)

    def add(self, name: str, kind: str = "busy", **promise: Any) -> Program:
        workload = self.tenant(kind, TenantSpec(name, mechanism="slices", **promise))
        workload.wait_ready()
        return workload

    def service(self, pause_ms: float, kernel_ms: float, name: str = "service") -> Program:
        path = self.folder / "service.py"
        path.write_text(SERVICE)
        spec = TenantSpec(name, mechanism="slices", latency_sensitive=True)
        program = ["service", str(pause_ms), str(kernel_ms)]
        workload = self.tenant("service", spec, program=program)
        workload.wait_ready()
        return workload

    def gang(self, name: str, steps: int, **promise: Any) -> Program:
        (self.folder / "gang.py").write_text(GANG)
        spec = TenantSpec(name, mechanism="slices", gpu_count=2, **promise)
        workload = self.tenant("gang", spec, program=["gang", str(steps)])
        workload.wait_ready()
        return workload

    def kill_programs(self) -> None:
        for workload in self.programs:
            workload.process.kill()

    def got(self) -> dict[str, float | None]:
        return {row["name"]: row["gpus"][0]["got"] for row in self.tenants()}

    def warnings(self, name: str) -> list[str]:
        return next((row["warnings"] for row in self.tenants() if row["name"] == name), [])

    def said(self) -> str:
        return (self.folder / "agent.log").read_text()

    def restart(self) -> None:
        command = [sys.executable, "-m", "cotenant.agent", "--dir", str(self.folder), "--gpus", self.gpus]
        self.agent = subprocess.Popen(
            [*command, "--config", str(self.folder / "agent.json")],
            stderr=self.log, stdout=self.log, env=with_source(self.environment), start_new_session=True,
        )  # fmt: skip
        self.wait_for_agent()

    def keepers(self) -> list[int]:
        """The keeper processes of this agent: they have its environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                mine = f"COTENANT_SOFTGPU_STATE={self.environment['COTENANT_SOFTGPU_STATE']}".encode()
                if b"slices.keeper" in command and mine in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node("soft", {}, kernel_ns=KERNEL_NS)
    node.__enter__()
    yield node
    node.kill_programs()
    node.__exit__(None, None, None)


def settled(node: Node, seconds: float = 2.5) -> dict[str, float | None]:
    """What tenants have had of a window that lies wholly behind."""
    time.sleep(seconds)
    return node.got()


@pytest.mark.timed
@pytest.mark.parametrize("requests", [(0.3, 0.7), (0.2, 0.3, 0.5)])
def test_requests_are_kept_by_the_hardware(node: Node, requests: tuple[float, ...]) -> None:
    tenants = [node.add(f"t{i}", request=request) for i, request in enumerate(requests)]
    for tenant in tenants:
        tenant.begin(30)
    got = settled(node, 4)
    for i, request in enumerate(requests):
        assert got[f"t{i}"] == pytest.approx(request, abs=0.03)


@pytest.mark.timed
def test_a_tenant_with_gaps_gets_its_request(node: Node) -> None:
    busy, gaps = node.add("busy", request=0.3), node.add("gaps", "training", request=0.6)
    busy.begin(30)
    gaps.begin(30)
    got = settled(node, 5)
    assert got["gaps"] == pytest.approx(0.667, abs=0.05)
    assert got["busy"] == pytest.approx(0.333, abs=0.05)


@pytest.mark.timed
def test_a_limit_holds_alone(node: Node) -> None:
    tenant = node.add("limited", limit=0.25)
    tenant.begin(30)
    assert settled(node, 4)["limited"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.timed
def test_a_changed_share_holds_at_once(node: Node) -> None:
    tenants = [node.add("a", request=0.5), node.add("b", request=0.5)]
    for tenant in tenants:
        tenant.begin(30)
    settled(node, 2)
    with_client = node.clients[0]
    with_client.call("set", name="a", request=0.2)
    with_client.call("set", name="b", request=0.8)
    got = settled(node, 3)
    assert got["a"] == pytest.approx(0.2, abs=0.03)


@pytest.mark.timed
@pytest.mark.parametrize("beside", [1, 2])
def test_a_service_waits_a_switch_beside_kernels_of_any_length(node: Node, beside: int) -> None:
    service = node.service(20, 1)
    others = [node.add(f"be{i}", best_effort=True) for i in range(beside)]
    for other in others:
        other.begin(60)
    time.sleep(0.5)
    times = service.ask("100", None)
    assert times[len(times) // 2] < 6.0  # 1 ms of its own and 0.22 of a switch; a loaded machine adds its own; kernels
    # of 20 ms, which nothing would cut, are 10 ms on average
    got = node.got()
    assert sum(got[f"be{i}"] or 0.0 for i in range(beside)) >= 0.8
    assert all((got[f"be{i}"] or 0.0) >= 0.7 / beside for i in range(beside))


def test_a_slice_that_a_tenant_sets_itself_is_set_back_and_reported(node: Node) -> None:
    service = node.service(20, 1)
    hostile = node.folder / "hostile.py"
    hostile.write_text(
        "import os, sys, time\n"
        "from cotenant.bench.driver import Driver\n"
        "from cotenant.devices.channel_groups import ChannelControls, ChannelGroup\n"
        "from cotenant.softgpu.controls import SoftIoctl\n"
        "cuda = Driver(); cuda.launch(1000); cuda.synchronise()\n"
        "controls = ChannelControls('software', SoftIoctl())\n"
        "fd = os.open(os.environ['COTENANT_SOFTGPU_STATE'], os.O_RDWR)\n"
        "print('ready hostile', flush=True)\n"
        "while True:\n"
        "    cuda.launch(20000000)\n"
        "    for client in range(3):\n"
        "        group = 0x5c000000 | client << 4\n"
        "        try: controls.set_slice(fd, ChannelGroup(0xc1d00000 | client, 0, 0, group, ()), 40000)\n"
        "        except Exception: pass\n"
        "    cuda.synchronise()\n"
    )
    spec = TenantSpec("hostile", mechanism="slices", best_effort=True)
    node.tenant("hostile", spec, program=["hostile"]).wait_ready()
    wait_for(lambda: any("changes its time slice" in text for text in node.warnings("hostile")))
    del service


def longest_gap_s(block: dict[str, Any]) -> float:
    """Longest time in which nothing of a block came to its end."""
    times = [mark[0] for mark in block["marks"]]
    return max((b - a) / 1e9 for a, b in itertools.pairwise(times))


@pytest.mark.timed
def test_a_tenant_that_is_off_when_the_agent_dies_goes_on_within_a_second(node: Node) -> None:
    tenant = node.add("limited", limit=0.25)
    tenant.begin(6)
    time.sleep(1.5)
    assert node.agent is not None
    node.agent.kill()
    node.agent.wait()
    block = tenant.result()
    assert longest_gap_s(block) < 1.0
    assert block["busy_ns"] >= 3e9  # without an agent the program is not limited
    wait_for(lambda: not node.keepers(), what="the keeper has ended")
    node.restart()
    tenant.begin(30)
    assert settled(node, 4)["limited"] == pytest.approx(0.25, abs=0.03)


def test_a_keeper_that_dies_is_replaced(node: Node) -> None:
    tenant = node.add("limited", limit=0.25)
    tenant.begin(8)
    (first,) = wait_for(node.keepers)
    os.kill(first, signal.SIGKILL)
    (second,) = wait_for(lambda: [pid for pid in node.keepers() if pid != first])
    assert node.agent is not None
    node.agent.kill()
    node.agent.wait()
    tenant.result()  # the program continues
    wait_for(lambda: second not in node.keepers())


@pytest.mark.timed
def test_an_agent_that_stands_still_keeps_nobody_off(node: Node) -> None:
    tenant = node.add("limited", limit=0.25)
    tenant.begin(7)
    time.sleep(1.5)
    assert node.agent is not None
    node.agent.send_signal(signal.SIGSTOP)
    time.sleep(3)
    node.agent.send_signal(signal.SIGCONT)
    assert longest_gap_s(tenant.result()) < 1.5


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_tenant_killed_while_it_is_off_leaves_nothing(node: Node) -> None:
    other = node.add("other", request=0.5)
    other.begin(60)
    assert node.agent is not None
    agent, counts = node.agent.pid, []
    (keeper,) = wait_for(node.keepers)
    for round_ in range(3):
        victim = node.add(f"victim{round_}", limit=0.3)
        victim.begin(60)
        time.sleep(random.uniform(0.2, 0.5))
        victim.process.kill()
        victim.process.wait()
        node.clients.pop().close()
        wait_for(lambda: [row["name"] for row in node.tenants()] == ["other"])
        counts.append((descriptors(agent), descriptors(keeper)))
    wait_for(
        lambda: descriptors(agent) <= counts[0][0] and descriptors(keeper) <= counts[0][1],
        what="files of the dead are closed",
    )
    wait_for(lambda: (node.got()["other"] or 0.0) > 0.9, what="all of the GPU is the other's")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_SOFTGPU_COUNT", "2")


def test_gangs_that_wait_for_each_other_end(two_gpus: None, node: Node) -> None:
    """200 steps of 12 ms at half of the GPUs' time: neither gang stops the other."""
    began = time.monotonic()
    gangs = [node.gang(name, 100, request=0.5) for name in ("one", "two")]
    for gang in gangs:
        assert gang.process.wait(60) == 0
    assert time.monotonic() - began >= 2 * 100 * 0.012
    wait_for(lambda: not node.tenants())


@pytest.mark.timed
def test_a_gang_leaves_a_tenant_beside_it_its_half(two_gpus: None, node: Node) -> None:
    beside = node.add("beside", request=0.5, gpus=("0",))
    beside.begin(30)
    gang = node.gang("three", 250, request=0.5)
    time.sleep(3)
    assert node.got()["beside"] == pytest.approx(0.5, abs=0.06)
    assert gang.process.wait(60) == 0


def group_message(shim: FakeShim, fd: int) -> None:
    """A channel group as a shim sends it."""
    values = {"client": 0xC1D00000, "device": 1, "subdevice": 2, "group": 3, "channel_count": 1, "compute": 1}
    data = wire.pack(MessageType.CHANNEL_GROUP, values | {"channels": bytes([4, 0, 0, 0])})
    socket.send_fds(shim.socket, [data], [fd])


def test_a_driver_that_does_not_take_the_controls_means_turns(agent: AgentProcess) -> None:
    """The tenant that runs already, and later ones, take turns; one sentence says why."""
    with agent.client() as client, open("/dev/null", "rb") as odd:
        answer = register(client, "first", mechanism="slices", request=0.5)
        shim = FakeShim(agent.folder, answer["token"])
        slot = shim.attach(gpu_uuid(0))
        assert shim.page is not None
        page = shim.page.slots[slot]
        assert page.flags & SlotFlag.UNGATED
        group_message(shim, odd.fileno())
        shim.wait(MessageType.PAGE_UPDATE)
        assert not page.flags & SlotFlag.UNGATED
        assert page.epoch != 0  # a new epoch, so that no launch relies on the permission that it had before
        row = agent.tenant("first")
        assert row["mechanism"] == "time"
        assert any("takes turns that the agent grants" in text for text in row["warnings"])
        assert shim.take(slot)["epoch"] != 0
        with pytest.raises(InputError, match="cannot be combined with slices"):
            register(client, "second", mechanism="slices")


def test_a_group_that_makes_no_sense_ends_its_connection(agent: AgentProcess) -> None:
    with agent.client() as client:
        answer = register(client, "odd", mechanism="slices")
        shim = FakeShim(agent.folder, answer["token"])
        values = {"client": 1, "group": 3, "channel_count": 51, "channels": bytes(200)}
        shim.send(MessageType.CHANNEL_GROUP, values)
        assert shim.wait(MessageType.ERROR)["status"] == Status.TOO_MANY
        shim = FakeShim(agent.folder, answer["token"])
        # no descriptor of the driver's file is sent with the message
        shim.send(MessageType.CHANNEL_GROUP, values | {"channel_count": 1})
        assert shim.wait(MessageType.ERROR)["status"] == Status.BAD_MESSAGE
