"""What programs do that could trip a gate: threads, streams that come and go, captures, forks, waits on later work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.gate.client import join_floor
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, register
from cotenant.bench.colocation_rig import Rig

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAD = f"""
import ctypes, json, os, sys, threading, time
sys.path.insert(0, {str(SOURCE)!r})
from cotenant.bench.driver import Driver
cuda = Driver()
lib = ctypes.CDLL("libcuda.so.1")
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("soft", together=True) as started:
        started.scheme("tidal", heartbeat_timeout_ms=5_000)
        yield started


def run(rig: Rig, name: str, program: str, **kind: Any) -> dict[str, Any]:
    """Run a program as a tenant; what it printed last, as JSON."""
    spec = TenantSpec(name, mechanism="mps", **(kind or {"best_effort": True}))
    command = [sys.executable, "-c", HEAD + program]
    with ControlClient(rig.bench.folder) as client:
        environment = rig.bench.with_shim(register(client, Launch(rig.bench.folder, spec, command)))
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        client.call("started", name=name, pid=process.pid)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise AssertionError("the program hangs") from None
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


THREADS = """
done = []
def work():
    lib.cuCtxSetCurrent(context)
    for _ in range(20):
        stream = cuda.stream()
        for _ in range(10):
            mine.launch(20_000, stream)
        lib.cuStreamSynchronize(stream)
        lib.cuStreamDestroy_v2(stream)
    done.append(1)
context = ctypes.c_void_p()
lib.cuCtxGetCurrent(ctypes.byref(context))
mine = cuda
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
cuda.synchronise()
print(json.dumps({"done": len(done)}))
"""


@pytest.mark.parametrize("kind", [{"best_effort": True}, {"latency_sensitive": True}])
def test_threads_with_streams_that_come_and_go(rig: Rig, kind: dict[str, bool]) -> None:
    assert run(rig, f"threads-{next(iter(kind))}", THREADS, **kind) == {"done": 4}


CAPTURES = """
stream = cuda.stream()
for _ in range(20):
    for _ in range(5):
        cuda.launch(30_000)
    graph = cuda.graph([10_000] * 20, stream)
    for _ in range(3):
        cuda.call("cuGraphLaunch", graph, stream)
    cuda.call("cuGraphExecDestroy", graph)
cuda.synchronise()
print(json.dumps({"ok": True}))
"""


@pytest.mark.parametrize("kind", [{"best_effort": True}, {"latency_sensitive": True}])
def test_captures_between_launches_stay_whole(rig: Rig, kind: dict[str, bool]) -> None:
    assert run(rig, f"captures-{next(iter(kind))}", CAPTURES, **kind) == {"ok": True}


SAME_STREAM = """
stream, graph, state, broken = cuda.stream(), ctypes.c_void_p(), ctypes.c_int(), 0
for _ in range(50):
    cuda.launch(10_000, stream)
    cuda.call("cuStreamBeginCapture_v2", stream, ctypes.c_int(0))
    cuda.call("cuStreamIsCapturing", stream, ctypes.byref(state))
    broken += state.value != 1
    lib.cuStreamEndCapture(stream, ctypes.byref(graph))
print(json.dumps({"broken": broken}))
"""


def test_a_capture_begins_whole_in_a_stream_that_has_just_worked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines such as vLLM record a graph in the stream into which they launched just before. The shim asks that stream
    whether it is idle: the question must not fall into the begin of the capture.
    """
    monkeypatch.setenv("COTENANT_SOFTGPU_CALL_NS", "2000000")
    assert run(rig, "same-stream", SAME_STREAM, latency_sensitive=True) == {"broken": 0}


LATER = """
word = (ctypes.c_uint32 * 1)(0)
where = ctypes.c_void_p(ctypes.addressof(word))
first, second = cuda.stream(), cuda.stream()
cuda.launch(20_000, first)
cuda.call("cuStreamWaitValue32_v2", first, where, ctypes.c_uint(1), ctypes.c_uint(0))
for _ in range(30):
    cuda.launch(20_000, first)      # held back until the word is written, by work that is launched later
began = time.monotonic()
cuda.launch(20_000, second)
cuda.call("cuStreamWriteValue32_v2", second, where, ctypes.c_uint(1), ctypes.c_uint(0))
cuda.call("cuStreamSynchronize", first)
print(json.dumps({"took_s": time.monotonic() - began}))
"""


def test_work_that_waits_for_a_later_launch_does_not_hang_the_program(rig: Rig) -> None:
    """The rule would wait for ever: after 100 ms without an end it lets go."""
    assert run(rig, "later", LATER)["took_s"] > 0


FORKS = """
cuda.launch(20_000); cuda.synchronise()
child = os.fork()
if child == 0:
    os._exit(7)
_, status = os.waitpid(child, 0)
for _ in range(50):
    cuda.launch(20_000)
