"""Measures how many requests for turns the agent serves with 1,000 tenants connected, compared with a plain echo
server.

Both servers get the same traffic from the same client. A cycle is what a shim sends at a turn's end: TOKEN_RELEASE and
TOKEN_REQUEST, answered by a TOKEN_GRANT (to whoever is next). Processor time is counted, so a busy machine changes the
wall-clock rate but not the figure that is compared.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotenant.abi.protocol import MESSAGE_BYTES, MessageType
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, register

TENANTS = 1000
GPUS = 8
SECONDS = 4.0

ECHO = """
import select, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1]); listener.listen(4096)
poll = select.epoll(); poll.register(listener, select.EPOLLIN)
peers = {}
print("ready", flush=True)
while True:
    for fd, _ in poll.poll():
        if fd == listener.fileno():
            peer, _ = listener.accept()
            peers[peer.fileno()] = peer
            poll.register(peer, select.EPOLLIN)
            continue
        data = peers[fd].recv(257)
        if not data:
            poll.unregister(fd); peers.pop(fd).close()
        elif data[6] == 3:  # every request is answered at once, every release swallowed
            peers[fd].send(data)
"""


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drive(sockets: dict[int, socket.socket], seconds: float) -> tuple[int, float]:
    """Answer every grant with a release and a new request; returns grants and wall time."""
    poll = select.epoll()
    for fd in sockets:
        poll.register(fd, select.EPOLLIN)
    request = wire.pack(MessageType.TOKEN_REQUEST, {}, slot=0)
    epoch_at = wire.HEADER.size
    release = bytearray(wire.pack(MessageType.TOKEN_RELEASE, {"reason": 1, "drained": 1, "wants_more": 1}, slot=0))
    for sock in sockets.values():
        sock.send(request)
    grants = 0
    began = time.monotonic()
    until = began + seconds
    while time.monotonic() < until:
        for fd, _ in poll.poll(0.5):
            data = sockets[fd].recv(MESSAGE_BYTES)
            kind = data[6]
            if kind not in (MessageType.TOKEN_GRANT, MessageType.TOKEN_REQUEST):
                continue
            grants += 1
            release[epoch_at : epoch_at + 8] = data[epoch_at : epoch_at + 8]
            sockets[fd].send(release)
            sockets[fd].send(request)
    return grants, time.monotonic() - began


def measure_agent(folder: Path) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "agent"))
    from agent_harness import AgentProcess, gpu_uuid
    from fake_shim import FakeShim

    agent = AgentProcess(folder, gpus=GPUS)
    sockets: dict[int, socket.socket] = {}
    try:
        with ControlClient(folder) as launcher:
            began = time.monotonic()
            for index in range(TENANTS):
                spec = TenantSpec(f"t{index}", request=0.5 / TENANTS * GPUS, gpus=(str(index % GPUS),))
                shim = FakeShim(folder, register(launcher, Launch(folder, spec, []))["token"])
                shim.attach(gpu_uuid(index % GPUS))
                sockets[shim.socket.fileno()] = shim.socket
            connected_s = time.monotonic() - began
            before = cpu_s(agent.process.pid)
            grants, wall_s = drive(sockets, SECONDS)
            used = cpu_s(agent.process.pid) - before
            assert len(agent.call("list")["tenants"]) == TENANTS
            return {"connect_s": connected_s, "rate": grants / wall_s, "cpu_us": used / grants * 1e6}
    finally:
        for sock in sockets.values():
            sock.close()
        agent.close()


def measure_echo(folder: Path) -> dict[str, float]:
    path = folder / "echo.sock"
    process = subprocess.Popen([sys.executable, "-c", ECHO, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    sockets: dict[int, socket.socket] = {}
    try:
        for _ in range(TENANTS):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(str(path))
            sockets[sock.fileno()] = sock
        before = cpu_s(process.pid)
        grants, wall_s = drive(sockets, SECONDS)
        return {"rate": grants / wall_s, "cpu_us": (cpu_s(process.pid) - before) / grants * 1e6}
    finally:
        process.kill()
        process.wait()
        for sock in sockets.values():
            sock.close()


@pytest.mark.slow
def test_a_thousand_tenants_and_twenty_thousand_requests_a_second(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    agent, echo = measure_agent(folder), measure_echo(tmp_path)
    print(f"\n{TENANTS} tenants on {GPUS} GPUs: {agent['rate']:.0f} requests/s, {agent['cpu_us']:.1f} us of CPU each")
    print(
        f"({1e6 / agent['cpu_us']:.0f}/s per core); bare echo: {echo['rate']:.0f}/s, {echo['cpu_us']:.1f} us;"
        f" ratio of CPU {agent['cpu_us'] / echo['cpu_us']:.2f}; all connected in {agent['connect_s']:.1f} s"
    )
    assert 1e6 / agent["cpu_us"] >= 20_000
