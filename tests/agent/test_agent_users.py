"""Who may do what on an agent that several users can reach."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess, declare
from fake_shim import FakeShim, register
from waiting import wait_for

from cotenant.abi.protocol import FLOOR_SOCKET, MessageType
from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import InputError, WorkError


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="cot-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_have_what_the_configuration_gives_them(open_folder: Path) -> None:
    """User 65534 talks to root's agent: its own tenant yes, others no, the kernel's word against a stolen token."""
    text = "tenants: [{name: mine, request: 20%, user: 65534}, {name: theirs, request: 20%}]\n"
    agent = AgentProcess(open_folder, config=declare(open_folder, text))
    for name in ("agent.sock", "control.sock"):
        os.chmod(agent.folder / name, 0o666)
    with agent.client() as launcher:
        stolen = register(launcher, "theirs", limit=None)["token"]
    os.seteuid(65534)
    try:
        client = agent.client()
        with client:
            token = register(client, "mine", limit=None)["token"]
            own = FakeShim(agent.folder, token)
            assert own.answer["type"] == MessageType.HELLO_REPLY
            thief = FakeShim(agent.folder, stolen)
            assert thief.answer["type"] == MessageType.ERROR
            assert "user 65534 may not run as tenant theirs" in thief.answer["text"]
            with pytest.raises(InputError, match="belongs to another user"):
                register(client, "theirs", limit=None)
            with pytest.raises(InputError, match="may only start tenants declared"):
                register(client, "new")
            with pytest.raises(InputError, match="may not change shares"):
                client.call("set", name="mine", limit=0.9)
            with pytest.raises(InputError, match="belongs to another user"):
                client.call("stop", name="theirs")
            assert len(client.call("list")["tenants"]) == 2
    finally:
        os.seteuid(0)
        agent.close()


def test_only_the_launchers_own_child_becomes_a_tenants_program(agent: AgentProcess) -> None:
    """`stop` signals a tenant's program and everything below it, as the agent's user: not what a caller names."""
    bystander = subprocess.Popen(["sleep", "60"])
    liar = "import sys\nfrom pathlib import Path\nfrom cotenant.agent.ipc.client import ControlClient\n" + (
        "client = ControlClient(Path(sys.argv[1])); client.call('register', tenant={'name': 'x'})\n"
        "for pid in (int(sys.argv[2]), 1, -1, 0, 'x', None, True, 1 << 80):\n"
        "    try: client.call('started', name='x', pid=pid)\n"
        "    except Exception as error: print(error)\n"
        "    else: print('believed', pid)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", liar, str(agent.folder), str(bystander.pid)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        assert len(lines) == 8
        assert f"process {bystander.pid} was not started by process" in lines[0]
        assert not any("believed" in line for line in lines)
        with agent.client() as client:
            assert all(row["root_pid"] is None for row in client.call("list")["tenants"])
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_orders_with_odd_numbers_change_nothing(agent: AgentProcess) -> None:
    nan = float("nan")
    with agent.client() as client:
        register(client, "a", request=0.2)
        for order in (
            {"op": "set", "limit": "0.5"},
            {"op": "set", "priority": "x"},
            {"op": "set", "priority": 0.5},
            {"op": "set", "weight": True},
            {"op": "set", "memory_bytes": "1"},
            {"op": "set", "limit": nan},
            {"op": "stop", "grace_s": nan},
            {"op": "stop", "grace_s": 1e99},
            {"op": "stop", "grace_s": "x"},
            {"op": "stop", "grace_s": -1},
            {"op": "register", "tenant": {"name": "b"}, "timeout_s": "x"},
            {"op": "register", "tenant": {"name": "b"}, "timeout_s": nan},
        ):
            with pytest.raises(InputError):
                client.call(**({"name": "a"} | order))
        rows = client.call("list")["tenants"]
        assert [(row["name"], row["request"], row["limit"], row["priority"]) for row in rows] == [("a", 0.2, 1.0, 0)]


def test_stop_waits_for_a_program_that_is_being_started(agent: AgentProcess) -> None:
    """Between `register` and `started` there is no process yet: stop ends the program that comes."""
    with agent.client() as launcher, agent.client() as other:
        register(launcher, "a")
        child = subprocess.Popen(["sleep", "60"], process_group=0)
        try:
            timer = threading.Timer(0.3, lambda: launcher.call("started", name="a", pid=child.pid))
            timer.start()
            reaper = threading.Thread(target=child.wait)
            reaper.start()
            answer = other.call("stop", name="a", grace_s=60.0)
            assert answer["stopped"] == 1
            reaper.join()
            assert child.returncode == -signal.SIGTERM
        finally:
            timer.join()
            child.kill()


def test_one_user_cannot_take_all_descriptors(agent: AgentProcess) -> None:
    """Control connections are a quarter of the agent's descriptors: beyond them a sentence, and shims still get in."""
    with agent.client() as first:
        pid = first.call("status")["pid"]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (400, 400))
        token = register(first, "a")["token"]
        held = [ControlClient(agent.folder) for _ in range(98)]
        for client in held:
            client.call("status")
        held += [ControlClient(agent.folder) for _ in range(2)]
        held[-2].call("status")
        with pytest.raises(WorkError, match="already has 100 connections"):
            held[-1].call("status")
        assert FakeShim(agent.folder, token).answer["type"] == MessageType.HELLO_REPLY
        for client in held:
            client.close()


@pytest.mark.parametrize("name", ["agent.sock", FLOOR_SOCKET])
def test_an_agent_out_of_descriptors_waits_instead_of_spinning(agent: AgentProcess, name: str) -> None:
    """A connection that cannot be accepted stays ready: who asks again at once keeps a processor busy with it."""
    with agent.client() as client:
        pid = client.call("status")["pid"]
        before = sockets(pid)
        # no number is below this limit: one that the agent gives back meanwhile cannot be taken for the connection
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 4096))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
            waiting.connect(str(agent.folder / name))
            time.sleep(0.2)
            used_s = processor_s(pid)
            time.sleep(1.0)
            assert processor_s(pid) - used_s < 0.3
            assert sockets(pid) <= before
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 4096))
            wait_for(lambda: sockets(pid) - before, what="the connection is taken")


def sockets(pid: int) -> set[str]:
    """A process's open sockets, as /proc names them."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed since
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {name for name in found if name.startswith("socket:")}


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
