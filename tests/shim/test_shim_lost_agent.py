"""An agent that hangs, or goes and comes back: what a program that runs notices, and what the agent is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_agent import Client, FakeAgent
from native_sources import compile_c
from shim_tenants import Tenants
from waiting import wait_for

from cotenant.abi.protocol import NO_SLOT, MemoryFamily, MessageType
from cotenant.native.environment import tenant_environment

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
        wait_for(lambda: heir.clients and memory_of(heir.clients[0], HOST) == 96 * MIB)
        assert {m.slot for m in heir.clients[0].of(MessageType.MEMORY_STATE) if m["family"] == HOST} == {NO_SLOT}
        go()
        step()
        wait_for(lambda: memory_of(heir.clients[0], HOST) == 104 * MIB)
        go()
        step()
        wait_for(lambda: memory_of(heir.clients[0], HOST) == 40 * MIB)
        go()
        assert process.wait(60) == 0


def memory_of(client: Client, family: int) -> int:
    """What an agent must think that the process holds of a family."""
    held = 0
    for message in list(client.messages):
        if message.type in COUNTED and message["family"] == family:
            size = message["bytes"]
            sums = (size, held + size, held - size)
            held = dict(zip(COUNTED, sums, strict=True))[MessageType(message.type)]
    return held


# Holds up each report of what the process holds for 0.1 s before it is sent.
SLOW_REPORTS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <sys/socket.h>
#include <unistd.h>
ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    static ssize_t (*next)(int, const struct msghdr *, int);
    if (!next)
        next = (ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    if (((const uint16_t *)message->msg_iov->iov_base)[3] == %d)
        usleep(100000);
    return next(fd, message, flags);
}
"""


def test_memory_taken_while_the_next_agent_is_told_is_counted_once(
    tenants: Tenants, agent: Agents, tmp_path: Path
) -> None:
    """40 allocations of 1 MiB, one every 10 ms, while reports are on their way."""
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_REPORTS % MessageType.MEMORY_STATE)
    compile_c(["-shared", "-fPIC", "-w", source, "-o", library, "-ldl"])
    script = (
        "from cuda_calls import *\nimport sys, time\nstart()\n"
        "cu('cuMemAlloc_v2', byref(c_uint64()), c_size_t(8 << 20)); print('up', flush=True); sys.stdin.readline()\n"
        "for _ in range(40): cu('cuMemAlloc_v2', byref(c_uint64()), c_size_t(1 << 20)); time.sleep(0.01)\n"
        "print('done', flush=True); sys.stdin.readline()\n"
    )
    broker = agent()
    shim = tenant_environment(broker.path, "token", tenants.driver)["LD_PRELOAD"]
    process = tenants.python(broker, script, LD_PRELOAD=f"{library}:{shim}")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    broker.close()
    process.stdin.write("\n")
    process.stdin.flush()
    with FakeAgent(broker.path) as heir:
        assert process.stdout.readline() == "done\n"
        wait_for(lambda: memory_of(heir.clients[0], MemoryFamily.PLAIN) == 48 * MIB)
        process.communicate("\n", timeout=60)
        wait_for(lambda: heir.clients[0].closed, what="all that it said was read")
        assert memory_of(heir.clients[0], MemoryFamily.PLAIN) == 48 * MIB
        assert not heir.reservations


SLOW_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <unistd.h>
int cuMemCreate(unsigned long long *handle, size_t bytes, const void *properties, unsigned long long flags)
{
    int (*next)(unsigned long long *, size_t, const void *, unsigned long long) = dlsym(RTLD_NEXT, "cuMemCreate");
    while (bytes == 78 << 20 && access("%s", F_OK) != 0)
        usleep(1000);
    return next(handle, bytes, properties, flags);
}
"""


def test_a_reservation_of_the_agent_before_is_counted_by_the_next(
    tenants: Tenants, agent: Agents, tmp_path: Path
) -> None:
    """The driver takes so long that another agent is there, and has been told of the rest, when it has the memory."""
    source, driver, there = tmp_path / "slow.c", tmp_path / "libcuda.so.999", tmp_path / "there"
    source.write_text(SLOW_DRIVER % there)
    old = ["-Wl,--no-as-needed", f"-Wl,-rpath={tenants.driver.parent}", tenants.driver]
    compile_c(["-shared", "-fPIC", "-w", source, "-o", driver, *old])
    script = (
        "from cuda_calls import *\nimport sys\nstart(); device = (c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0)\n"
        "for mib in (64, 78): cu('cuMemCreate', byref(c_uint64()), c_size_t(mib << 20), device, c_uint64(0))\n"
        "print('done', flush=True); sys.stdin.readline()\n"
    )
    broker = agent()
    process = tenants.python(broker, script, COTENANT_DRIVER=str(driver))
    assert process.stdout is not None
    asked = lambda: {m["bytes"] for m in broker.clients[0].of(MessageType.MEMORY_RESERVE)}  # noqa: E731
    wait_for(lambda: broker.clients and 78 * MIB in asked())
    with broker.lock:  # what it has heard, it has answered
        broker.close()
    with FakeAgent(broker.path) as heir:
        wait_for(lambda: heir.clients and memory_of(heir.clients[0], MemoryFamily.VMM) == 64 * MIB)
        there.touch()
        assert process.stdout.readline() == "done\n"
        process.communicate("\n", timeout=60)
        wait_for(lambda: heir.clients[0].closed, what="all that it said was read")
        (commit,) = heir.clients[0].of(MessageType.MEMORY_COMMIT)
        # a number would be unknown here, or that of another reservation
        assert (commit["bytes"], commit["reservation"]) == (78 * MIB, 0)
