"""Daemons: what a program leaves behind is its tenant, wherever it has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_harness import AgentProcess, saved
from fake_shim import FakeShim, register
from waiting import stays, wait_for

from cotenant.agent import processes
from cotenant.agent.processes import environment, in_group, is_zombie, key_of, variable
from cotenant.agent.tenants import orphans
from cotenant.agent.tenants.orphans import by_token

# Forks twice with a new session in between, as daemons do. The grandchild prints its pid, sleeps, and only then
# connects to the agent.
DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open(sys.argv[1] + ".new", "w").write(str(os.getpid())); os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(float(sys.argv[2]))
sys.path[:0] = sys.argv[4:]
from fake_shim import FakeShim
from pathlib import Path
shim = FakeShim(Path(sys.argv[3]), os.environ["COTENANT_TOKEN"])
open(sys.argv[1] + ".answer", "w").write(str(shim.answer["type"]) + " ")
time.sleep(60)
"""
HELLO_REPLY = 64


def start(agent: AgentProcess, folder: Path, after_s: float) -> tuple[int, str]:
    """A tenant `d` whose program is such a daemon and has ended. Returns the daemon's pid and the tenant's token."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
    told = folder / "pid"
    with agent.client() as launcher:
        token = register(launcher, "d")["token"]
        program = subprocess.Popen(
            [sys.executable, "-c", DAEMON, str(told), str(after_s), str(agent.folder), *here],
            env=os.environ | {"COTENANT_TOKEN": token},
        )
        launcher.call("started", name="d", pid=program.pid)
        assert program.wait(60) == 0
    return int(wait_for(lambda: told.exists() and told.read_text())), token


def test_a_daemon_that_uses_the_gpu_late_is_still_its_tenant(agent: AgentProcess, tmp_path: Path) -> None:
    """It has left parent, group and session, and says hello 1.5 s after its program ended."""
    daemon, _ = start(agent, tmp_path, 1.5)
    wait_for(lambda: agent.tenant("d")["root_pid"] is None)
    wait_for((tmp_path / "pid.answer").exists)
    wait_for(lambda: (tmp_path / "pid.answer").read_text())
    assert int((tmp_path / "pid.answer").read_text()) == HELLO_REPLY
    wait_for(lambda: agent.tenant("d")["pids"] == [daemon])
    os.kill(daemon, 9)
    wait_for(lambda: not agent.call("list")["tenants"], what="with the last of it the tenant goes")


def test_stop_finds_a_daemon_that_has_not_used_the_gpu(agent: AgentProcess, tmp_path: Path) -> None:
    daemon, token = start(agent, tmp_path, 60)
    # the process that has forked the daemon may not have ended yet
    wait_for(lambda: [key.pid for key in by_token([token])[token]] == [daemon])
    answer = agent.call("stop", name="d", grace_s=2.0)
    assert answer["left"] == []
    assert is_zombie(daemon)  # or it has been reaped
    wait_for(lambda: not agent.call("list")["tenants"])
    assert by_token([token]) == {}


def test_the_next_agent_knows_a_daemon_too(agent: AgentProcess, tmp_path: Path) -> None:
    daemon, token = start(agent, tmp_path, 60)
    # with it, the agent may have found the process that has forked it, which has ended meanwhile
    wait_for(
        lambda: daemon in [pid for pid, _ in saved(agent.folder, "d").get("processes", ())], what="it is written down"
    )
    agent.kill()
    agent.start()
    assert agent.tenant("d")["pids"] == []
    shim = FakeShim(agent.folder, token)
    assert shim.answer["type"] == HELLO_REPLY
    shim.close()
    wait_for(lambda: not agent.tenant("d")["pids"], what="the agent knows that this process has ended")
    stays(lambda: agent.tenant("d"))
    os.kill(daemon, 9)
    wait_for(lambda: not agent.call("list")["tenants"])


def test_a_dead_leader_that_nobody_reaps_keeps_no_tenant(agent: AgentProcess) -> None:
    """Its process group is there as long as somebody has not waited for it; what counts is who lives in it."""
    with agent.client() as launcher:
        for name, script, lives_on in (
            ("alone", "echo; exec sleep 600", False),
            ("led", "sleep 600 >/dev/null & echo; exec sleep 600", True),
        ):
            token = register(launcher, name)["token"]
            environment = os.environ | {"COTENANT_TOKEN": token}
            program = subprocess.Popen(
                ["sh", "-c", script], env=environment, start_new_session=True, stdout=subprocess.PIPE
            )
            launcher.call("started", name=name, pid=program.pid)
            assert program.stdout is not None
            program.stdout.readline()
            os.kill(program.pid, 9)
            wait_for(lambda: is_zombie(program.pid))  # noqa: B023 - called in this round
            if lives_on:
                stays(lambda: agent.tenant(name), 1.0)  # noqa: B023 - called in this round
            else:
                wait_for(lambda: not agent.call("list")["tenants"])
            os.killpg(program.pid, 9)
            wait_for(lambda: not agent.call("list")["tenants"])
            program.communicate()


@pytest.mark.parametrize("programs", [30])
def test_many_programs_that_end_at_once_cost_one_look(start_agent: Callable[..., AgentProcess], programs: int) -> None:
    """They leave nothing behind, and the agent forgets all of them soon."""
    agent = start_agent()
    with agent.client() as launcher:
        running = []
        for number in range(programs):
            token = register(launcher, f"t{number}")["token"]
            running.append(subprocess.Popen(["sleep", "600"], env=os.environ | {"COTENANT_TOKEN": token}))
            launcher.call("started", name=f"t{number}", pid=running[-1].pid)
        assert len(agent.call("list")["tenants"]) == programs
        for process in running:
            process.kill()
            process.wait()
        wait_for(lambda: not agent.call("list")["tenants"])


def test_the_environment_of_a_program_that_is_just_being_loaded_is_waited_for(tmp_path: Path) -> None:
    """Popen returns while execve still loads the program; /proc shows an empty environment until it has ended."""
    for _ in range(100):
        with subprocess.Popen(["sleep", "60"], env={"COTENANT_TOKEN": "mine"}) as process:
            assert variable(process.pid, "COTENANT_TOKEN") in ("mine", None), "None on a host that is too busy"
            process.kill()
    loading = tmp_path / "7"
    loading.mkdir()
    (loading / "exe").symlink_to("/bin/sleep")
    (loading / "environ").touch()
    for env_start, env_end in ((0, 0), (100, 104)):  # the second: execve has ended since the environment was read
        (loading / "stat").write_text("7 (a b) R " + "0 " * 46 + f"{env_start} {env_end} 0")
        with pytest.raises(TimeoutError, match="process 7 has been starting its program"):
            environment(7, tmp_path)
    (loading / "environ").write_bytes(b"A=1\0")
    assert environment(7, tmp_path) == [b"A=1", b""]


def test_a_program_without_an_environment_has_an_empty_one_and_a_zombie_has_none() -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        wait_for(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes() == b"sleep\0" + b"60\0")
        assert environment(process.pid) == [b""]
        process.kill()
        wait_for(lambda: is_zombie(process.pid))
        with pytest.raises(ProcessLookupError):
            environment(process.pid)


def test_a_process_that_loads_its_program_for_long_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a very busy host, execve may take longer than one reading of the environment waits."""
    readings: list[TimeoutError | list[bytes]] = [TimeoutError(), TimeoutError(), [b"COTENANT_TOKEN=mine", b""]]

    def loads(pid: int, proc: Path) -> list[bytes]:
        assert (pid, proc) == (os.getpid(), tmp_path)
        reading = readings.pop(0)
        if isinstance(reading, TimeoutError):
            raise reading
        return reading

    (tmp_path / str(os.getpid())).mkdir()
    monkeypatch.setattr(orphans, "environment", loads)
    monkeypatch.setattr(processes, "SEARCH_S", 60.0)
    assert [key.pid for key in by_token(["mine"], tmp_path)["mine"]] == [os.getpid()]
    monkeypatch.setattr(processes, "SEARCH_S", 0.0)
    readings[:] = [TimeoutError()]
    assert by_token(["mine"], tmp_path) == {}, "a search ends, even if execve hangs"


def test_a_process_that_is_started_during_the_search_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its parent was in the list that was read at first, and ends before it is looked at."""
    (tmp_path / "7").mkdir()
    mine = os.getpid()

    def ends(pid: int, proc: Path) -> list[bytes]:
        if pid == mine:
            return [b"COTENANT_TOKEN=mine", b""]
        (proc / str(mine)).mkdir()
        raise ProcessLookupError

    monkeypatch.setattr(orphans, "environment", ends)
    assert by_token(["mine"], tmp_path) == {"mine": {key_of(mine)}}

    lists = iter([["1"], ["1", str(mine)]])
    monkeypatch.setattr(processes.os, "listdir", lambda folder: next(lists))
    assert in_group(os.getpgrp())
