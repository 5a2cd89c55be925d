"""Copies of real processes under the real agent and shim, on the software GPU with a slow link.

Shares are compared in virtual time (test_copy_fairness.py) and, of real processes, in bench/test_copy_shares_bench.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_harness import saved
from swap_node import CONTEXT, Node
from waiting import wait_for

from cotenant.abi.copy_page import COPY_PAGE_BYTES
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.copies.queue import TO_DEVICE, join
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.bench.harness import Bench, Program
from cotenant.bench.shares import COUNT, between

pytestmark = pytest.mark.skipif(importlib.util.find_spec("resource") is None, reason="Linux only")
MIB = 1 << 20
LINK = 200.0  # MB/s; a chunk of 1 MiB takes 5.2 ms, so that a busy machine still reacts in time
COPIES: dict[str, Any] = {"chunk_bytes": MIB, "period_bytes": 4 * MIB}
PROGRAMS = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "pcie_programs.py"


@pytest.fixture(autouse=True)
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_SOFTGPU_LINK_MBPS", f"{LINK:g}")


def settings() -> dict[str, Any]:
    return {"copies": COPIES}


def spec(name: str, weight: float | None = None, **more: Any) -> TenantSpec:
    return TenantSpec(name, mechanism="mps", copy_weight=weight, **more)


def copier(bench: Bench, given: TenantSpec, *arguments: object) -> Program:
    program = ["cotenant.bench.copying", *map(str, arguments or ("h2d", "pinned", "async", 4 * MIB))]
    workload = bench.tenant("copy", given, program=program)
    workload.wait_ready()
    return workload


def together(workloads: list[Program], seconds: float) -> list[float]:
    """Bytes that each workload copied while all copied."""
    while True:
        for workload in workloads:
            workload.begin(seconds)
        blocks = [workload.result() for workload in workloads]
        start_ns, end_ns = max(block["begin_ns"] for block in blocks), min(block["end_ns"] for block in blocks)
        copied = [between(block, start_ns, end_ns, COUNT) for block in blocks]
        if end_ns - start_ns > seconds * 0.5e9 and (min(copied) > 0 or seconds >= 8):
            return copied
        seconds *= 2  # a busy machine let one begin late, or held one up from its first copy until the other's end


def row(bench: Bench, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in bench.tenants() if r["name"] == name)["gpus"][0]
    return found


def copied(bench: Bench, name: str) -> int:
    """Bytes that a tenant has copied to the device in turns."""
    queue = row(bench, name)["copies"]
    return int(queue["to_device"]["bytes"]) if queue else 0


def call_checks(bench: Bench, given: TenantSpec | None) -> dict[str, Any]:
    """The program that checks what copies carry and in which order."""
    script = f"import sys, json; sys.path.insert(0, {str(PROGRAMS.parent)!r}); import pcie_programs;"
    command = [sys.executable, "-c", script + "print(json.dumps(pcie_programs.checks()))"]
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = dict(bench.environment) | {"PYTHONPATH": source, "COTENANT_CHECK_BYTES": str(5 * MIB + 12345)}
    client = ControlClient(bench.folder)
    bench.clients.append(client)
    if given is None:
        from cotenant.native.libraries import SOFT_DRIVER, library_path

        environment["COTENANT_BENCH_LIBRARY"] = str(library_path(SOFT_DRIVER))
    else:
        environment |= program_environment(register(client, Launch(bench.folder, given, command)))
        environment |= {key: value for key, value in bench.environment.items() if "SOFTGPU" in key}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if given is not None:
        client.call("started", name=given.name, pid=process.pid)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def all_good(found: Any) -> bool:
    return all(all_good(value) for value in found.values()) if isinstance(found, dict) else found is True


@contextmanager
def quick_link(mbps: int = 8000) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTENANT_SOFTGPU_LINK_MBPS", str(mbps))
        yield


def test_copies_carry_the_same_and_keep_their_order() -> None:
    """Pinned and pageable, linear and by rows; captures are left alone."""
    with quick_link(), Bench("soft", settings()) as bench:
        native = call_checks(bench, None)
        assert all_good(native), native
        paced = call_checks(bench, spec("stream", 1.0))
        assert all_good(paced), paced
        wait_for(lambda: not any(r["name"] == "stream" for r in bench.tenants()), what="it has ended")


def test_two_tenants_with_weights_both_copy() -> None:
    with Bench("soft", settings()) as bench:
        one, three = copier(bench, spec("one", 1.0)), copier(bench, spec("three", 3.0))
        assert min(together([one, three], 2.0)) > 0
        queue = row(bench, "three")["copies"]
        assert queue["weight"] == 3.0
        assert queue["rank"] == "normal"
        assert queue["to_device"]["bytes"] > 0
        assert queue["to_host"]["bytes"] == 0


def test_weights_change_while_they_copy() -> None:
    with Bench("soft", settings()) as bench:
        pair = [copier(bench, spec("a", 1.0)), copier(bench, spec("b", 1.0))]
        with ControlClient(bench.folder) as client:
            answer = client.call("set", name="b", copy_weight=4.0)
        assert answer["copy_weight"] == 4.0
        assert row(bench, "b")["copies"]["weight"] == 4.0
        assert min(together(pair, 1.0)) > 0


def test_pageable_and_both_directions() -> None:
    with Bench("soft", settings()) as bench:
        specs = [spec("a", 1.0), spec("b", 3.0)]
        pair = [copier(bench, one, "d2h", "pageable", "sync", 4 * MIB) for one in specs]
        assert min(together(pair, 1.0)) > 0
        assert row(bench, "b")["copies"]["to_host"]["bytes"] > 0


def test_turns_are_only_where_they_are_wanted() -> None:
    """Without the setting and without a weight nobody pays; the first tenant with a weight switches its GPU on."""
    with quick_link(1000), Bench("soft", {}) as bench:  # the default chunk of 8 MiB
        plain = copier(bench, spec("plain"))
        plain.block(0.2)
        assert row(bench, "plain")["copies"] is None
        weighted = copier(bench, spec("weighted", 2.0))

        def chunks(name: str) -> int:
            return int(row(bench, name)["copies"]["to_device"]["chunks"])

        def both_take_turns() -> bool:
            together([plain, weighted], 1.0)
            return min(chunks("plain"), chunks("weighted")) > 5

        wait_for(both_take_turns, what="the running one takes turns from now on, too")
        assert row(bench, "plain")["copies"]["weight"] == 1.0
        weighted.close()
        wait_for(lambda: len(bench.tenants()) == 1)

        def off_again() -> bool:
            before = chunks("plain")
            plain.block(0.2)
            return chunks("plain") == before

        wait_for(off_again, what="turns are off again")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_stands_still_holds_nobody_up(number: signal.Signals) -> None:
    with Bench("soft", settings()) as bench:
        stays, goes = copier(bench, spec("stays", 1.0)), copier(bench, spec("goes", 1.0))
        goes.begin(600.0)
        stays.begin(1.0)
        wait_for(lambda: min(copied(bench, name) for name in ("stays", "goes")) > 0, what="both copy")
        goes.process.send_signal(number)
        stays.result()
        before = copied(bench, "stays")
        assert stays.block(1.0) > 0
        assert copied(bench, "stays") > before, "it goes on"
        goes.process.kill()


def test_an_agent_that_is_killed_and_comes_back() -> None:
    """Meanwhile the processes go on taking turns among themselves; afterwards on the new agent's page."""
    with Bench("soft", settings() | {"fail": "open", "reconnect": "20ms"}) as bench:
        pair = [copier(bench, spec("one", 1.0)), copier(bench, spec("three", 3.0))]
        wait_for(lambda: all(saved(bench.folder, name).get("processes") for name in ("one", "three")))
        assert bench.agent is not None
        bench.agent.kill()
        bench.agent.wait()
        assert min(together(pair, 1.0)) > 0
        agent = [sys.executable, "-m", "cotenant.agent"]
        bench.agent = subprocess.Popen(
            [*agent, "--dir", str(bench.folder), "--gpus", "soft", "--config", str(bench.folder / "agent.json")],
            stderr=bench.log,
            stdout=bench.log,
            env=bench.environment,
        )
        bench.wait_for_agent()
        wait_for(lambda: [len(r["pids"]) for r in bench.tenants()] == [1, 1])

        def on_the_new_page() -> bool:
            """A process asks for the new agent's page when it copies after it has attached its GPU there."""
            assert min(together(pair, 1.0)) > 0
            return min(copied(bench, name) for name in ("one", "three")) > 0

        wait_for(on_the_new_page)


