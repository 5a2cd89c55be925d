"""Hostile programs under mps by protocol 3, on the software GPU and a stand-in for MPS: each is contained or named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import saved, wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.core.errors import WorkError
from cotenant.native.libraries import SOFT_DRIVER, library_path
from cotenant.softgpu import mps as mps_standin

UUID = "GPU-636f7465-6e61-6e74-3073-6f6674677075"  # UUID of the software GPU's first card
MIB = 1 << 20
# Prints the number of SMs that it sees, and how many times it can allocate 100 MiB; then waits for the end of its
# input.
PROGRAM = """
import ctypes, os, sys
cuda = ctypes.CDLL(sys.argv[1] or None)
def use(contexts=1):
    sms, memory, context, got = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), 0
    assert cuda.cuInit(0) == 0
    for _ in range(contexts):
        assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    while got < 10 and cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(100 << 20)) == 0:
        got += 1
    cuda.cuDeviceGetAttribute(ctypes.byref(sms), 16, 0)
    print(sms.value, got, flush=True)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        use()
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
else:
    use(2 if sys.argv[2] == "second" else 1)
    sys.stdin.read()
"""


class Machine:
    """An agent on the software GPU whose MPS is the stand-in of release 615."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.command = str(mps_standin.install(folder))
        for name, value in {
            "COTENANT_SOFTGPU_STATE": str(folder / "gpu"),
            "COTENANT_SOFTGPU_MPS": self.command,
            "MPS_STANDIN_RELEASE": "615",
            "MPS_STANDIN_GPUS": f"{UUID}=132",
        }.items():
            monkeypatch.setenv(name, value)
        self.programs: list[subprocess.Popen[str]] = []
        self.log = open(folder / "agent.log", "ab")  # noqa: SIM115
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "cotenant.cli.main", "agent", "--gpus", "soft", "--dir", str(self.folder)]
        self.agent = subprocess.Popen([*command, "--http", "127.0.0.1:0"], stdout=self.log, stderr=self.log)
        wait_for(self.answers, 60)

    def answers(self) -> bool:
        assert self.agent.poll() is None, (self.folder / "agent.log").read_text()
        try:
            ControlClient(self.folder).close()
        except WorkError:
            return False
        return True

    def run(self, name: str, mode: str = "", *before: str, driver: str = "", **changed: str) -> tuple[int, int]:
        """Start the program as a tenant of a quarter of the SMs and 900 MiB; SMs and 100 MiB blocks that it gets."""
        spec = TenantSpec(name, limit=0.25, memory_bytes=900 * MIB, mechanism="mps")
        with ControlClient(self.folder, timeout_s=60) as client:
            environment = program_environment(register(client, Launch(self.folder, spec, []))) | changed
            program = subprocess.Popen(
                [*before, sys.executable, "-c", PROGRAM, driver, mode],
                env={key: value for key, value in environment.items() if value},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.programs.append(program)
            client.call("started", name=name, pid=program.pid)
        assert program.stdout is not None
        sms, blocks = program.stdout.readline().split()
        return int(sms), int(blocks)

    def rows(self) -> dict[str, dict[str, Any]]:
        with ControlClient(self.folder, timeout_s=60) as client:
            return {row["name"]: row for row in client.call("list")["tenants"]}

    def named(self, name: str, text: str) -> None:
        """Wait until a tenant's share is known not to hold, for that reason."""

        def found() -> dict[str, Any] | None:
            row = self.rows()[name]
            return row if any(text in fault["text"] for fault in row["not_enforced"]) else None

        row = wait_for(found, 60, text)
        assert row["state"] == "ShareNotEnforced"
        assert any(text in warning for warning in row["warnings"])

    def order(self, *words: str) -> str:
        environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "mps" / "pipe")}
        return subprocess.run([self.command, *words], env=environment, capture_output=True, text=True).stdout

    def end(self, program: subprocess.Popen[str]) -> None:
        assert program.stdin is not None
        program.stdin.close()
        program.wait(60)

    def close(self) -> None:
        for program in self.programs:
            self.end(program)
        self.agent.terminate()
        self.agent.wait(60)
        self.log.close()
        assert self.order("server", "list") == "", "the daemon has gone with the agent"


