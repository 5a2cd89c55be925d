"""Programs that use the GPU without the shim: a tenant's and others' are named, and with --strict they end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.agent.audit.neighbours import NAMES, Neighbour, Neighbours
from cotenant.agent.audit.processes import Unseen, UnseenWatch
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.owners.owners import Owners
from cotenant.agent.processes import key_of
from cotenant.agent.tenants.registry import Registry
from cotenant.core.errors import WorkError
from cotenant.devices.base import Gpu
from cotenant.native.libraries import SOFT_DRIVER, library_path

# Takes 4 MiB of the software GPU and waits for the end of its input. With an argument it loads the driver by that name,
# past the shim; without one it uses the shim.
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1] or None)
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 << 20)) == 0
print("has memory", flush=True)
sys.stdin.read()
"""


class Machine:
    """An agent on the software GPU and programs beside it."""

    def __init__(self, *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cot-"))
        state = {"COTENANT_SOFTGPU_STATE": str(self.folder / "gpu")}
        self.state = state
        self.environment = dict(os.environ) | state
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = open(self.folder / "agent.log", "wb")  # noqa: SIM115
        agent = [sys.executable, "-m", "cotenant.cli.main", "agent", "--gpus", "soft", "--dir", str(self.folder)]
        self.command = [*agent, *options]
        self.start_agent()

    def start_agent(self) -> None:
        self.agent = self.start(self.command, stderr=self.log)
        wait_for(self.answers)

    def start(self, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE, **more)
        self.started.append(process)
        return process

    def program(self, *before: str, shim: bool = False) -> subprocess.Popen[bytes]:
        """The program, behind other commands; returns once it has memory."""
        process = self.begun(*before, shim=shim)
        assert process.stdout is not None
        assert process.stdout.readline() == b"has memory\n"
        return process

    def begun(self, *before: str, shim: bool = False) -> subprocess.Popen[bytes]:
        """As `program`, but does not wait until the program has memory."""
        command = [sys.executable, "-c", PROGRAM, "" if shim else str(library_path(SOFT_DRIVER))]
        return self.start([*before, *command], stdout=subprocess.PIPE)

    def run(self, name: str) -> list[str]:
        return [sys.executable, "-m", "cotenant.cli.main", "run", "--dir", str(self.folder), "--name", name, "--"]

    def answers(self) -> bool:
        assert self.agent.poll() is None, (self.folder / "agent.log").read_text()
        try:
            self.list()
        except WorkError:
            return False
        return True

    def list(self) -> dict[str, Any]:
        with ControlClient(self.folder) as client:
            return client.call("list")

    def unseen(self) -> dict[str | None, list[int]]:
        """Processes that are named, by tenant."""
        found: dict[str | None, list[int]] = {}
        for row in self.list()["agent"]["unseen"]:
            found.setdefault(row["tenant"], []).append(row["pid"])
        return found

    def close(self) -> None:
        for process in reversed(self.started):
            if process.stdin is not None:
                process.stdin.close()
            process.terminate()
            process.wait(60)
        self.log.close()


@pytest.fixture
def machine() -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(*options: str) -> Machine:
        made.append(Machine(*options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_tenants_programs_without_the_shim_and_those_of_no_tenant_are_named(machine: Callable[..., Machine]) -> None:
    here = machine("--http", "127.0.0.1:0")
    clean = ["env", "-i", *(f"{key}={value}" for key, value in here.state.items())]
    here.program(*here.run("unset"), "env", "-u", "LD_PRELOAD")
    here.program(*here.run("bare"), *clean)
    here.program(*here.run("child"), "sh", "-c", 'env -i COTENANT_SOFTGPU_STATE="$COTENANT_SOFTGPU_STATE" "$@"; :', "x")
    other = here.program()
    wait_for(lambda: set(here.unseen()) == {"unset", "bare", "child", None})
    assert here.unseen()[None] == [other.pid]
    rows = {row["name"]: row for row in here.list()["tenants"]}
    for name in ("unset", "bare", "child"):
        (pid,) = here.unseen()[name]
        assert any(f"process {pid} (" in text and "without the agent" in text for text in rows[name]["warnings"])
    log = (here.folder / "agent.log").read_text()
    assert log.count("it belongs to no tenant") == 1, "said once"
    ps = [sys.executable, "-m", "cotenant.cli.main", "ps", "--dir", str(here.folder)]
    said = subprocess.run(ps, env=here.environment, capture_output=True, text=True, check=True).stdout
    assert f"not a tenant: process {other.pid}" in said
    assert " ".join(said.split()).count("without the agent: no limit applies") == 4
    assert other.stdin is not None
    other.stdin.close()
    wait_for(lambda: None not in here.unseen(), what="one that has ended is named no more")


def test_strict_ends_them_and_leaves_those_that_came_to_the_agent(machine: Callable[..., Machine]) -> None:
    here = machine("--strict")
    good = here.program(*here.run("good"), shim=True)
    # the agent may end them before they say that they have memory
    sly, other = here.begun(*here.run("sly")), here.begun()
    assert (sly.wait(60), other.wait(60)) == (137, -9)
    log = (here.folder / "agent.log").read_text()
    assert log.count("it was killed") == 2
    assert "tenant sly: process" in log
    assert good.poll() is None
    wait_for(lambda: [row["name"] for row in here.list()["tenants"]] == ["good"], what="nothing of sly is left")
    here.agent.kill()
    here.agent.wait()
    here.start_agent()  # the idle program may not have reconnected when the new agent looks
    assert here.begun().wait(60) == -9
    assert good.poll() is None
    assert [row["name"] for row in here.list()["tenants"]] == ["good"]


def test_a_process_counts_from_the_second_look_on(tmp_path: Path) -> None:
    watch = UnseenWatch(Registry((), {}), Owners(), tmp_path)
    sleeper = subprocess.Popen(["sleep", "60"])
    (tmp_path / str(sleeper.pid)).mkdir()
    (tmp_path / str(sleeper.pid) / "comm").write_text("sleep\n")
    try:
        longest_s = watch.next_look_s  # time between the start of a process and the look that finds it
        assert watch.look({"GPU-1": [sleeper.pid]}) == []
        assert longest_s + watch.next_look_s <= 1.5  # half a second is for the two looks themselves
        (row,) = watch.look({"GPU-1": [sleeper.pid], "GPU-2": [os.getpid()]})
        assert (row.process, row.program, row.tenant, row.uid) == (key_of(sleeper.pid), "sleep", "", os.getuid())
        assert watch.look({"GPU-1": [sleeper.pid]}) == [], "new only once"
        assert watch.now == [row]
        watch.expect([row.process])
        maps = tmp_path / str(sleeper.pid) / "maps"
        maps.write_text("7f00-7f01 r-xp 00000000 08:01 7 /opt/cotenant/libcotenant-shim.so\n")
        assert watch.look({"GPU-1": [sleeper.pid]}) == watch.now == []
        maps.write_text("7f00-7f01 r-xp 00000000 08:01 7 /usr/bin/sleep\n")  # as after an exec with a clean environment
        watch.look({"GPU-1": [sleeper.pid]})
        assert [row.process for row in watch.look({"GPU-1": [sleeper.pid]})] == [key_of(sleeper.pid)]
        assert watch.look({}) == []
        assert watch.now == []
    finally:
        sleeper.kill()
        sleeper.wait()


def beside(one: Machine, two: Machine) -> Machine:
    """Let the second agent own the software GPU of the first."""
    two.environment |= one.state
    two.agent.terminate()
    two.agent.wait(60)
    two.start_agent()
    return two


def test_a_tenant_of_another_agent_is_named_as_such(machine: Callable[..., Machine]) -> None:
    """Both agents own the same software GPU; a program past the shim of the other is no tenant of it."""
    one, two = machine(), machine()
    beside(one, two)
    one.program(*one.run("good"), shim=True)
    bare = one.program(*one.run("bare"), "env", "-u", "LD_PRELOAD")
    wait_for(lambda: len(two.list()["agent"]["unseen"]) == 2)
    assert sorted(str(row["agent"]) for row in two.list()["agent"]["unseen"]) == sorted(["None", str(one.folder)])
    wait_for(lambda: set(one.unseen()) == {"bare"})
    log = (two.folder / "agent.log").read_text()
    assert f"as a tenant of another agent ({one.folder}): neither agent knows" in log
    assert log.count("no limit applies to it; it belongs to no tenant") == 1
    ps = [sys.executable, "-m", "cotenant.cli.main", "ps", "--dir", str(two.folder)]
    said = subprocess.run(ps, env=two.environment, capture_output=True, text=True, check=True).stdout
    assert f"as a tenant of another agent ({one.folder})" in said
    assert bare.poll() is None


def test_two_agents_of_one_gpu_name_each_other(machine: Callable[..., Machine]) -> None:
    """Both say it before any program runs, in the log, in ps and on the live page, until one has ended."""
    one, apart = machine("--http", "127.0.0.1:0"), machine()
    two = beside(one, machine())
    for here, other in ((one, two), (two, one)):
        wait_for(lambda here=here: here.list()["agent"]["other_agents"])  # type: ignore[misc]
        (row,) = here.list()["agent"]["other_agents"]
        assert (row["pid"], row["folder"]) == (other.agent.pid, str(other.folder))
        assert row["gpus"] == [gpu["uuid"] for gpu in here.list()["agent"]["gpus"]]
        mine, others = f"(pid {here.agent.pid}, {here.folder})", f"(pid {other.agent.pid}, {other.folder})"
        said = f"GPU 0: managed by this agent {mine} and by another one {others}; neither knows"
        assert row["text"].startswith(said)
        assert (here.folder / "agent.log").read_text().count(said) == 1, "said once"
        for verb in ("ps", "top"):
            command = [sys.executable, "-m", "cotenant.cli.main", verb, "--dir", str(here.folder)]
            shown = subprocess.run(command, env=here.environment, capture_output=True, text=True, check=True).stdout
            assert " ".join(said.split()) in " ".join(shown.split())
    assert apart.list()["agent"]["other_agents"] == []
    two.agent.kill()
    two.agent.wait()
    wait_for(lambda: not one.list()["agent"]["other_agents"], what="an agent that has ended is named no more")


def test_strict_spares_tenants_of_another_agent_that_runs(machine: Callable[..., Machine]) -> None:
    """A program that only says that it belongs to another agent ends, as one past the shim does."""
    one = machine()
    two = beside(one, machine("--strict"))
    good = one.program(*one.run("good"), shim=True)
    wait_for(lambda: two.list()["agent"]["unseen"])
    bare = one.begun(*one.run("bare"), "env", "-u", "LD_PRELOAD")
    assert bare.wait(60) == 137
    assert good.poll() is None
    log = (two.folder / "agent.log").read_text()
    assert f"as a tenant of another agent ({one.folder}): neither agent knows" in log
    assert log.count("it was killed") == 1
    one.agent.kill()
    one.agent.wait()
    one.start_agent()  # the program is spared while its agent is restarted, although it has not reconnected
    assert one.begun().wait(60) == -9
    assert good.poll() is None


def test_strict_ends_what_no_running_agent_reports(tmp_path: Path) -> None:
    watch = UnseenWatch(Registry((), {}), Owners(), tmp_path)
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        key = key_of(sleeper.pid)
        watch.now = [Unseen(key, "GPU-1", "sleep", os.getuid(), "", agent="/run/other")]
        assert not watch.spared(watch.now[0])
        watch.vouch({sleeper.pid}, 100.0)
        assert watch.spared(watch.now[0])
        watch.vouch((), 109.0)
        assert watch.spared(watch.now[0]), "its agent may be restarting"
        watch.vouch((), 110.0)
        assert not watch.spared(watch.now[0]), "its agent is gone"
    finally:
        sleeper.kill()
        sleeper.wait()


def test_other_agents_are_read_from_the_list_of_sockets(tmp_path: Path) -> None:
    """Folders may contain spaces and slashes, or be missing; other names, GPUs and this agent itself do not count."""
    gpus = [Gpu(f"GPU-{number}", "H100", 80 << 30, number) for number in (3, 5)]
    names = tmp_path / "unix"
    here = Neighbours(tmp_path, gpus)
    try:
        flags = [line.split(b" @")[1].decode() for line in NAMES.read_bytes().splitlines() if b" @cotenant" in line]
        run = next(flag.split("/")[1] for flag in flags if flag.endswith(f"/{tmp_path}"))
        first, second = [flag for flag in flags if flag.startswith("cotenant-gpu/") and flag.endswith(run)]
        other, third = first.replace(run, "71-00ff"), second.replace(run, "72-00ff")
        foreign = "cotenant-gpu/0123456789abcdef/73-00ff"
        listed = [first, second, other, third, second.replace(run, "71-00ff"), foreign]
        strange = ["cotenant/71-00ff//srv/my agents/a", first.replace(run, "x"), "\udcff"]
        strange += ["cotenant-gpu/", "cotenant/9", "/run/cotenant/control.sock"]
        start = "0000000000000000: 00000002 00000000 00000000 0002 01 24"
        lines = (f"{start} @{name}" for name in [*listed, *strange])
        names.write_bytes(os.fsencode("\n".join(["Num RefCount Protocol Flags Type St Inode Path", *lines])))
        there = Neighbours(tmp_path, gpus, names)
        there.close()
        assert {each for each in there.look() if f"(pid {os.getpid()}, {tmp_path}) and by another one (pid 71," in each}
        found = {each.pid: each for each in there.now}
        assert found.pop(os.getpid()).gpus == ("GPU-3", "GPU-5")
        assert found.pop(71) == Neighbour(71, "/srv/my agents/a", ("GPU-3", "GPU-5"))
        assert [(each.folder, len(each.gpus)) for each in found.values()] == [("", 1)]
        assert there.look() == [], "said once"
        names.unlink()
        assert there.look() == []
    finally:
        here.close()