def test_a_worker_without_the_shim_takes_part() -> None:
    with Bench("soft", settings()) as bench, ControlClient(bench.folder) as client:
        answer = register(client, Launch(bench.folder, spec("worker", 1.0), ["worker"]))
        gpu = bytes.fromhex(answer["gpus"][0]["uuid"].removeprefix("GPU-").replace("-", ""))
        joined = join(answer["socket"], answer["token"], gpu)
        assert joined is not None
        queue, connection = joined
        assert queue.chunk_bytes == MIB
        with queue.turn(TO_DEVICE, MIB):
            assert any(word >> 48 == queue.participant for word in queue.layout.links[0].slots)
        assert not any(queue.layout.links[0].slots)
        counted = row(bench, "worker")["copies"]["to_device"]
        assert (counted["bytes"], counted["chunks"]) == (MIB, 1)
        # a process that ends while it holds a slot
        assert queue.ask(TO_DEVICE, MIB) is not None
        other = join(answer["socket"], answer["token"], gpu)
        assert other is not None
        connection.close()
        wait_for(lambda: not any(other[0].layout.links[0].slots), what="the agent gives back what it held")
        other[1].close()
        other[0].close()
        queue.close()


def test_a_page_that_is_overwritten_holds_nobody_up_for_long() -> None:
    """A wild pointer of a tenant: parameters come back with the agent, claims and clocks mend by themselves."""
    with Bench("soft", settings()) as bench, ControlClient(bench.folder) as client:
        pair = [copier(bench, spec("one", 1.0)), copier(bench, spec("three", 3.0))]
        answer = register(client, Launch(bench.folder, spec("wild", 1.0), ["wild"]))
        gpu = bytes.fromhex(answer["gpus"][0]["uuid"].removeprefix("GPU-").replace("-", ""))
        joined = join(answer["socket"], answer["token"], gpu)
        assert joined is not None
        queue, connection = joined
        wild = random.Random(1)
        for workload in pair:
            workload.begin(1.0)
        wait_for(lambda: min(copied(bench, name) for name in ("one", "three")) > 0, what="both copy")
        for _ in range(2000):
            at = wild.randrange(0, COPY_PAGE_BYTES, 8)
            ctypes.memmove(ctypes.addressof(queue.layout) + at, wild.randbytes(8), 8)
        for workload in pair:
            workload.result()
        assert min(together(pair, 1.0)) > 0, "both go on"
        wait_for(lambda: "it was restored" in (bench.folder / "agent.log").read_text())
        connection.close()
        queue.close()