@pytest.fixture
def machine(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(short_folder, monkeypatch)
    yield made
    made.close()


def test_hostile_programs_are_contained_or_named(machine: Machine) -> None:
    assert machine.run("good") == (32, 6), "a context takes 256 MiB of the 900"
    assert machine.run("percent", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100") == (32, 6), "contained by the namespace"
    assert machine.run("second", "second") == (32, 3), "a second context is of the same client"
    assert machine.run("forked", "fork") == (32, 6), "a child is a client of the same namespace"
    assert machine.run("unset", CUDA_MPS_PIPE_DIRECTORY="") == (132, 9), "past the server; the shim holds its memory"
    machine.named("unset", "uses GPU 0 outside its MPS server and may use the whole GPU (it sees 132 SMs, its share")
    kept = [f"{key}={os.environ[key]}" for key in ("COTENANT_SOFTGPU_STATE", "COTENANT_SOFTGPU_MPS")]
    child = ("sh", "-c", '"$@"; :', "sh", "env", "-i", *kept)
    clean = machine.run("clean", "", *child, driver=str(library_path(SOFT_DRIVER)))
    assert clean == (132, 10), "neither the server nor the shim holds it"
    machine.named("clean", "uses GPU 0 outside its MPS server")
    pipe = machine.folder / "mps" / "pipe"
    machine.run("neighbour", CUDA_MPS_PIPE_DIRECTORY=str(pipe / "agent" / "good"))
    machine.named("neighbour", "is in namespace good of server agent, not in namespace neighbour of server agent")
    assert machine.run("door", CUDA_MPS_PIPE_DIRECTORY=str(pipe))[0] == 132
    machine.named("door", "is in namespace default of server uid_")
    # this is sent by root in a container
    machine.order("namespace", "set", "good", "--server=agent", "--active-thread-percentage=100")
    machine.named("good", "had 100.00 % of the SMs and 900M of memory: it was restored")
    rows = machine.rows()
    assert [name for name in ("percent", "second", "forked") if rows[name]["not_enforced"]] == []
    with ControlClient(machine.folder) as client:
        changed = client.call("set", name="percent", limit=0.125)
    assert changed["holds"] == "memory at once, the SM percentage for processes started from now on"
    machine.named("percent", "sees 32 SMs, its share has at most 16: the limit was lowered after it started")
    ps = [sys.executable, "-m", "cotenant.cli.main", "ps", "--dir", str(machine.folder)]
    said = subprocess.run(ps, capture_output=True, text=True, check=True).stdout
    assert "✗ ShareNotEnforced" in said
    assert "EXCLUSIVE_PROCESS prevents use of the GPU" in said.replace("\n", " ")


def test_a_killed_agent_leaves_nothing_that_the_next_one_does_not_take_over(machine: Machine) -> None:
    machine.run("kept")
    machine.run("gone")
    wait_for(lambda: saved(machine.folder, "kept").get("root"), 60, "it is written down")
    machine.agent.kill()
    machine.agent.wait()
    machine.end(machine.programs.pop())
    machine.start()
    wait_for(lambda: set(machine.rows()) == {"kept"}, 60)
    spaces = machine.order("namespace", "list", "--format=csv,noheader").splitlines()
    assert [line.split(",")[0] for line in spaces] == ["default", "kept"]
    wait_for(lambda: machine.rows()["kept"]["pids"], 60, "its program comes back")
    assert machine.rows()["kept"]["not_enforced"] == []
    machine.end(machine.programs.pop())
    wait_for(lambda: not machine.rows(), 60)
    wait_for(lambda: machine.order("server", "list") == "", 60, "and the daemon goes with the last tenant")
