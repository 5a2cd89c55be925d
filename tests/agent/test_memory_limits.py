"""Limits on memory that a tenant cannot lift: by kernel and driver, on the software GPU's machine with driver 615."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_node import wait_for

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import InputError, WorkError
from cotenant.native.libraries import SOFT_DRIVER, library_path
from cotenant.softgpu.cgroups import FolderCgroups, region

MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 256  # MiB that one context takes on the software GPU
# Takes the MiB that each input line asks for, without the shim. A line may name a context, which is made when it is
# first named ("0 2": 0 MiB in the second context).
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
contexts = {}
for line in sys.stdin:
    mib, number = (line.split() + ["1"])[:2]
    code = 0
    if number not in contexts:
        context = ctypes.c_void_p()
        cuda.cuInit(0)
        code = cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
        contexts[number] = context
    pointer = ctypes.c_uint64()
    cuda.cuCtxSetCurrent(contexts[number])
    if int(mib) and not code:
        code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(mib) << 20))
    print(code, flush=True)
"""
SHIMMED = PROGRAM.replace("sys.argv[1]", "None")  # the same program, but through the shim


class Machine:
    """An agent on a software GPU of 16 GiB under control groups of its own, and programs beside it."""

    def __init__(self, *, dmem: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cot-"))
        self.groups = FolderCgroups.make(self.folder / "cgroup", dmem=dmem, memory_bytes=16 * GIB)
        self.machine = {
            "COTENANT_SOFTGPU_STATE": str(self.folder / "gpu"),
            "COTENANT_SOFTGPU_CGROUPS": str(self.groups.root),
        }
        self.started: list[subprocess.Popen[Any]] = []
        self.log = open(self.folder / "agent.log", "wb")  # noqa: SIM115
        self.start_agent()

    def start_agent(self) -> None:
        command = [sys.executable, "-m", "cotenant.cli.main", "agent", "--gpus", "soft", "--dir", str(self.folder)]
        self.agent = self.start(command, stderr=self.log)
        wait_for(self.answers, 60)

    def answers(self) -> bool:
        assert self.agent.poll() is None, (self.folder / "agent.log").read_text()
        with contextlib.suppress(WorkError):
            return bool(self.call("status"))
        return False

    def start(self, command: list[str], **more: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, env=os.environ | self.machine, stdin=subprocess.PIPE, **more)
        self.started.append(process)
        return process

    def run(self, name: str, memory: str, *before: str, program: str = PROGRAM) -> subprocess.Popen[str]:
        """A tenant's program behind other commands."""
        share = ["--dir", str(self.folder), "--name", name, *(["--memory", memory] if memory else ["--join"])]
        inner = [sys.executable, "-c", program, str(library_path(SOFT_DRIVER))]
        command = [sys.executable, "-m", "cotenant.cli.main", "run", *share, "--", *before, *inner]
        return self.start(command, stdout=subprocess.PIPE, text=True)

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        with ControlClient(self.folder) as client:
            return client.call(op, **order)

    def tenant(self, name: str) -> dict[str, Any]:
        return next(row for row in self.call("list")["tenants"] if row["name"] == name)

    def leaf(self, name: str) -> Path:
        (found,) = self.groups.root.glob(f"cotenant-*-{name}-*")
        return found

    def gone(self, name: str) -> bool:
        return not list(self.groups.root.glob(f"cotenant-*-{name}-*"))

    def warned(self, name: str, text: str) -> bool:
        return any(text in warning for warning in self.tenant(name)["warnings"])

    def written(self) -> set[str]:
        """Tenants whose programs an agent that starts now would know."""
        rows = json.loads((self.folder / "state.json").read_text())["tenants"]
        return {row["spec"]["name"] for row in rows if row["root"] and row["held"]}

    def close(self) -> None:
        for process in reversed(self.started):
            if process.stdin is not None:
                process.stdin.close()
            if process is self.agent:
                process.terminate()
            process.wait(60)
        self.log.close()


def take(program: subprocess.Popen[str], mib: int, context: int = 1) -> int:
    """Let a program take that much: its CUresult."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{mib} {context}\n")
    program.stdin.flush()
    return int(program.stdout.readline())


def end(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(60) == 0


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[..., Machine]]:
    machines: dict[bool, Machine] = {}

    def make(*, dmem: bool) -> Machine:
        if dmem not in machines:
            machines[dmem] = Machine(dmem=dmem)
        return machines[dmem]

    yield make
    for machine in machines.values():
        machine.close()


@pytest.fixture
def kernel(made: Callable[..., Machine]) -> Machine:
    return made(dmem=True)


@pytest.fixture
def driver(made: Callable[..., Machine]) -> Machine:
    return made(dmem=False)


def test_limit_is_there_before_the_program_and_gone_after_it(kernel):
    program = kernel.run("one", "1GiB")
    assert take(program, 1024 - CONTEXT) == 0
    assert take(program, 1) == 2
    assert kernel.tenant("one")["gpus"][0]["memory_by"] == "kernel"
    leaf = kernel.leaf("one")
    for name in ("dmem.max", "dmem.min"):
        assert kernel.groups.read(leaf, name).split() == [region(0), str(GIB)]
    end(program)
    wait_for(lambda: kernel.gone("one"), 60)


def test_limit_is_raised_and_lowered_while_the_program_runs(kernel):
    program = kernel.run("two", "1GiB")
    assert take(program, 1025 - CONTEXT) == 2
    raised = kernel.call("set", name="two", memory_bytes=2 * GIB)
    assert (raised["memory_bytes"], raised["holds"]) == (2 * GIB, "at once")
    assert take(program, 2048 - CONTEXT) == 0
    lowered = kernel.call("set", name="two", memory_bytes=GIB)["holds"]
    assert "the tenant keeps the 2.0 GiB that it uses on GPU 0, but its new allocations fail until it uses" in lowered
    assert "less than 1.0 GiB" in lowered
    assert take(program, 1) == 2
    end(program)


KEPT = [f'{name}="${name}"' for name in ("COTENANT_SOFTGPU_STATE", "COTENANT_SOFTGPU_CGROUPS")]


WAYS = {  # ways in which a process may escape the shim
    "child": ("sh", "-c", '"$@"; :', "fork"),
    "clean": ("sh", "-c", f'exec env -i {" ".join(KEPT)} "$@"', "clean"),
    "session": ("setsid", "--wait"),
}


def test_programs_that_get_away_from_the_shim_are_held_and_named(kernel):
    programs = {name: kernel.run(name, "1GiB", *before) for name, before in WAYS.items()}
    for program in programs.values():
        assert take(program, 1025 - CONTEXT) == 2
        assert take(program, 1024 - CONTEXT) == 0
    for name, program in programs.items():
        wait_for(lambda: kernel.warned(name, "without the agent: no limit except on memory applies to it"), 60)  # noqa: B023
        end(program)


def test_second_context_and_second_process_have_no_memory_of_their_own(kernel):
    program = kernel.run("pair", "1GiB")
    assert take(program, 0, context=2) == 0
    assert take(program, 1024 - CONTEXT) == 2  # two contexts are charged
    other = kernel.run("pair", "")
    assert take(other, 600) == 2  # now three contexts are charged
    assert take(program, 1024 - 3 * CONTEXT) == 0
    for each in (other, program):
        end(each)


def test_limit_that_root_in_a_container_raises_is_set_back_and_named(kernel):
    program = kernel.run("raiser", "1GiB")
    assert take(program, 0) == 0
    leaf = kernel.leaf("raiser")
    kernel.groups.write(leaf, "dmem.max", f"{region(0)} {16 * GIB}")
    wait_for(lambda: kernel.groups.read(leaf, "dmem.max").split() == [region(0), str(GIB)], 60)
    wait_for(lambda: kernel.warned("raiser", "on GPU 0 from 1.00 GiB to 16.00 GiB: it was restored"), 60)
    assert take(program, 1025 - CONTEXT) == 2
    end(program)


def test_process_that_leaves_its_group_is_put_back_and_named(kernel):
    program = kernel.run("leaver", "1GiB", program=SHIMMED)
    assert take(program, 0) == 0
    (pid,) = kernel.tenant("leaver")["pids"]
    kernel.groups.enter(kernel.groups.root, pid)
    wait_for(lambda: kernel.groups.of(pid) == kernel.leaf("leaver"), 60)
    wait_for(lambda: kernel.warned("leaver", f"process {pid} left the tenant's control group"), 60)
    end(program)


def test_agent_that_died_finds_limits_and_groups_again(kernel):
    program, over = kernel.run("stays", "1GiB"), kernel.run("goes", "1GiB")
    assert take(program, 0) == take(over, 0) == 0
    wait_for(lambda: {"stays", "goes"} <= kernel.written(), 60)
    kernel.agent.kill()
    kernel.agent.wait()
    end(over)
    kernel.start_agent()
    wait_for(lambda: kernel.gone("goes"), 60)
    kernel.call("set", name="stays", memory_bytes=2 * GIB)
    assert take(program, 2048 - CONTEXT) == 0
    assert take(program, 1) == 2
    end(program)
    wait_for(lambda: kernel.gone("stays"), 60)


def test_driver_limits_where_the_kernel_does_not(driver):
    program = driver.run("one", "1GiB")
    assert take(program, 1025 - CONTEXT) == 2
    assert take(program, 512) == 0
    assert driver.tenant("one")["gpus"][0]["memory_by"] == "driver"
    refused = "one uses 768.0 MiB of GPU 0, contexts included, so the driver refuses a limit of 512.0 MiB"
    with pytest.raises(InputError, match=refused):
        driver.call("set", name="one", memory_bytes=GIB // 2)
    assert driver.tenant("one")["gpus"][0]["memory_limit_bytes"] == GIB
    driver.call("set", name="one", memory_bytes=2 * GIB)
    assert take(program, 1024) == 0
    end(program)
    wait_for(lambda: driver.gone("one"), 60)
