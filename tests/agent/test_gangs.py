"""Tenants on several GPUs, as real processes on two software GPUs: all of their GPUs or none, and no deadlock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import WITHIN_S, wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.bench.harness import Bench

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")

# Launches kernels on the given devices in step, as the ranks of a collective do, and prints the number of steps.
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
    """A tenant whose program is RANKS or COLLECTIVES."""

    def __init__(self, node: Bench, name: str, program: str, *arguments: object, **share: object) -> None:
        self.client = ControlClient(node.folder)
        answer = register(self.client, Launch(node.folder, TenantSpec(name, **share), []))  # type: ignore[arg-type]
        os.environ["COTENANT_SOFTGPU_STATE"] = node.environment["COTENANT_SOFTGPU_STATE"]
        environment = program_environment(answer)
        del os.environ["COTENANT_SOFTGPU_STATE"]
        command = [sys.executable, "-c", program, *map(str, arguments)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.client.call("started", name=name, pid=self.process.pid)

    def ended(self) -> str:
        """What it printed, once it has ended well."""
        out, _ = self.process.communicate(timeout=WITHIN_S)
        assert self.process.returncode == 0
        self.client.close()
        return out

    def steps(self) -> int:
        return int(self.ended())


def test_a_gang_beside_single_tenants(node: Bench) -> None:
    gang = Ranks(node, "gang", RANKS, "0,1", 4.0, request=0.5, gpu_count=2)
    # each tenant sees only its own GPU, as device 0
    solos = [Ranks(node, f"solo{gpu}", RANKS, "0", 4.0, request=0.5, gpus=(str(gpu),)) for gpu in (0, 1)]
    seen = 0
    while gang.process.poll() is None:
        rows = {row["name"]: row["gpus"] for row in node.tenants()}
        seen += any(share["holding"] for share in rows.get("gang", []))
        time.sleep(0.05)
    assert seen > 0
    steps = gang.steps()
    alone = [solo.steps() for solo in solos]
    assert 0 < steps < 1000  # a step takes 4 ms, so a tenant alone would make 1000
    assert all(count > 0 for count in alone)
    # every turn of the gang began on both GPUs at the same instant
    wait_for(lambda: not node.tenants())
    trace = node.trace
    assert trace is not None

    def began_together() -> bool:
        starts: dict[str, set[int]] = {}
        whole_lines = trace.read_text().rpartition("\n")[0]
        for turn in map(json.loads, whole_lines.splitlines()[1:]):
            if turn["tenant"] == "gang":
                starts.setdefault(turn["gpu"], set()).add(turn["start_ns"])
        return len(starts) == 2 and len(set(map(frozenset, starts.values()))) == 1

    wait_for(began_together, what="all of its turns in the trace, which is written once a second")


def test_two_gangs_share_without_deadlock(node: Bench) -> None:
    first = Ranks(node, "a", RANKS, "0,1", 3.0, request=0.5, gpu_count=2)
    second = Ranks(node, "b", RANKS, "0,1", 3.0, request=0.5, gpu_count=2)
    assert first.steps() > 0
    assert second.steps() > 0


def test_a_gang_that_uses_one_of_its_gpus_keeps_its_turn(node: Bench) -> None:
    gang = Ranks(node, "half", RANKS, "0", 600.0, request=0.5, gpu_count=2)
    rows = wait_for(lambda: [r for r in node.tenants() if r["name"] == "half" and r["launches"] > 50])
    turns_at_most = rows[0]["age_s"] / 0.02 + 1  # a turn is at least 20 ms
    assert rows[0]["gpus"][0]["turns"] < turns_at_most
    gang.process.kill()
    gang.process.communicate()
    gang.client.close()


# One process per GPU. Each step launches kernels and then a collective: a wait on the GPU until all ranks have arrived.
# Arguments: steps, milliseconds by which the last rank is late at every other step, number of GPUs.
COLLECTIVES = """
import ctypes, mmap, os, random, sys, time
steps, late_s, ranks = int(sys.argv[1]), float(sys.argv[2]) / 1e3, int(sys.argv[3])
board = mmap.mmap(-1, 4096)  # a word per rank, shared with the children
def must(code):
    assert code == 0, code
