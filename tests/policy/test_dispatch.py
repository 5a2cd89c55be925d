"""The dispatcher: batches worked out by hand, and a naive one written for the test that must agree with it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.dispatch import Dispatcher, Drop, Start
from cotenant.profiles.serving.latency import ModelProfile, Partition, ServingProfile

# A batch of b requests takes 10 + 2 b ms on half a GPU.
CURVE = tuple((b, 10.0 + 2.0 * b) for b in range(1, 9))
PROFILES = {
    "X": ServingProfile(
        "X", "made up", 100, (Partition(0.5, "50%"), Partition(1.0, "100%")),
        {"m": ModelProfile("m", 1, {"50%": CURVE, "100%": CURVE})},
    )
}  # fmt: skip


def let(gpu: int, slot: int, batches: dict[str, int]) -> Gpulet:
    duty = sum(10.0 + 2.0 * b for b in batches.values())
    seats = tuple(Seat(n, "m", b, 1.0) for n, b in batches.items())
    return Gpulet(gpu, "X", "50%", 50.0, slot, duty, seats)


def service(name: str, slo: float = 100.0, queue: int = 100, sensitive: bool = True) -> Service:
    return Service(name, "m", 10.0, slo, latency_sensitive=sensitive, max_queue=queue)


def plan(*lets: Gpulet) -> ServingPlan:
    return ServingPlan("p", 2, lets)


def test_idle_starts_at_once_then_batches() -> None:
    d = Dispatcher(plan(let(0, 0, {"a": 4})), [service("a")], PROFILES)
    assert d.request("a", 0.0) == (0, [Start(0, "a", (0,), 12.0)])
    for i in range(1, 7):
        assert d.request("a", float(i)) == (i, [])
    assert d.done(0, 12.0) == [Start(0, "a", (1, 2, 3, 4), 18.0)]
    assert d.waiting("a") == 2
    assert d.done(0, 30.0) == [Start(0, "a", (5, 6), 14.0)]
    assert d.done(0, 44.0) == []
    assert math.isinf(d.next_wake_ms)


def test_services_take_turns() -> None:
    d = Dispatcher(plan(let(0, 0, {"a": 2, "b": 2})), [service("a"), service("b")], PROFILES)
    d.request("a", 0.0)
    for _ in range(4):
        d.request("a", 1.0)
    for _ in range(4):
        d.request("b", 2.0)
    order = []
    for now in (20.0, 40.0, 60.0, 80.0):
        (start,) = (x for x in d.done(0, now) if isinstance(x, Start))
        order.append((start.service, len(start.requests)))
    assert order == [("b", 2), ("a", 2), ("b", 2), ("a", 2)]


def test_what_is_lost_is_dropped_and_a_late_head_shrinks_its_batch() -> None:
    d = Dispatcher(plan(let(0, 0, {"a": 4})), [service("a", slo=30.0)], PROFILES)
    d.request("a", 0.0)
    d.request("a", 1.0)
    d.request("a", 2.0)
    d.request("a", 13.0)
    # At 18 ms: the oldest request must be answered by 31. A batch of 1 ends at 30, a batch of 2 at 32, which is too
    # late.
    assert d.done(0, 18.0) == [Start(0, "a", (1,), 12.0)]
    # At 30 ms: the next request had to be answered by 32, which is impossible even alone. The last one has until 43.
    assert d.done(0, 30.0) == [Drop("a", 2, "late"), Start(0, "a", (3,), 12.0)]


def test_under_overload_full_batches_go_first() -> None:
    d = Dispatcher(plan(let(0, 0, {"a": 4})), [service("a", slo=40.0)], PROFILES)
    d.request("a", 0.0)
    d.request("a", 1.0)
    for _ in range(6):
        d.request("a", 20.0)
    # At 25 ms: the oldest request (until 41) could run alone, but not with three others (43). More requests than one
    # batch are waiting.
    assert d.done(0, 25.0) == [Drop("a", 1, "late"), Start(0, "a", (2, 3, 4, 5), 18.0)]


def test_best_effort_is_never_late_and_full_queues_refuse() -> None:
    d = Dispatcher(plan(let(0, 0, {"a": 2})), [service("a", slo=15.0, queue=3, sensitive=False)], PROFILES)
    d.request("a", 0.0)
    assert [d.request("a", 1.0) for _ in range(3)] == [(1, []), (2, []), (3, [])]
    assert d.request("a", 1.0) == (-1, [Drop("a", -1, "full")])
    assert d.done(0, 500.0) == [Start(0, "a", (1, 2), 14.0)]


def test_held_batches_wait_until_due() -> None:
    d = Dispatcher(plan(let(0, 0, {"a": 4})), [service("a")], PROFILES, hold=0.5)
    assert d.request("a", 0.0) == (0, [])
    assert d.next_wake_ms == pytest.approx(9.0)  # half of the duty cycle of 18 ms
    assert d.wake(8.9) == []
    assert d.wake(9.0) == [Start(0, "a", (0,), 12.0)]
    for i in range(3):
        assert d.request("a", 10.0 + i)[1] == []
    d.request("a", 14.0)
    assert d.done(0, 21.0) == [Start(0, "a", (1, 2, 3, 4), 18.0)]


def test_the_fastest_idle_gpulet_is_taken() -> None:
    quick = ModelProfile("m", 1, {"50%": CURVE, "100%": tuple((b, 5.0) for b in range(1, 9))})
    profiles = {"X": replace(PROFILES["X"], models={"m": quick})}
    big = Gpulet(1, "X", "100%", 100.0, 0, 5.0, (Seat("a", "m", 2, 1.0),))
    d = Dispatcher(plan(let(0, 0, {"a": 2}), big), [service("a")], profiles)
    assert d.request("a", 0.0)[1] == [Start(1, "a", (0,), 5.0)]
    assert d.request("a", 1.0)[1] == [Start(0, "a", (1,), 12.0)]
    assert d.request("a", 2.0)[1] == []


def test_a_plan_for_others_is_refused() -> None:
    with pytest.raises(InputError, match="'b', which is not among the services"):
        Dispatcher(plan(let(0, 0, {"b": 1})), [service("a")], PROFILES)


class Naive:
    """The same rules over plain lists, for one gpulet."""

    def __init__(self, seats: list[tuple[str, int]], slo: dict[str, float]) -> None:
        self.seats, self.slo = seats, slo
        self.queue: dict[str, deque[tuple[int, float]]] = {n: deque() for n, _ in seats}
        self.count = dict.fromkeys(self.queue, 0)
        self.turn, self.busy = len(seats) - 1, False

    def request(self, name: str, now: float) -> list[object]:
        self.queue[name].append((self.count[name], now + self.slo[name]))
        self.count[name] += 1
        return [] if self.busy else self.start(now)

    def withdraw(self, name: str, number: int) -> bool:
        before = len(self.queue[name])
        self.queue[name] = deque(x for x in self.queue[name] if x[0] != number)
        return len(self.queue[name]) < before

    def done(self, now: float) -> list[object]:
        self.busy = False
        return self.start(now)

    def start(self, now: float) -> list[object]:
        out: list[object] = []
        n = len(self.seats)
        for at in [(self.turn + k) % n for k in range(1, n + 1)]:
            name, most = self.seats[at]
            queue = self.queue[name]
            while queue:
                sizes = range(min(len(queue), most), 0, -1) if len(queue) <= most else [most]
                size = next((b for b in sizes if now + 10.0 + 2.0 * b <= queue[0][1]), 0)
                if size:
                    taken = tuple(queue.popleft()[0] for _ in range(size))
                    self.turn, self.busy = at, True
                    return [*out, (name, taken)]
                out.append((name, queue.popleft()[0]))
        return out


@settings(max_examples=80, deadline=None)
@given(
    gaps=st.lists(
        st.tuples(st.floats(0.0, 12.0), st.sampled_from("abc"), st.none() | st.integers(0, 30)),
        min_size=1,
        max_size=60,
    ),
    batches=st.tuples(*[st.integers(1, 5)] * 3),
    slos=st.tuples(*[st.floats(15.0, 90.0)] * 3),
)
def test_agrees_with_the_naive_one_and_loses_nothing(
    gaps: list[tuple[float, str, int | None]], batches: tuple[int, ...], slos: tuple[float, ...]
) -> None:
    sizes = dict(zip("abc", batches, strict=True))
    d = Dispatcher(plan(let(0, 0, sizes)), [service(n, s) for n, s in zip("abc", slos, strict=True)], PROFILES)
    naive = Naive(list(sizes.items()), dict(zip("abc", slos, strict=True)))
    now, free = 0.0, math.inf
    seen: list[tuple[str, int]] = []

    def check(found: list[object], expected: list[object]) -> float:
        plain = [(x.service, x.requests) if isinstance(x, Start) else (x.service, x.request) for x in found]  # type: ignore[attr-defined]
        assert plain == expected
        until = math.inf
        for x in found:
            if isinstance(x, Start):
                assert len(x.requests) <= sizes[x.service]
                seen.extend((x.service, i) for i in x.requests)
                until = now + x.expected_ms
            elif isinstance(x, Drop):
                seen.append((x.service, x.request))
        return until

    sent = dict.fromkeys("abc", 0)
    for gap, name, taken_back in gaps:
        arrival = now + gap
        while free <= arrival:
            now = free
            free = check(list(d.done(0, now)), naive.done(now))
        now = arrival
        started = check(list(d.request(name, now)[1]), naive.request(name, now))
        free = min(free, started)
        sent[name] += 1
        if taken_back is not None:
            gone = d.withdraw(name, taken_back)
            assert gone == naive.withdraw(name, taken_back)
            seen.extend([(name, taken_back)] * gone)
    while math.isfinite(free):
        now = free
        free = check(list(d.done(0, now)), naive.done(now))
    # each request was run, dropped or taken back exactly once
    assert sorted(seen) == sorted((n, i) for n, k in sent.items() for i in range(k))
    assert np.all(d.desk.lets["busy"] == 0)