def test_copies_on_the_device_are_cut_for_best_effort_tenants_only() -> None:
    script = """
import ctypes
from cotenant.bench.driver import Driver
cuda = Driver()
size = ctypes.c_size_t((64 << 20) + 5)
a, b = ctypes.c_void_p(), ctypes.c_void_p()
cuda.call("cuMemAlloc_v2", ctypes.byref(a), size)
cuda.call("cuMemAlloc_v2", ctypes.byref(b), size)
text = bytes(range(251)) * (size.value // 251 + 1)
cuda.call("cuMemcpyHtoD_v2", a, text, size)
cuda.call("cuMemcpyDtoD_v2", b, a, size)
cuda.call("cuMemcpyDtoDAsync_v2", b, a, size, cuda.stream())
cuda.synchronise()
back = ctypes.create_string_buffer(size.value)
cuda.call("cuMemcpyDtoH_v2", back, b, size)
assert back.raw == text[: size.value]
print("ready", flush=True)
input()
"""
    with quick_link(), Bench("soft", settings()) as bench:
        copies = {}
        for name, best_effort in (("be", True), ("normal", False)):
            client = ControlClient(bench.folder)
            bench.clients.append(client)
            command = [sys.executable, "-c", script]
            given = spec(name, 1.0, best_effort=best_effort)
            environment = dict(bench.environment)
            environment |= program_environment(register(client, Launch(bench.folder, given, command)))
            environment |= {key: value for key, value in bench.environment.items() if "SOFTGPU" in key}
            environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2] / "src")
            pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
            process = subprocess.Popen(command, env=environment, text=True, **pipes)
            client.call("started", name=name, pid=process.pid)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            least = 8 if best_effort else 4

            def counted() -> int:
                rows = {row["name"]: row["copies"] for row in bench.tenants()}
                return int(rows[name]) if rows[name] >= least else 0  # noqa: B023 - called in this round

            copies[name] = wait_for(counted)  # counters are published a few times a second
            process.communicate("\n", timeout=60)
        # A device copy of 64 MiB and 5 bytes is cut into three parts for the best-effort tenant only: 2 x 3, and two
        # copies over the link, which are not cut.
        assert copies == {"be": 8, "normal": 4}


def test_contents_that_move_take_turns_too(short_folder: Path) -> None:
    """Memory on its way off the GPU and back passes the same queues, in pieces, and arrives intact."""
    with quick_link(2000):
        node = Node(short_folder, 2 * CONTEXT + 300 * MIB, copies={"chunk_bytes": MIB, "period_bytes": 8 * MIB})
    try:
        programs = [node.program(name) for name in ("a", "b")]
        assert [program.ask("take(200)") for program in programs] == ["0", "0"]
        for program in programs * 2:  # each program makes the other one leave the GPU
            assert program.ask("work(0.2)").split()[1] == "intact"
        for name in ("a", "b"):
            gpu = node.tenant(name)["gpus"][0]
            moves = node.where(name)
            assert moves["moves_out"] > 0
            assert moves["moves_in"] > 0
            out, back = gpu["copies"]["to_host"], gpu["copies"]["to_device"]
            assert out["bytes"] > 50 * MIB, "what left the GPU"
            assert back["bytes"] > 50 * MIB, "what came back: the program itself copies less than 8 MiB"
            assert out["chunks"] > 10, "in pieces of eight chunks and more"
    finally:
        node.close()