cuda.synchronise()
print(json.dumps({"child": os.waitstatus_to_exitcode(status)}))
"""


def test_a_program_that_forks_goes_on(rig: Rig) -> None:
    assert run(rig, "forks", FORKS) == {"child": 7}

    def nobody() -> bool:
        state = rig.scheme("tidal", heartbeat_timeout_ms=5_000)["gpus"][rig.uuid]
        return state["best_effort_processes"] == 0 and state["holders"] == []

    wait_for(nobody, what="it has left the floor")


EXITS = """
for _ in range(400):
    cuda.launch(20_000)
print(json.dumps({"launched": 400}))
"""


def test_a_program_that_ends_while_it_is_held_up_ends(rig: Rig) -> None:
    floor = join_floor(rig.bench.folder, rig.uuid)
    rig.scheme("tidal", heartbeat_timeout_ms=300)
    floor.raise_()  # the gate is raised without further heartbeats, so it counts as lowered after 0.3 s
    assert run(rig, "exits", EXITS) == {"launched": 400}
    floor.close()
    rig.scheme("tidal", heartbeat_timeout_ms=5_000)


@pytest.mark.timed
def test_several_programs_divide_what_may_be_in_flight(rig: Rig) -> None:
    programs = [rig.be(f"be{i}") for i in range(3)]
    for program in programs:
        program.wait_ready()
        program.ask("load mm2048", 60)
    assert rig.scheme("tidal")["gpus"][rig.uuid]["best_effort_processes"] == 3
    for program in programs:
        program.tell("run 0.5")
    counts = [program.answer()["count"] for program in programs]
    assert min(counts) > 0.4 * max(counts)
    for program in programs:
        program.close()


GRAPHS_WITH_PAUSES = """
from cotenant.agent.ipc.client import ControlClient
from pathlib import Path
stream = cuda.stream()
graph = cuda.graph([15_000] * 20, stream)
for _ in range(40):
    cuda.call("cuGraphLaunch", graph, stream)
    time.sleep(0.01)
time.sleep(2.5)  # the counters of an idle program are published every second or two
with ControlClient(Path(os.environ["COTENANT_SOCKET"]).parent) as client:
    rows = client.call("list")["tenants"]
print(json.dumps({"busy_s": next(row["predicted_busy_s"] for row in rows if os.getpid() in row["pids"])}))
"""


@pytest.mark.timed
def test_a_graph_is_not_thought_to_take_as_long_as_its_program_takes_to_launch_the_next(rig: Rig) -> None:
    """40 graphs of 0.3 ms, one every 10 ms: 12 ms of work (the first counts as 1 ms, being new), not 400 ms."""
    assert run(rig, "graphs", GRAPHS_WITH_PAUSES)["busy_s"] < 0.04


MODE = """
for _ in range(30):
    cuda.launch(20_000)
    cuda.synchronise()
mode = ctypes.c_int(0)
lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
print(json.dumps({"mode": mode.value}))
"""


def test_a_program_s_threads_keep_their_own_mode_of_capture(rig: Rig) -> None:
    """The shim looks at streams on a latency-sensitive program's threads too, and leaves them at 0 (global)."""
    assert run(rig, "mode", MODE, latency_sensitive=True) == {"mode": 0}


CONTEXTS = """
first, second, made = ctypes.c_void_p(), ctypes.c_void_p(), []
lib.cuCtxGetCurrent(ctypes.byref(first))
cuda.call("cuCtxCreate_v2", ctypes.byref(second), 0, ctypes.c_int(0))
length = ctypes.c_uint64(1_500_000)
params = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(length), ctypes.c_void_p))
for context in (first, second):
    cuda.call("cuCtxSetCurrent", context)
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.call("cuModuleLoadData", ctypes.byref(module), b"cotenant-soft-module\\ntimed param\\n\\0")
    cuda.call("cuModuleGetFunction", ctypes.byref(kernel), module, b"timed")
    made.append((context, kernel, cuda.stream()))
began = time.monotonic()
for _ in range(50):
    for context, kernel, stream in made:
        cuda.call("cuCtxSetCurrent", context)
        cuda.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, params, None)
launched_s = time.monotonic() - began
cuda.call("cuCtxDestroy_v2", second)  # current, with work in flight
cuda.call("cuCtxSetCurrent", first)
for _ in range(10):
    cuda.launch(200_000)
cuda.synchronise()
print(json.dumps({"launched_s": launched_s}))
"""


@pytest.mark.parametrize("run_ahead", ["auto", "always"])
def test_a_program_of_two_contexts_has_no_more_in_flight_than_others(rig: Rig, run_ahead: str) -> None:
    """100 kernels of 1.5 ms, from one context and the other in turn: the last one goes when most have ended. What the
    first one's page is pinned for does not outlive it, so nothing of the second may wait for that on the device."""
    rig.scheme("tidal", heartbeat_timeout_ms=5_000, run_ahead=run_ahead)
    floor = join_floor(rig.bench.folder, rig.uuid)
    assert run(rig, f"contexts-{run_ahead}", CONTEXTS)["launched_s"] > 0.14
    floor.close()
    rig.scheme("tidal", heartbeat_timeout_ms=5_000)
