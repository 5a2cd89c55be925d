"""The agent as a process, spoken to by shims made of Python: turns, memory, limits, deaths, bad clients."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_harness import AgentProcess, declare, gpu_uuid
from fake_shim import FakeShim, register
from waiting import WITHIN_S, wait_for

from cotenant.abi.protocol import NO_DEADLINE, NO_SLOT, MemoryFamily, MessageType, ReleaseReason, Status
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.ipc import wire
from cotenant.core.errors import InputError
from cotenant.policy.shares import ENDLESS_NS

GIB = 1 << 30


def test_two_tenants_take_turns(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        tokens = [register(launcher, name, request=0.5)["token"] for name in ("a", "b")]
        a, b = (FakeShim(agent.folder, token) for token in tokens)
        for shim in (a, b):
            assert shim.attach(gpu_uuid(0)) == 0
        asked_ns = time.monotonic_ns()
        first = a.take()
        assert a.page is not None and a.page.slots[0].epoch == first["epoch"]  # noqa: PT018
        assert first["deadline_ns"] > asked_ns
        b.request()
        a.wait(MessageType.PAGE_UPDATE)  # `b` waits now, so `a` is told to give the GPU back when it is idle
        assert b.receive(0.1) == {}  # a GPU has one holder at a time
        assert a.page.slots[0].flags & SlotFlag.CONTENDED
        a.release(first["epoch"], reason=ReleaseReason.IDLE)
        second = b.wait(MessageType.TOKEN_GRANT)
        assert b.page is not None
        assert b.page.slots[0].epoch == second["epoch"]
        assert a.page.slots[0].epoch == 0
        shares = {name: agent.tenant(name)["gpus"][0] for name in ("a", "b")}
        assert shares["b"]["holding"]
        assert not shares["a"]["holding"]
        assert shares["a"]["turns"] == 1


def test_a_turn_ends_at_its_deadline_or_is_taken(agent: AgentProcess) -> None:
    """A holder that ignores its deadline gets REVOKE; its page says so before the message."""
    with agent.client() as launcher:
        a = FakeShim(agent.folder, register(launcher, "a")["token"])
        b = FakeShim(agent.folder, register(launcher, "b")["token"])
        a.attach(gpu_uuid(0))
        b.attach(gpu_uuid(0))
        grant = a.take()
        b.request()
        revoke = a.wait(MessageType.TOKEN_REVOKE)
        assert revoke["epoch"] == grant["epoch"]
        assert a.page is not None
        assert a.page.slots[0].epoch == 0
        assert time.monotonic_ns() >= grant["deadline_ns"]
        a.release(grant["epoch"], reason=ReleaseReason.REVOKED)
        b.wait(MessageType.TOKEN_GRANT)


def test_a_lone_tenant_is_never_stopped_and_soon_has_no_deadline(
    start_agent: Callable[..., AgentProcess], short_folder: Path
) -> None:
    """Its deadline is moved before it passes, for good while nobody else is there; whoever comes ends such a turn at
    once: the holder is told, gives back (nothing is in flight), and the other has the GPU."""
    agent = start_agent(config=declare(short_folder, "alone_after: 400ms"))
    with agent.client() as launcher:
        a = FakeShim(agent.folder, register(launcher, "a")["token"])
        a.attach(gpu_uuid(0))
        grant = moved = a.take()
        while moved["deadline_ns"] != NO_DEADLINE:
            assert moved["deadline_ns"] < time.monotonic_ns() + 300_000_000
            last, moved = moved, a.wait(MessageType.TOKEN_GRANT)
            assert last["deadline_ns"] < moved["deadline_ns"]
            assert moved["epoch"] == grant["epoch"]
        assert moved["deadline_ns"] == ENDLESS_NS
        assert a.receive(0.6) == {}  # no further message is expected
        b = FakeShim(agent.folder, register(launcher, "b")["token"])
        b.attach(gpu_uuid(0))
        b.request()
        revoke = a.wait(MessageType.TOKEN_REVOKE)
        assert revoke["epoch"] == grant["epoch"]
        a.release(grant["epoch"], reason=ReleaseReason.REVOKED)
        answer = b.wait(MessageType.TOKEN_GRANT)
        # the tenants have just met on this GPU, so it is shared by turns for a while
        assert answer["deadline_ns"] < time.monotonic_ns() + 10**9


def test_memory_is_one_budget_for_all_processes(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        token = register(launcher, "a", memory_bytes=4 * GIB)["token"]
        one, two = FakeShim(agent.folder, token), FakeShim(agent.folder, token)
        one.attach(gpu_uuid(0))
        two.attach(gpu_uuid(0))
        reply = one.reserve(3 * GIB)
        assert reply["status"] == Status.OK
        assert (reply["used_bytes"], reply["limit_bytes"]) == (3 * GIB, 4 * GIB)
        refused = two.reserve(2 * GIB)
        assert refused["status"] == Status.OUT_OF_MEMORY
        assert refused["used_bytes"] == 3 * GIB
        one.commit(reply["reservation"], 3 * GIB - 4096)  # the driver took a little less than was reserved
        wait_for(lambda: two.page.slots[0].memory_used_bytes == 3 * GIB - 4096)
        one.close()
        wait_for(lambda: two.page.slots[0].memory_used_bytes == 0, what="credited")
        assert two.reserve(4 * GIB)["status"] == Status.OK
        two.send(MessageType.MEMORY_QUERY, slot=0)  # a query for all memory names no memory family
        assert two.wait(MessageType.MEMORY_REPLY)["used_bytes"] == 4 * GIB
        assert any("out of memory" in text for text in agent.tenant("a")["warnings"])


def test_kill_9_of_the_holder_frees_turn_and_memory(agent: AgentProcess) -> None:
    child = (
        "import sys, time; sys.path.insert(0, sys.argv[3]); from pathlib import Path; from fake_shim import FakeShim\n"
        "s = FakeShim(Path(sys.argv[1]), sys.argv[2]); s.attach(bytes([1]) * 16); s.take()\n"
        "s.commit(s.reserve(1 << 30)['reservation'], 1 << 30); print('held', flush=True); time.sleep(60)"
    )
    with agent.client() as launcher:
        token = register(launcher, "victim")["token"]
        other = FakeShim(agent.folder, register(launcher, "other")["token"])
        other.attach(gpu_uuid(0))
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(agent.folder), token, str(Path(__file__).parent)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        wait_for(lambda: agent.tenant("victim")["gpus"][0]["memory_used_bytes"] == GIB)
        other.request()
        process.kill()
        other.wait(MessageType.TOKEN_GRANT)
        wait_for(lambda: agent.tenant("victim")["gpus"][0]["memory_used_bytes"] == 0)
        process.wait()


def test_set_acts_at_once(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        a = FakeShim(agent.folder, register(launcher, "a", limit=0.5, memory_bytes=GIB)["token"])
        a.attach(gpu_uuid(0))
        answer = agent.call("set", name="a", limit=0.8, memory_bytes=2 * GIB)
        assert answer["limit"] == 0.8
        assert a.page is not None
        assert a.page.slots[0].memory_limit_bytes == 2 * GIB
        with pytest.raises(InputError, match="over its own limit"):
            agent.call("set", name="a", request=0.9)
        with pytest.raises(InputError, match="there is no tenant 'nobody'"):
            agent.call("set", name="nobody", limit=0.5)


def test_a_launcher_that_goes_takes_what_it_never_started(start_agent: Callable[..., AgentProcess]) -> None:
    agent = start_agent(gpus=2)
    with agent.client() as launcher:
        register(launcher, "a", request=0.7)
        second = register(launcher, "b", request=0.7)
        for name, words in (("a", "named a is running"), ("x" * 64, "not a tenant name")):
            with pytest.raises(InputError, match=words):
                register(launcher, name)
        assert len(agent.call("list")["tenants"]) == 2
        gpu = FakeShim(agent.folder, second["token"])
        gpu.send(MessageType.GPU_ATTACH, {"uuid": bytes([1]) * 16})
        assert gpu.wait(MessageType.GPU_REPLY)["status"] == Status.DENIED  # tenant b was placed on the other GPU
        gpu.close()
    wait_for(lambda: not agent.call("list")["tenants"])


BAD = [
    ("garbage", lambda s: s.send(b"\xff" * 256), Status.BAD_MESSAGE, "magic"),
    ("short", lambda s: s.send(b"hello"), Status.BAD_MESSAGE, "256 bytes, not 5"),
    ("long", lambda s: s.send(bytes(4000)), Status.BAD_MESSAGE, "not 257"),
    ("version", lambda s: s.send(_hello(version=9)), Status.BAD_VERSION, "version 9"),
    ("no token", lambda s: s.send(_hello()), Status.UNKNOWN_TENANT, "belongs to no tenant"),
    ("forged", lambda s: s.send(_hello(token=b"0" * 48)), Status.UNKNOWN_TENANT, "stopped, or the token is forged"),
    ("oversized name", lambda s: s.send(_hello(token=b"n" * 64)), Status.BAD_MESSAGE, "too long"),
    ("no hello", lambda s: s.send(wire.pack(MessageType.TOKEN_REQUEST, {}, slot=0)), Status.BAD_MESSAGE, "HELLO"),
]


def _hello(version: int = 1, token: bytes = b"") -> bytes:
    data = bytearray(wire.pack(MessageType.HELLO, {"pid": 1, "token": token, "program": b"evil"}))
    data[4:6] = version.to_bytes(2, sys.byteorder)
    return bytes(data)


@pytest.mark.parametrize(("name", "attack", "status", "words"), BAD, ids=[row[0] for row in BAD])
def test_bad_clients_are_told_and_dropped(
    agent: AgentProcess, name: str, attack: object, status: Status, words: str
) -> None:
    with agent.client() as launcher:
        good = FakeShim(agent.folder, register(launcher, "good")["token"])
        good.attach(gpu_uuid(0))
        grant = good.take()
        bad = FakeShim(agent.folder, hello=False)
        attack(bad.socket)  # type: ignore[operator]
        answer = bad.receive()
        assert answer["type"] == MessageType.ERROR
        assert answer["status"] == status
        assert words in answer["text"]
        assert bad.receive()["type"] == 0  # the agent has closed the connection
        good.release(grant["epoch"])
        good.take()  # the other connection is not affected
        wait_for(lambda: agent.call("status")["connections"] == 1)


def test_after_hello_bad_messages_end_only_that_process(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        good = FakeShim(agent.folder, register(launcher, "good")["token"])
        good.attach(gpu_uuid(0))
        token = register(launcher, "bad")["token"]
        attacks = [
            wire.pack(MessageType.TOKEN_REQUEST, {}, slot=3),
            wire.pack(MessageType.HELLO, {}),
            wire.pack(MessageType.TOKEN_GRANT, {}, slot=0),
            wire.pack(MessageType.MEMORY_RESERVE, {"family": 99, "bytes": 1}, slot=0),
            wire.pack(MessageType.MEMORY_RESERVE, {"family": 1, "bytes": 2**63}, slot=0),
            os.urandom(256),
        ]
        for attack in attacks:
            bad = FakeShim(agent.folder, token)
            bad.attach(gpu_uuid(0))
            bad.socket.send(attack)
            assert bad.receive()["type"] == MessageType.ERROR
            assert bad.receive()["type"] == 0
        # false reports that are no protocol errors change nothing
        liar = FakeShim(agent.folder, token)
        liar.attach(gpu_uuid(0))
        held = good.take()
        liar.release(held["epoch"])  # the epoch is that of another tenant's turn
        liar.send(MessageType.MEMORY_RELEASE, {"family": 1, "bytes": GIB}, 0)
        assert liar.reserve(GIB)["used_bytes"] == GIB  # releasing memory that was never taken has given no credit
        assert agent.tenant("good")["gpus"][0]["holding"]


def test_someone_elses_pid_is_not_believed(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        token = register(launcher, "a")["token"]
        shim = FakeShim(agent.folder, token, pid=1)
        shim.attach(gpu_uuid(0))
        assert agent.tenant("a")["pids"] == [os.getpid()]


def test_what_a_process_writes_into_its_page_gives_it_no_turn(agent: AgentProcess) -> None:
    """The page is the process's to write: a flag that it sets there must not be what the agent decides by."""
    with agent.client() as launcher:
        good, liar = (FakeShim(agent.folder, register(launcher, name)["token"]) for name in ("good", "liar"))
        for shim in (good, liar):
            shim.attach(gpu_uuid(0))
        good.take()
        assert liar.page is not None
        liar.page.slots[0].flags |= SlotFlag.UNGATED
        liar.request()
        liar.send(MessageType.MEMORY_QUERY, slot=0)
        # the agent answers in order, so it has refused the turn
        assert liar.receive()["type"] == MessageType.MEMORY_REPLY, "somebody else has the turn"