def work(rank):
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, function, stream = (ctypes.c_void_p() for _ in range(4))
    words, base = ctypes.c_uint64(), ctypes.addressof(ctypes.c_char.from_buffer(board))
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank))
    must(cuda.cuCtxSetCurrent(context))
    must(cuda.cuModuleLoadData(ctypes.byref(module), b"cotenant-soft-module\\nbusy 2000000\\n\\0"))
    must(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"busy"))
    must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    must(cuda.cuMemHostRegister_v2(ctypes.c_void_p(base), ctypes.c_size_t(4096), 2))
    must(cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(words), ctypes.c_void_p(base), 0))
    chance = random.Random(rank)
    for step in range(1, steps + 1):
        if late_s and rank == ranks - 1 and step % 2:
            time.sleep(chance.uniform(0, late_s))
        for _ in range(3):
            must(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, None, None))
        must(cuda.cuStreamWriteValue32_v2(stream, ctypes.c_uint64(words.value + 64 * rank), step, 0))
        for other in range(ranks):
            must(cuda.cuStreamWaitValue32_v2(stream, ctypes.c_uint64(words.value + 64 * other), step, 0))
        if step % 4 == 0:
            must(cuda.cuStreamSynchronize(stream))
    must(cuda.cuStreamSynchronize(stream))
children = []
for rank in range(ranks):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(rank)
            code = 0
        finally:
            os._exit(code)
    children.append(child)
print("begun", *children, flush=True)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""

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


SHARED = ("time", "slices")  # mechanisms of the software GPU under which several tenants with several GPUs run


@pytest.mark.parametrize("mechanism", [*SHARED, "whole"])
def test_ranks_that_wait_for_each_other_on_their_gpus_end_alone(node: Bench, mechanism: str) -> None:
    alone = Ranks(node, "alone", COLLECTIVES, 60, 30, 2, gpu_count=2, mechanism=mechanism)
    alone.ended()


@pytest.mark.parametrize("late_ms", [0, 40])
@pytest.mark.parametrize("mechanism", SHARED)
def test_ranks_that_wait_for_each_other_end_beside_others(node: Bench, mechanism: str, late_ms: int) -> None:
    """A turn that ends between two ranks' launches of one collective leaves a GPU that cannot drain."""
    gangs = [
        Ranks(node, name, COLLECTIVES, 60, late_ms, 2, request=0.3, gpu_count=2, mechanism=mechanism) for name in "ab"
    ]
    one = Ranks(node, "one", COLLECTIVES, 60, 0, 1, request=0.3, gpus=("1",), mechanism=mechanism)
    for program in (*gangs, one):
        program.ended()


@pytest.mark.parametrize("mechanism", SHARED)
def test_three_gangs_that_cross_end(monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    monkeypatch.setenv("COTENANT_SOFTGPU_COUNT", "3")
    with Bench("soft", {"quota": "60ms", "min_quota": "20ms", "max_quota": "60ms"}) as node:
        gangs = [
            Ranks(node, name, COLLECTIVES, 40, 20, 2, request=0.4, gpus=gpus, mechanism=mechanism)
            for name, gpus in (("a", ("0", "1")), ("b", ("1", "2")), ("c", ("2", "0")))
        ]
        for gang in gangs:
            gang.ended()


@pytest.mark.parametrize("mechanism", SHARED)
def test_a_gang_with_a_dead_rank_stops_nobody_else(node: Bench, mechanism: str) -> None:
    """What waits for the dead rank waits for ever, as natively; the other tenants of its GPUs end."""
    lost = Ranks(node, "lost", COLLECTIVES, 1_000_000, 0, 2, request=0.5, gpu_count=2, mechanism=mechanism)
    other = Ranks(node, "other", COLLECTIVES, 60, 0, 1, request=0.5, gpus=("1",), mechanism=mechanism)
    assert lost.process.stdout is not None
    first, second = map(int, lost.process.stdout.readline().split()[1:])
    wait_for(lambda: any(row["name"] == "lost" and row["launches"] > 50 for row in node.tenants()))
    os.kill(first, signal.SIGKILL)
    other.ended()
    os.kill(second, signal.SIGKILL)
    lost.process.wait(WITHIN_S)
    lost.client.close()
