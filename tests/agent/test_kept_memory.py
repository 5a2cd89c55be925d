"""A latency-sensitive tenant's memory is there when it wants it, whatever the others take: real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.bench.harness import Bench
from cotenant.softgpu import mps as mps_standin

MIB = 1 << 20
TAKE = """
import ctypes, json, sys
from cotenant.bench.driver import Driver
cuda = Driver()
def take(pieces):
    for done in range(pieces):
        if cuda._cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(128 << 20)) != 0:
            return done * 128
    return pieces * 128
def free():
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda._cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)) == 0
    return left.value >> 20
print(json.dumps(take(int(sys.argv[1]))), flush=True)
for line in sys.stdin:
    print(json.dumps(free() if line == "free\\n" else take(int(line))), flush=True)
"""


def take(bench: Bench, spec: TenantSpec, pieces: int) -> tuple[subprocess.Popen[str], int]:
    """A tenant that takes that many pieces of 128 MiB, as far as it can; the MiB it has."""
    client = ControlClient(bench.folder)
    bench.clients.append(client)
    command = [sys.executable, "-c", TAKE, str(pieces)]
    environment = dict(bench.environment)
    environment |= program_environment(register(client, Launch(bench.folder, spec, command)))
    environment |= {key: value for key, value in bench.environment.items() if "SOFTGPU" in key}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2] / "src")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    client.call("started", name=spec.name, pid=process.pid)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, json.loads(line)


def ask(process: subprocess.Popen[str], what: str) -> int:
    """Take more pieces, or `free`: the MiB that the program sees free."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert isinstance(answer, int)
    return answer


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB, of which each context takes 256 MiB."""
    monkeypatch.setenv("COTENANT_SOFTGPU_MEMORY", str(4 << 30))


SETTINGS = {"context_reserve": "256MiB"}
KEPT = TenantSpec("ls", memory_bytes=1 << 30, latency_sensitive=True, mechanism="mps")


def test_memory_is_kept_for_a_service_that_comes_later() -> None:
    with Bench("soft", SETTINGS) as bench, ControlClient(bench.folder) as client:
        register(client, Launch(bench.folder, KEPT, ["ls"]))
        be, taken = take(bench, TenantSpec("be", mechanism="mps"), 64)
        assert taken == 4096 - 256 - 1024, "all but its own context and the gibibyte of ls"
        warnings = client.call("warnings", name="be")["warnings"]
        assert any("1024 MiB of the GPU are kept for latency-sensitive tenants" in text for text in warnings)
        be.communicate(timeout=60)


def test_a_service_that_runs_gets_the_rest_of_its_memory() -> None:
    with Bench("soft", SETTINGS) as bench:
        ls, first = take(bench, KEPT, 2)
        assert first == 256
        be, taken = take(bench, TenantSpec("be", mechanism="mps"), 64)
        assert taken == 4096 - 256 - 1024
        # the limit of 1024 MiB holds the context and six pieces
        assert ask(ls, "64") == 512
        be.communicate(timeout=60)
        ls.communicate(timeout=60)


def test_what_is_kept_for_a_service_does_not_look_free() -> None:
    """A program that sizes its caches by cuMemGetInfo must not count on it; what looks free can be had."""
    with Bench("soft", SETTINGS) as bench:
        be, _ = take(bench, TenantSpec("be", mechanism="mps"), 0)
        assert ask(be, "free") == 4096 - 256
        ls, _ = take(bench, KEPT, 0)
        # The agent may answer one process before it has read what the other one has sent. So wait until it knows all
        # that was taken.
        wait_for(lambda: ask(be, "free") == 4096 - 256 - 1024)
        assert ask(ls, "2") == 256
        # taking memory from the kept amount does not change what others can take
        wait_for(lambda: ask(be, "free") == 4096 - 256 - 1024)
        assert ask(ls, "free") == 1024 - 256 - 256, "its own is free for it"
        assert ask(be, "64") == 4096 - 256 - 1024
        assert ask(be, "free") == 0
        ls.communicate(timeout=60)
        wait_for(lambda: ask(be, "free") == 1024)
        be.communicate(timeout=60)


@pytest.mark.parametrize("release", [595, 615])
def test_free_memory_under_the_limit_of_mps(release: int, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS shows a program what is left of its own limit. So memory that is kept for others must be subtracted from the
    GPU's free memory alone: an engine that finds too little free memory does not start.
    """
    monkeypatch.setenv("MPS_STANDIN_RELEASE", str(release))
    monkeypatch.setenv("COTENANT_SOFTGPU_MPS", str(mps_standin.install(short_folder)))
    with Bench("soft", SETTINGS) as bench:
        one, _ = take(bench, KEPT, 0)
        two, _ = take(bench, replace(KEPT, name="two"), 0)
        three, _ = take(bench, TenantSpec("three", memory_bytes=2 << 30, mechanism="mps"), 0)
        wait_for(lambda: [ask(each, "free") for each in (one, two, three)] == [768, 768, 2048 - 256])
        be, taken = take(bench, TenantSpec("be", mechanism="mps"), 4)
        assert taken == 512
        # four contexts, what `be` took, and what is kept for the two services; the limit of `three` would allow more
        wait_for(lambda: ask(three, "free") == 4096 - 4 * 256 - 512 - 2 * 768)
        assert ask(three, "64") == 1024
        assert [ask(one, "64"), ask(two, "64")] == [768, 768]
        for process in (one, two, three, be):
            process.communicate(timeout=60)


def test_without_a_reservation_first_come_first_served() -> None:
    with Bench("soft", SETTINGS) as bench:
        be, taken = take(bench, TenantSpec("be", mechanism="mps"), 64)
        assert taken == 4096 - 256
        be.communicate(timeout=60)