def test_a_process_that_does_not_read_is_dropped_alone(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        token = register(launcher, "deaf")["token"]
        good = FakeShim(agent.folder, register(launcher, "good")["token"])
        good.attach(gpu_uuid(0))
        deaf = FakeShim(agent.folder, token)
        deaf.attach(gpu_uuid(0))
        deaf.socket.setblocking(False)
        message = wire.pack(MessageType.MEMORY_QUERY, {"family": 1}, slot=0)
        sent = 0
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            try:
                deaf.socket.send(message)
                sent += 1
            except BlockingIOError:
                time.sleep(0.001)
            except (BrokenPipeError, ConnectionResetError):
                break
        else:
            raise AssertionError(f"still connected after {sent} unread answers")
        good.take()
        assert "messages unread" in agent.said()


def test_geminis_file_is_watched(start_agent: Callable[..., AgentProcess], short_folder: Path) -> None:
    path = short_folder / "resource-config.txt"
    path.write_text(f"2\npod-a 0.5 0.8 {2 * GIB}\npod-b 0.3 1.0 {GIB}\n")
    agent = start_agent(config=f"gemini:{path}")
    row = agent.tenant("pod-a")
    assert (row["request"], row["limit"], row["gpus"][0]["memory_limit_bytes"]) == (0.5, 0.8, 2 * GIB)
    with agent.client() as launcher:
        shim = FakeShim(agent.folder, register(launcher, "pod-a", limit=None)["token"])
        shim.attach(gpu_uuid(0))
        turns = shim.take()["epoch"]
        new = short_folder / "new"
        new.write_text(f"2\npod-a 0.6 0.9 {3 * GIB}\npod-c 0.1 1.0 {GIB}\n")
        os.replace(new, path)  # a watch of the file itself would miss the rename
        wait_for(lambda: agent.tenant("pod-a")["limit"] == 0.9)
        assert shim.page is not None
        # the limit is changed at once, not when the program is next started
        assert shim.page.slots[0].memory_limit_bytes == 3 * GIB
        assert shim.page.slots[0].epoch == turns  # the current turn continues
    names = {tenant["name"] for tenant in agent.call("list")["tenants"]}
    assert names == {"pod-a", "pod-c"}


def test_a_flood_of_silent_connections_shuts_nobody_else_out(agent: AgentProcess) -> None:
    """One process may have 32 connections that have not introduced themselves; they end after ten seconds."""
    code = (
        "import socket, sys, time; held = []\n"
        "for _ in range(200):\n"
        "    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); held.append(s)\n"
        "print('flooding', flush=True); time.sleep(30)"
    )
    socket_path = str(agent.folder / "agent.sock")
    process = subprocess.Popen([sys.executable, "-c", code, socket_path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"flooding\n"

        def counts() -> tuple[int, int]:
            status = agent.call("status")
            return status["refused_connections"], status["connections"]

        wait_for(lambda: counts() == (168, 32))
        with agent.client() as launcher:
            good = FakeShim(agent.folder, register(launcher, "good")["token"])
            good.attach(gpu_uuid(0))
            good.take()
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: agent.call("status")["connections"] <= 1)


def test_control_clients_that_talk_nonsense_get_an_answer(agent: AgentProcess) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(str(agent.folder / "control.sock"))
        file = raw.makefile("rb")
        for line, words in [(b"\x00\xff\n", "JSON"), (b"[]\n", "op"), (b'{"op": "fly"}\n', "unknown op")]:
            raw.sendall(line)
            assert words in json.loads(file.readline())["error"]
        raw.sendall(b"x" * (1 << 17) + b"\n")
        assert "at most 65536 bytes" in json.loads(file.readline())["error"]
    assert agent.call("status")["pid"] == agent.process.pid


def test_host_memory_that_a_process_brings_along_is_counted(agent: AgentProcess) -> None:
    """What a process had pinned before the agent was restarted, it tells as a sum; then it goes on by differences."""
    with agent.client() as launcher:
        shim = FakeShim(agent.folder, register(launcher, "a")["token"])
        where = NO_SLOT, MemoryFamily.HOST
        shim.send(MessageType.MEMORY_STATE, {"family": MemoryFamily.HOST, "bytes": 3 * GIB})
        shim.commit(shim.reserve(GIB, *where)["reservation"], GIB, *where)
        shim.send(MessageType.MEMORY_RELEASE, {"family": MemoryFamily.HOST, "bytes": 2 * GIB})
        wait_for(lambda: agent.tenant("a")["host_pinned_bytes"] == 2 * GIB)
        shim.close()
        wait_for(lambda: agent.tenant("a")["host_pinned_bytes"] == 0)
