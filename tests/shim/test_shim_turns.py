"""Turns: who may launch when, how a turn ends, and what is reported of it."""

from __future__ import annotations

import itertools
import signal
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_agent import FakeAgent, Message
from native_sources import compile_c
from shim_tenants import Tenants
from waiting import stays, wait_for

from cotenant.abi.protocol import MessageType, ReleaseReason
from cotenant.abi.tenant_page import SlotFlag

Agents = Callable[..., FakeAgent]
MS = 1_000_000


def spans(messages: list[Message]) -> list[tuple[int, int]]:
    """(first submit, drained) of each turn that launched something, ns."""
    return sorted((m["first_submit_ns"], m["drained_ns"]) for m in messages if m["first_submit_ns"])


def test_two_tenants_never_use_the_gpu_at_once(tenants: Tenants, agent: Agents) -> None:
    """Kernels of 1.6 ms, turns of 40 ms: the spans from first submission to drained do not overlap."""
    with agent(turn_ns=40 * MS) as broker:
        for _ in range(2):
            tenants.client_run(broker, "v2", "rate", "600", "0", CLIENT_KERNEL_NS="1600000")
        each = lambda: [len(spans(client.of(MessageType.TOKEN_RELEASE))) for client in broker.clients]  # noqa: E731
        # a few turns of each beside the other, however late a slow machine starts one of them
        wait_for(lambda: len(each()) == 2 and min(each()) > 10, what="turns of both")
        turns = spans(broker.releases())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns))
        assert ReleaseReason.DEADLINE in {m["reason"] for m in broker.releases()}


@pytest.mark.timed
def test_used_time_is_gpu_time(tenants: Tenants, agent: Agents) -> None:
    """A lone tenant in turns: the time it reports covers its kernels' time and not much more."""
    with agent(turn_ns=50 * MS) as broker:
        process = tenants.client_run(broker, "v2", "rate", "1.0", "0", CLIENT_KERNEL_NS="2000000")
        count = int(tenants.output(process).split()[1])
        reported = sum(m["launches"] for m in broker.releases())
        assert reported <= count
        used = sum(m["used_ns"] for m in broker.releases())
        assert reported * 2 * MS <= used * 1.001
        assert used < reported * 2 * MS * 1.6 + 20 * MS


@pytest.mark.timed
def test_new_and_long_kernels_do_not_run_over_for_long(tenants: Tenants, agent: Agents) -> None:
    """Phases of 3 us and 1.6 ms kernels, never waited for: the shim learns both, so that most turns end within 5 ms."""
    with agent(turn_ns=40 * MS) as broker:
        process = tenants.client_run(broker, "v2", "phases", "1.5", CLIENT_KERNEL_NS="1600000")
        tenants.output(process)
        overuse = sorted(m["overuse_ns"] for m in broker.releases())
        assert len(overuse) >= 8
        assert statistics.median(overuse) < 5 * MS


def test_revocation_through_the_page_and_by_message(tenants: Tenants, agent: Agents) -> None:
    # Hundreds of kernels are queued, so that the program's thread is at the gate again long before the GPU has drained.
    with agent(inflight_ns=50 * MS) as broker:
        process = tenants.client_run(broker, "v2", "rate", "600", "0", CLIENT_KERNEL_NS="1000000")
        wait_for(lambda: broker.clients and broker.clients[0].epoch == 1)
        wait_for(lambda: broker.clients[0].slot().launches > 200)
        broker.pause()
        broker.revoke()
        client = broker.clients[0]
        wait_for(lambda: client.of(MessageType.TOKEN_RELEASE))
        release = client.of(MessageType.TOKEN_RELEASE)[0]
        assert (release["epoch"], release["reason"]) == (1, ReleaseReason.REVOKED)
        assert (release["drained"], release["wants_more"]) == (1, 1)
        assert release["launches"] > 200
        # the tenant has more to launch, so it requests another turn
        wait_for(lambda: len(client.of(MessageType.TOKEN_REQUEST)) == 2)
        launches = client.slot().launches
        stays(lambda: client.slot().launches == launches, what="it launches nothing meanwhile")
        broker.resume()
        wait_for(lambda: client.slot().launches > launches)
        process.kill()


def test_flipping_the_page_alone_stops_launches(tenants: Tenants, agent: Agents) -> None:
    """The message is for speed; the page is the guard."""
    with agent() as broker:
        process = tenants.client_run(broker, "v2", "rate", "600", "0", CLIENT_KERNEL_NS="1000000")
        wait_for(lambda: broker.clients and broker.clients[0].epoch == 1)
        broker.pause()
        broker.clients[0].slot().epoch = 0
        wait_for(lambda: broker.clients[0].of(MessageType.TOKEN_RELEASE))
        assert broker.clients[0].of(MessageType.TOKEN_RELEASE)[0]["reason"] == ReleaseReason.REVOKED
        process.kill()


