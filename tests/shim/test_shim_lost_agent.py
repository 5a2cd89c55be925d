"""An agent that hangs, or goes and comes back: what a program that runs notices, and what the agent is told."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fake_agent import Client, FakeAgent
from shim_tenants import Tenants
from waiting import wait_for

from cotenant.abi.protocol import NO_SLOT, MemoryFamily, MessageType

Agents = Callable[..., FakeAgent]
MS = 1_000_000
HOST = MemoryFamily.HOST
COUNTED = (MessageType.MEMORY_STATE, MessageType.MEMORY_COMMIT, MessageType.MEMORY_RELEASE)
MIB = 1 << 20

# Allocates memory and launches kernels repeatedly, and prints a line each time that both have succeeded.
BUSY = """
from cuda_calls import *
import time
kernel = function(start(), b'busy'); held = []
until = time.monotonic() + 40
while time.monotonic() < until:
    p = c_uint64(); cu('cuMemAlloc_v2', byref(p), c_size_t(1 << 20)); held.append(p)
    launch(kernel); cu('cuCtxSynchronize'); print(len(held), flush=True); time.sleep(0.05)
"""


@pytest.mark.timed
def test_who_fails_open_goes_on_when_the_agent_hangs(tenants: Tenants, agent: Agents) -> None:
    """The agent stands still, its socket open: after some 14 s of silence the program launches and takes memory without
    it. Then the agent wakes up, and is told what the program holds."""
    broker = agent(fail_mode=1, turn_ns=100 * MS)
    process = tenants.python(broker, BUSY)
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    broker.silent = True
    stopped = time.monotonic()
    last = began = stopped
    while time.monotonic() < stopped + 30:
        count = int(process.stdout.readline())
        if time.monotonic() - last > 5:
            began = time.monotonic()  # the program printed a line after a long wait, so it works again
            break
        last = time.monotonic()
    assert 9 < began - stopped < 25
    for _ in range(10):
        count = int(process.stdout.readline())
    assert time.monotonic() - began < 5
    broker.silent = False
    while not any(client.of(MessageType.MEMORY_STATE) for client in broker.clients[1:]):
        process.stdout.readline()
        assert time.monotonic() < began + 25
    states = [m for client in broker.clients[1:] for m in client.of(MessageType.MEMORY_STATE) if m["family"] == 1]
    assert states[0]["bytes"] >= count * MIB
    process.kill()


def test_pinned_host_memory_is_told_to_the_next_agent(tenants: Tenants, agent: Agents) -> None:
    """64 MiB from before, 32 MiB taken meanwhile (fail: open) are one sum; what is given back later is told as ever."""
    script = (
        "from cuda_calls import *\nimport sys\nstart(); held = []\n"
        "def take(mib):\n"
        "    p = c_void_p(); cu('cuMemHostAlloc', byref(p), c_size_t(mib << 20), 0); held.append(p)\n"
        "    print('ok', flush=True); sys.stdin.readline()\n"
        "take(64); take(32); take(8)\n"
        "cu('cuMemFreeHost', held[0]); print('ok', flush=True); sys.stdin.readline()\n"
    )
    broker = agent(fail_mode=1)
    process = tenants.python(broker, script)
    assert process.stdin is not None
    assert process.stdout is not None

    def step() -> None:
        assert process.stdout.readline() == "ok\n"

    def go() -> None:
        process.stdin.write("\n")
        process.stdin.flush()

    step()
    broker.close()
    go()
    step()
    with FakeAgent(broker.path, fail_mode=1) as heir:
        wait_for(lambda: heir.clients and host_memory(heir.clients[0]) == 96 * MIB)
        assert {m.slot for m in heir.clients[0].of(MessageType.MEMORY_STATE) if m["family"] == HOST} == {NO_SLOT}
        go()
        step()
        wait_for(lambda: host_memory(heir.clients[0]) == 104 * MIB)
        go()
        step()
        wait_for(lambda: host_memory(heir.clients[0]) == 40 * MIB)
        go()
        assert process.wait(60) == 0


def host_memory(client: Client) -> int:
    """What an agent must think that the process has pinned."""
    held = 0
    for message in list(client.messages):
        if message.type in COUNTED and message["family"] == HOST:
            size = message["bytes"]
            sums = (size, held + size, held - size)
            held = dict(zip(COUNTED, sums, strict=True))[MessageType(message.type)]
    return held
