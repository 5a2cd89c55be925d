"""Invariants of the token broker, driven in virtual time by random tenants, and shares of known settings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_loads import saturated, worst_window_error

from cotenant.policy.shares import DISCIPLINES, MS_NS, SECOND_NS, QuotaSettings, Share
from cotenant.sim.shares.engine import Load, TokenEngine, TokenResult

SHORT = {"quota_ns": 100 * MS_NS, "min_quota_ns": 20 * MS_NS, "max_quota_ns": 200 * MS_NS}
KERNELS_NS = (50_000, 700_000, 5 * MS_NS, 40 * MS_NS)


@st.composite
def tenants(draw: st.DrawFn, budget: float = 0.9) -> list[Load]:
    """Up to five tenants whose requests fit the GPU, some limited, some pausing, some late or leaving."""
    loads = []
    left = budget
    for index in range(draw(st.integers(1, 5))):
        request = draw(st.sampled_from([0.0, 0.1, 0.2, 0.3]))
        request = request if request <= left else 0.0
        left -= request
        limit = draw(st.sampled_from([1.0, 1.0, 0.4, 0.3]))
        busy = draw(st.sampled_from([None, None, 20 * MS_NS, 150 * MS_NS]))
        stop = draw(st.sampled_from([None, None, 7 * SECOND_NS]))
        loads.append(
            Load(
                f"t{index}",
                Share(request=request, limit=max(limit, request)),
                kernel_ns=draw(st.sampled_from(KERNELS_NS)),
                busy_ns=busy,
                pause_ns=0 if busy is None else draw(st.sampled_from([3 * MS_NS, 60 * MS_NS, 2 * SECOND_NS])),
                start_ns=draw(st.integers(0, 4)) * SECOND_NS,
                stop_ns=stop,
            )
        )
    return loads


def run(loads: list[Load], discipline: str, seconds: int = 14) -> TokenResult:
    engine = TokenEngine(loads, QuotaSettings(discipline=discipline, window_ns=4 * SECOND_NS, **SHORT))
    return engine.run(seconds * SECOND_NS)


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(loads=tenants(), name=st.sampled_from([d.name for d in DISCIPLINES]))
def test_one_holder_at_a_time(loads: list[Load], name: str) -> None:
    result = run(loads, name)
    turns = sorted((t.start_ns, t.end_ns) for t in result.turns)
    assert turns
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(turns))
    # no tenant works outside its own turns
    for tenant, _gpu, start, end in result.worked[-500:]:
        inside = [t for t in result.turns if t.tenant == tenant and t.start_ns <= start and end <= t.end_ns]
        assert inside or end > result.turns[-1].end_ns


@FUZZ
@given(loads=tenants(), name=st.sampled_from([d.name for d in DISCIPLINES]))
def test_no_window_holds_more_than_the_limit_and_one_turn(loads: list[Load], name: str) -> None:
    window_ns = 4 * SECOND_NS
    result = run(loads, name)
    for load in loads:
        mine = [t for t in result.turns if t.tenant == load.name]
        longest_ns = max((t.end_ns - t.start_ns for t in mine), default=0)
        if load.share.limit >= 1.0:
            continue
        for turn in mine:  # the windows with most held time end where a turn ends
            held_ns = result.held_ns(load.name, turn.end_ns - window_ns, turn.end_ns)
            assert held_ns <= load.share.limit * window_ns + longest_ns + 2


@FUZZ
@given(loads=tenants())
def test_whoever_always_asks_gets_its_request_in_every_window(loads: list[Load]) -> None:
    window_ns = 4 * SECOND_NS
    result = run(loads, "request-limit")
    # for each tenant, one turn with the kernel that ends after it; this also covers the edges of the window
    slack_ns = len(loads) * (SHORT["max_quota_ns"] + max(KERNELS_NS))
    for load in loads:
        if load.busy_ns is not None:
            continue
        last_ns = min(load.stop_ns or result.end_ns, result.turns[-1].end_ns)
        start_ns = load.start_ns
        while start_ns + window_ns <= last_ns:
            held_ns = result.held_ns(load.name, start_ns, start_ns + window_ns)
            assert held_ns >= load.share.request * window_ns - slack_ns
            start_ns += SECOND_NS // 2


@FUZZ
@given(loads=tenants(), name=st.sampled_from([d.name for d in DISCIPLINES]))
def test_the_gpu_is_never_idle_while_somebody_may_run(loads: list[Load], name: str) -> None:
    always = saturated("always", 0.05)
    result = run([*loads, always], name)
    last_ns = result.turns[-1].end_ns
    assert sum(t.end_ns - t.start_ns for t in result.turns) == pytest.approx(last_ns, abs=len(result.turns) * 2)


@FUZZ
@given(loads=tenants(budget=0.8), name=st.sampled_from(["request-limit", "temporal", "weighted-round-robin"]))
def test_nobody_starves(loads: list[Load], name: str) -> None:
    """With a fifth of the GPU unpromised, even a tenant without a request runs again and again: after a window without
    the GPU it has used nothing, and only turns of those who are owed their request come before it."""
    result = run([*loads, saturated("poor", 0.0)], name)
    mine = [t for t in result.turns if t.tenant == "poor"]
    starts = [*(t.start_ns for t in mine), result.end_ns]
    ends = [0, *(t.end_ns for t in mine)]
    slack_ns = len(loads) * (SHORT["max_quota_ns"] + max(KERNELS_NS))
    assert max(start - end for end, start in zip(ends, starts, strict=True)) <= 4 * SECOND_NS + slack_ns


@pytest.mark.parametrize(
    ("shares", "limits"),
    [
        ({"a": 0.25}, {"a": 0.25}),
        ({"a": 0.5}, {"a": 0.5}),
        ({"a": 0.3, "b": 0.7}, {}),
        ({"a": 0.2, "b": 0.3, "c": 0.5}, {}),
        ({"a": 0.2, "b": 0.3, "c": 0.5}, {"a": 0.2, "b": 0.3, "c": 0.5}),
    ],
)
def test_shares_hold_over_any_ten_seconds(shares: dict[str, float], limits: dict[str, float]) -> None:
    """By default: within one point plus one turn of 100 ms (2 in all) in each window of 10 s, with 1.6 ms kernels."""
    loads = [saturated(n, r, limits.get(n, 1.0), kernel_ns=1_600_000) for n, r in shares.items()]
    result = TokenEngine(loads, QuotaSettings()).run(40 * SECOND_NS)
    assert worst_window_error(result, shares) <= 0.02
    got = result.shares(10 * SECOND_NS, 40 * SECOND_NS)
    assert got == pytest.approx(shares, abs=0.01)


def test_tenants_come_and_go() -> None:
    """30/70, joined by a third that asks for 30 from 20 s to 40 s: 30/40/30 of the contended time while it is there."""
    loads = [
        saturated("a", 0.3),
        saturated("b", 0.4),
        saturated("c", 0.3, start_ns=20 * SECOND_NS, stop_ns=40 * SECOND_NS),
    ]
    settings_ = QuotaSettings(quota_ns=100 * MS_NS, min_quota_ns=20 * MS_NS, max_quota_ns=100 * MS_NS)
    result = TokenEngine(loads, settings_).run(60 * SECOND_NS)
    middle = result.shares(20 * SECOND_NS, 30 * SECOND_NS)
    assert middle == pytest.approx({"a": 0.3, "b": 0.4, "c": 0.3}, abs=0.02)
    assert result.held_ns("c", 40 * SECOND_NS + 1, 60 * SECOND_NS) == 0
    after = result.shares(41 * SECOND_NS, 59 * SECOND_NS)
    assert after["a"] + after["b"] == pytest.approx(1.0, abs=0.01)


def test_a_sleeper_does_not_stall_the_others_when_it_wakes() -> None:
    """It may make up for a second of idle time, not for the eight that it slept."""
    loads = [saturated("a", 0.5), Load("nap", Share(request=0.5), busy_ns=3 * SECOND_NS, pause_ns=8 * SECOND_NS)]
    settings_ = QuotaSettings(quota_ns=100 * MS_NS, min_quota_ns=20 * MS_NS, max_quota_ns=100 * MS_NS)
    result = TokenEngine(loads, settings_).run(40 * SECOND_NS)
    longest_ns = max(t.end_ns - t.start_ns for t in result.turns if t.tenant == "nap")
    assert longest_ns < 1.2 * SECOND_NS


def test_short_pauses_do_not_cost_the_request() -> None:
    """A step of 50 ms work and 5 ms pause asks for 70 % beside a tenant that takes whatever is free."""
    loads = [saturated("a", 0.3), Load("step", Share(request=0.7), busy_ns=50 * MS_NS, pause_ns=5 * MS_NS)]
    settings_ = QuotaSettings(quota_ns=100 * MS_NS, min_quota_ns=20 * MS_NS, max_quota_ns=100 * MS_NS)
    result = TokenEngine(loads, settings_).run(40 * SECOND_NS)
    assert result.shares(10 * SECOND_NS, 40 * SECOND_NS)["step"] >= 0.68


def test_a_hung_kernel_delays_the_others_once() -> None:
    loads = [saturated("ok", 0.5), saturated("hangs", 0.5, hangs_ns=2 * SECOND_NS)]
    result = TokenEngine(loads, QuotaSettings(stuck_ns=SECOND_NS)).run(30 * SECOND_NS)
    assert [s.tenant for s in result.stuck] == ["hangs"]
    assert result.shares(5 * SECOND_NS, 29 * SECOND_NS)["ok"] >= 0.98


def test_a_gang_beside_a_single_tenant_shares_without_deadlock() -> None:
    gang = Share(request=0.5, gang=("0", "1"))
    loads = [
        Load("gang", gang, gpus=("0", "1")),
        Load("solo", Share(request=0.5), gpus=("0",)),
    ]
    result = TokenEngine(loads, QuotaSettings(**SHORT), gpus=("0", "1")).run(30 * SECOND_NS)
    on0 = result.held_ns("gang", 5 * SECOND_NS, 30 * SECOND_NS, "0")
    on1 = result.held_ns("gang", 5 * SECOND_NS, 30 * SECOND_NS, "1")
    assert on0 == pytest.approx(12.5 * SECOND_NS, rel=0.1)
    assert on1 == pytest.approx(on0, rel=0.02)


def test_the_same_loads_give_the_same_turns() -> None:
    def turns() -> list:
        loads = [saturated("a", 0.3), Load("b", Share(request=0.2), busy_ns=20 * MS_NS, pause_ns=3 * MS_NS)]
        return TokenEngine(loads, QuotaSettings()).run(10 * SECOND_NS).turns

    assert turns() == turns()