def test_idle_turn_is_given_back_only_when_somebody_waits(tenants: Tenants, agent: Agents) -> None:
    script = (
        "from cuda_calls import *\nimport sys\n"
        "kernel = function(start(), b'busy'); launch(kernel); cu('cuCtxSynchronize'); print('up', flush=True)\n"
        "sys.stdin.readline(); launch(kernel); cu('cuCtxSynchronize'); print('again', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with agent() as broker:
        process = tenants.python(broker, script)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline().strip() == "up"
        stays(lambda: broker.releases() == [], 0.1)
        broker.set_flags(SlotFlag.CONTENDED)
        wait_for(broker.releases)
        assert broker.releases()[0]["reason"] == ReleaseReason.IDLE
        assert broker.releases()[0]["wants_more"] == 0  # it has nothing left to launch
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "again"
        process.stdin.write("\n")
        process.stdin.flush()


def test_hung_kernel_is_reported_and_the_release_follows_when_it_ends(tenants: Tenants, agent: Agents) -> None:
    """A kernel of 4 s in a turn of 100 ms with a drain time-out of 200 ms: first drained = 0, later drained = 1."""
    with agent(turn_ns=100 * MS, drain_ns=200 * MS) as broker:
        script = (
            "from cuda_calls import *\nimport ctypes, time\n"
            "ns = c_uint64(4 * 10**9); kernel = function(start(), b'timed')\n"
            "params = (c_void_p * 1)(ctypes.addressof(ns))\n"
            "cu('cuLaunchKernel', kernel, 1, 1, 1, 1, 1, 1, 0, None, params, None)\n"
            "cu('cuCtxSynchronize'); input()\n"
        )
        tenants.python(broker, script)
        # on a slow machine, turns may be over before the program has launched the kernel
        told = lambda: [m for m in broker.releases() if m["launches"]]  # noqa: E731
        wait_for(told)
        first = told()[0]
        assert first["drained"] == 0
        assert first["overuse_ns"] >= 200 * MS
        wait_for(lambda: len(told()) == 2)
        assert told()[1]["drained"] == 1
        assert told()[1]["epoch"] == first["epoch"]
        codes = [m["code"] for m in broker.clients[0].of(MessageType.WARNING)]
        assert codes == [3]


def test_killed_holder_does_not_keep_the_turn(tenants: Tenants, agent: Agents) -> None:
    with agent(turn_ns=3_000 * MS) as broker:
        holder = tenants.client_run(broker, "v2", "rate", "600", "0")
        wait_for(lambda: broker.holder is not None)
        other = tenants.client_run(broker, "v2", "launches", "10")
        wait_for(lambda: len(broker.clients) == 2 and broker.clients[1].of(MessageType.TOKEN_REQUEST))
        holder.send_signal(signal.SIGKILL)
        assert tenants.output(other, timeout=60).startswith("launches 10")


def test_ungated_tenant_waits_for_nobody(tenants: Tenants, agent: Agents) -> None:
    with agent(flags=SlotFlag.UNGATED) as broker:
        broker.pause()
        assert tenants.output(tenants.client_run(broker, "v2", "launches", "300")).startswith("launches 300")
        assert broker.clients[0].slot().launches == 300
        assert broker.clients[0].of(MessageType.TOKEN_REQUEST) == []


@pytest.mark.parametrize(("fail_mode", "goes_on"), [(1, True), (0, False)])
def test_lost_agent(tenants: Tenants, agent: Agents, fail_mode: int, goes_on: bool) -> None:
    """Fail open: launches go on. Fail closed: they wait for the agent and go on when it is back."""
    broker = agent(fail_mode=fail_mode)
    process = tenants.client_run(broker, "v2", "rate", "600", "10")
    wait_for(lambda: broker.clients and broker.clients[0].slot().launches > 0)
    page = broker.clients[0].slot()
    broker.close()
    wait_for(lambda: broker.clients[0].closed)
    if goes_on:
        launches = page.launches
        wait_for(lambda: page.launches > launches + 1000)
        return
    assert process.stderr is not None
    assert "launches wait until it returns" in process.stderr.readline()
    launches = page.launches
    stays(lambda: page.launches == launches)
    with FakeAgent(broker.path, fail_mode=fail_mode) as heir:
        wait_for(lambda: heir.clients and heir.clients[0].epoch >= 1)
        # message type 9: the shim has reported what memory it holds
        wait_for(lambda: 9 in {m.type for m in heir.clients[0].messages})
        wait_for(lambda: heir.clients[0].slot().launches > launches)


def test_threads_share_the_process_turn(tenants: Tenants, agent: Agents) -> None:
    with agent(turn_ns=30 * MS) as broker:
        assert tenants.output(tenants.client_run(broker, "v2", "threads", "4", "200")).strip() == "threads done"
        assert broker.clients[0].slot().launches == 800


NO_MEMBARRIER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/syscall.h>
long syscall(long number, long a, long b, long c, long d, long e, long f)
{
    static long (*next)();
    if (number == SYS_membarrier) {
        errno = ENOSYS;
        return -1;
    }
    if (!next)
        next = (long (*)())dlsym(RTLD_NEXT, "syscall");
    return next(number, a, b, c, d, e, f);
}
"""


@pytest.mark.parametrize("membarrier", [True, False])
def test_no_launch_slips_through_a_closing_gate(
    tenants: Tenants, agent: Agents, tmp_path: Path, membarrier: bool
) -> None:
    """Two threads launch without a pause in turns of 2 ms.  A launch that passed a closed gate would be counted in no
    turn: it comes after the count that the release holds and before the one at the next grant."""
    extra = {"CLIENT_KERNEL_NS": "1000", "CLIENT_STAYS": "1"}
    if not membarrier:
        source, library = tmp_path / "no_membarrier.c", tmp_path / "no_membarrier.so"
        source.write_text(NO_MEMBARRIER)
        compile_c(["-shared", "-fPIC", "-w", str(source), "-o", str(library), "-ldl"])
    with agent(turn_ns=2 * MS) as broker:
        command = [str(tenants.client), "v2", "threads", "2", "60000"]
        if not membarrier:
            command = ["sh", "-c", f"LD_PRELOAD={library}:$LD_PRELOAD exec {' '.join(command)}"]
        process = tenants.start(broker, command, **extra)
        assert process.stdout is not None
        assert process.stdout.readline() == "threads done\n"
        wait_for(lambda: broker.holder is None, what="the end of the last turn")
        process.communicate("\n", timeout=60)
        reported = sum(message["launches"] for message in broker.releases())
        done = broker.clients[0].slot().launches
        assert len(broker.releases()) > 20
        assert reported == 120000 == done
