"""Tenants on several GPUs, as real processes on two software GPUs: all of their GPUs or none, and no deadlock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.bench.harness import Bench

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")

# works on the given devices in step, as ranks of a collective do; prints how many steps it made
RANKS = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
devices, seconds = [int(d) for d in sys.argv[1].split(",")], float(sys.argv[2])
def must(code):
    assert code == 0, code
must(cuda.cuInit(0))
ranks = []
for device in devices:
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    must(cuda.cuCtxSetCurrent(context))
    must(cuda.cuModuleLoadData(ctypes.byref(module), b"cotenant-soft-module\\nbusy 4000000\\n\\0"))
    must(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"busy"))
    ranks.append((context, function))
steps, until = 0, time.monotonic() + seconds
while time.monotonic() < until:
    for context, function in ranks:
        must(cuda.cuCtxSetCurrent(context))
        must(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    for context, _ in ranks:
        must(cuda.cuCtxSetCurrent(context))
        must(cuda.cuCtxSynchronize())
    steps += 1
print(steps)
"""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    monkeypatch.setenv("COTENANT_SOFTGPU_COUNT", "2")
    settings = {"quota": "60ms", "min_quota": "20ms", "max_quota": "60ms"}
    with Bench("soft", settings, trace=tmp_path / "turns.jsonl") as bench:
        yield bench


class Ranks:
    def __init__(self, node: Bench, name: str, devices: str, seconds: float, **share: object) -> None:
        self.client = ControlClient(node.folder)
        answer = register(self.client, Launch(node.folder, TenantSpec(name, **share), []))  # type: ignore[arg-type]
        os.environ["COTENANT_SOFTGPU_STATE"] = node.environment["COTENANT_SOFTGPU_STATE"]
        environment = program_environment(answer)
        del os.environ["COTENANT_SOFTGPU_STATE"]
        command = [sys.executable, "-c", RANKS, devices, str(seconds)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.client.call("started", name=name, pid=self.process.pid)

    def steps(self) -> int:
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        self.client.close()
        return int(out)


def test_a_gang_beside_single_tenants(node: Bench) -> None:
    gang = Ranks(node, "gang", "0,1", 4.0, request=0.5, gpu_count=2)
    # each sees its own GPU alone, as device 0
    solos = [Ranks(node, f"solo{gpu}", "0", 4.0, request=0.5, gpus=(str(gpu),)) for gpu in (0, 1)]
    seen = 0
    while gang.process.poll() is None:
        rows = {row["name"]: row["gpus"] for row in node.tenants()}
        seen += any(share["holding"] for share in rows.get("gang", []))
        time.sleep(0.05)
    assert seen > 0
    steps = gang.steps()
    alone = [solo.steps() for solo in solos]
    assert 0 < steps < 1000  # 4 ms a step: 1000 alone
    assert all(count > 0 for count in alone)
    # every turn of the gang began on both GPUs in one instant
    wait_for(lambda: not node.tenants())
    trace = node.trace
    assert trace is not None
    wait_for(lambda: '"gang"' in trace.read_text(), what="its turns in the trace, which is written once a second")
    turns = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    starts: dict[str, set[int]] = {}
    for turn in turns:
        if turn["tenant"] == "gang":
            starts.setdefault(turn["gpu"], set()).add(turn["start_ns"])
    first, second = starts.values()
    assert first
    assert first == second


def test_two_gangs_share_without_deadlock(node: Bench) -> None:
    first = Ranks(node, "a", "0,1", 3.0, request=0.5, gpu_count=2)
    second = Ranks(node, "b", "0,1", 3.0, request=0.5, gpu_count=2)
    assert first.steps() > 0
    assert second.steps() > 0


def test_a_gang_that_uses_one_of_its_gpus_keeps_its_turn(node: Bench) -> None:
    gang = Ranks(node, "half", "0", 2.0, request=0.5, gpu_count=2)
    rows = wait_for(lambda: [r for r in node.tenants() if r["name"] == "half" and r["launches"] > 50])
    assert rows[0]["gpus"][0]["turns"] < 60
    assert gang.steps() > 0


SEEN = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, uuid = ctypes.c_int(), (ctypes.c_uint8 * 16)()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
assert cuda.cuDeviceGetUuid(uuid, 0) == 0
print(count.value, chr(bytes(uuid)[8]))
"""


@pytest.mark.parametrize(("gpus", "seen"), [(("1",), "1 1"), (("0",), "1 0"), (("1", "0"), "2 1")])
def test_a_tenant_sees_its_own_gpus_only(node: Bench, gpus: tuple[str, ...], seen: str) -> None:
    """As with a real driver: its devices are those it was given, in that order."""
    with ControlClient(node.folder) as client:
        answer = register(client, Launch(node.folder, TenantSpec("t", gpus=gpus), []))
        environment = program_environment(answer) | {
            "COTENANT_SOFTGPU_STATE": node.environment["COTENANT_SOFTGPU_STATE"]
        }
        done = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == seen, done.stderr
