"""A tenant that nobody competes with: fenced seldom, and still out of the way soon when somebody comes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from fake_agent import FakeAgent
from shim_tenants import Tenants
from waiting import WITHIN_S

from cotenant.abi.tenant_page import SlotFlag

Agents = Callable[..., FakeAgent]
MS = 1_000_000

# Reads lines "NS SECONDS" from standard input. For each it launches kernels of NS for SECONDS and never waits for them.
FLOOD = """
from cuda_calls import *
import ctypes, sys, time
ns = c_uint64(1000000)
kernel, parameters = function(start(), b'timed'), (c_void_p * 1)(ctypes.addressof(ns))
print('up', flush=True)
for line in sys.stdin:
    ns.value, seconds = int(line.split()[0]), float(line.split()[1])
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        cu('cuLaunchKernel', kernel, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
        count += 1
    print(count, flush=True)
"""


class Flood:
    """That program, spoken to."""

    def __init__(self, tenants: Tenants, broker: FakeAgent) -> None:
        self.process = tenants.python(broker, FLOOD)
        self.expect("up")

    def order(self, ns: int, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{ns} {seconds}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def expect(self, text: str) -> None:
        assert self.answer() == text


def time_to_give_back(broker: FakeAgent) -> float:
    """Seconds from a revocation to the release that says the GPU is free; the turn is then given again."""
    before = len(broker.releases())
    broker.pause()
    began = time.monotonic()
    broker.revoke()
    while len(broker.releases()) == before:
        assert time.monotonic() < began + WITHIN_S
        time.sleep(0.001)
    took = time.monotonic() - began
    assert broker.releases()[-1]["drained"] == 1
    broker.resume()
    return took


@pytest.mark.timed
def test_fences_are_as_far_apart_as_nobody_minds(tenants: Tenants, agent: Agents) -> None:
    """2 s of kernels of 1 ms: an interval of 8 ms makes 250 fences; 2000 kernels are more than ten times as many."""
    with agent() as broker:
        flood = Flood(tenants, broker)
        flood.order(MS, 2.0)
        launched = int(flood.answer())
        flood.process.communicate(timeout=60)
        assert 1000 <= launched <= 2200
        fences = broker.clients[0].slot().fences
        assert launched / 10 <= fences <= launched / 8 * 1.2 + 8


@pytest.mark.timed
def test_the_queue_of_a_lone_tenant_is_bounded_in_time(tenants: Tenants, agent: Agents) -> None:
    """2 ms allowed, 16 times as much alone, and an interval of 8 ms: whoever comes waits 40 ms, when kernels of 1.6 ms
    are queued without an end."""
    with agent(inflight_ns=2 * MS) as broker:
        flood = Flood(tenants, broker)
        flood.order(1_600_000, 2.0)
        taken = []
        for _ in range(5):
            time.sleep(0.2)
            taken.append(time_to_give_back(broker))
        assert statistics.median(taken) < 0.080
        flood.answer()


@pytest.mark.timed
def test_a_kernel_that_has_become_longer_is_noticed(tenants: Tenants, agent: Agents) -> None:
    """The same kernel takes 10 us and later 500 us: what is thought of it is compared in one interval of 16, and yet
    its queue is short again soon."""
    with agent(inflight_ns=2 * MS) as broker:
        flood = Flood(tenants, broker)
        flood.order(10_000, 0.5)
        flood.answer()
        flood.order(500_000, 5.0)
        time.sleep(3.5)
        taken = []
        for _ in range(3):
            taken.append(time_to_give_back(broker))
            time.sleep(0.2)
        assert statistics.median(taken) < 0.120
        flood.answer()


def test_a_tenant_that_is_not_fenced_launches_and_gives_back(tenants: Tenants, agent: Agents) -> None:
    """A tenant with the whole GPU has no fences, and what they cost others is measured by leaving them out: nothing is
    recorded, nothing waits, and yet a turn that is taken back ends."""
    with agent(inflight_ns=2 * MS, flags=SlotFlag.UNFENCED) as broker:
        flood = Flood(tenants, broker)
        flood.order(MS, 0.01)
        flood.answer()  # the memory and threads that the first launch creates exist now
        flood.order(MS, 0.1)
        launched = int(flood.answer())
        fences = broker.clients[0].slot().fences
        assert launched > 0
        assert fences == 0
        time_to_give_back(broker)
