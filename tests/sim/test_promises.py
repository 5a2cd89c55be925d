"""Requests are kept for programs of every kind beside every other kind, in virtual time, the first window included."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cotenant.policy.shares import MS_NS, SECOND_NS, QuotaSettings, Share
from cotenant.sim.shares.engine import Load, TokenEngine
from cotenant.sim.shares.slices import SliceEngine

# GPU work, and pauses in which the host works. The GPU is busy for a fraction of 1, 0.6, 0.83 and 0.6 of the time.
KINDS: dict[str, dict[str, Any]] = {
    "busy": {"kernel_ns": 10 * MS_NS},
    "launch-bound": {"kernel_ns": 150_000, "busy_ns": 150_000, "pause_ns": 100_000},
    "training": {"kernel_ns": 66_000, "busy_ns": 20 * MS_NS, "pause_ns": 4 * MS_NS},
    "bursty": {"kernel_ns": 2 * MS_NS, "busy_ns": 150 * MS_NS, "pause_ns": 100 * MS_NS},
}
ALONE = {"busy": 1.0, "launch-bound": 0.6, "training": 20 / 24, "bursty": 0.6}
REQUESTS = [(0.6, 0.3), (0.3, 0.6), (0.5, 0.5), (0.2, 0.2)]
PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))


def waited_ns(engine: TokenEngine, name: str) -> int:
    return engine.broker.gpus["0"].accounts[name].waited_ns + engine.waits_ns(name, "0")


def loads_of(kinds: tuple[str, str], requests: tuple[float, float]) -> list[Load]:
    return [Load(name, Share(part), **KINDS[kind]) for name, kind, part in zip("ab", kinds, requests, strict=True)]


def had_ns(engine: TokenEngine, name: str) -> tuple[int, int]:
    """Time that a tenant has held the GPU so far, and has waited for it."""
    waited_ns = engine.broker.gpus["0"].accounts[name].waited_ns + engine.waits_ns(name, "0")
    return engine.result.held_ns(name, 0, engine.now_ns), waited_ns


@pytest.mark.parametrize("requests", REQUESTS, ids=str)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_a_request_is_kept_under_turns(kinds: tuple[str, str], requests: tuple[float, float]) -> None:
    """Of the time in which a tenant has the GPU or waits for it, it has its request, within 2 points, in every window,
    the first included. Training that gave the GPU away in each pause of 4 ms got 0.18 where it asked for 0.6."""
    window_ns = 5 * SECOND_NS
    engine = TokenEngine(loads := loads_of(kinds, requests), QuotaSettings(window_ns=window_ns))
    before = {load.name: (0, 0) for load in loads}
    for window in (1, 2):
        engine.run(window * window_ns)
        for load in loads:
            held_ns, waited_ns = had_ns(engine, load.name)
            held_before_ns, waited_before_ns = before[load.name]
            held, waited = held_ns - held_before_ns, waited_ns - waited_before_ns
            assert held / (held + waited) >= load.share.request - 0.02, (load.name, window)
            before[load.name] = held_ns, waited_ns


@pytest.mark.parametrize("requests", REQUESTS, ids=str)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_a_request_is_kept_under_slices(kinds: tuple[str, str], requests: tuple[float, float]) -> None:
    """GPU time once a second has shown what runs: a tenant has at least what it would use of its request; and of the
    time in which it wants the GPU its request, or the other has no more than it was promised. Short kernels launched
    one by one, twice, got 0.12 each before: every one of them waited for two switches."""
    loads = loads_of(kinds, requests)
    begin_ns, end_ns = 2 * SECOND_NS, 5 * SECOND_NS
    result = SliceEngine(loads).run(end_ns)
    got_ns = {load.name: result.worked_ns(load.name, begin_ns, end_ns) for load in loads}
    for kind, load, other in zip(kinds, loads, loads[::-1], strict=True):
        pauses = sum(name == load.name and begin_ns < ended_ns for name, _, ended_ns in result.bursts)
        wanted_ns = end_ns - begin_ns - pauses * load.pause_ns
        excess_ns = got_ns[other.name] - (other.share.request + 0.03) * (end_ns - begin_ns)
        assert got_ns[load.name] >= (load.share.request * ALONE[kind] - 0.03) * (end_ns - begin_ns)
        assert excess_ns <= 0 or got_ns[load.name] >= (load.share.request - 0.03) * wanted_ns
