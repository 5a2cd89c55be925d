"""Time slices of a GPU: shares add up, every tenant runs, and orders to the hardware are few."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.policy.shares import MS_NS, SECOND_NS, Share
from cotenant.policy.shares.slice_instructions import Go, SetSlice, Stop
from cotenant.policy.shares.slice_settings import BRIEF_US, TINY_US, SliceSettings
from cotenant.policy.shares.slice_tenant import Usage
from cotenant.policy.shares.slices import CLASSES, GpuSlices
from cotenant.policy.shares.timetable import turn_lengths

SETTINGS = SliceSettings()
REQUESTS = st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.3]), min_size=1, max_size=6)


def gpu_with(*shares: Share, classes: tuple[str, ...] = ()) -> GpuSlices:
    gpu = GpuSlices("0")
    for number, share in enumerate(shares):
        gpu.join(f"t{number}", share, classes[number] if classes else "normal", 0)
        gpu.groups(f"t{number}", 1, 0)
    return gpu


def slices(gpu: GpuSlices) -> dict[str, int]:
    return {name: tenant.slice_us for name, tenant in gpu.tenants.items()}


@pytest.mark.parametrize("requests", [(0.5, 0.5), (0.3, 0.7), (0.2, 0.3, 0.5), (0.1, 0.9)])
def test_slices_are_to_each_other_as_requests(requests: tuple[float, ...]) -> None:
    gpu = gpu_with(*map(Share, requests))
    gpu.used({name: Usage() for name in gpu.tenants}, 0)
    gpu.used({name: Usage(MS_NS, 1) for name in gpu.tenants}, SETTINGS.first_step_ns)
    found = slices(gpu)
    runs = list(found.values())
    assert [run / sum(runs) for run in runs] == pytest.approx(requests, abs=0.001)
    switching = len(runs) * SETTINGS.switch_ns / (sum(runs) * 1000)
    assert switching <= (0.011 if len(runs) == 2 else 0.014)
    assert max(runs) * 1000 <= SETTINGS.longest_ns


def test_latency_sensitive_tenants_that_have_no_others_beside_them_share_by_request() -> None:
    first = ("latency-sensitive", "latency-sensitive")
    gpu = gpu_with(Share(0.75), Share(), classes=first)
    gpu.used({name: Usage() for name in gpu.tenants}, 0)
    gpu.used({name: Usage(MS_NS, 1) for name in gpu.tenants}, SETTINGS.first_step_ns)
    assert slices(gpu)["t0"] == pytest.approx(3 * slices(gpu)["t1"], rel=0.01)
    longest_us = SETTINGS.longest_ns // 1000
    assert slices(gpu_with(Share(), Share(), classes=first)) == {"t0": longest_us, "t1": longest_us}
    beside = gpu_with(Share(0.75), Share(), Share(), classes=(*first, "best-effort"))
    assert slices(beside) == {"t0": longest_us, "t1": longest_us, "t2": TINY_US}


def test_a_tenant_alone_has_the_longest_slice_and_is_never_stopped() -> None:
    gpu = gpu_with(Share(0.2))
    assert slices(gpu) == {"t0": SETTINGS.longest_ns // 1000}
    assert gpu.wake_ns(0) is None


def test_several_groups_share_their_tenants_slice() -> None:
    gpu = gpu_with(Share(0.5), Share(0.5))
    before = gpu.tenants["t0"].slice_us
    assert [step.tenant for step in gpu.groups("t0", 2, 5) if isinstance(step, SetSlice)] == ["t0"]
    assert 2 * gpu.tenants["t0"].slice_us == pytest.approx(before, abs=2)


def test_a_limit_alone_is_on_for_that_part_of_every_period() -> None:
    gpu = gpu_with(Share(0.25, 0.25))
    assert gpu.wake_ns(0) == 25 * MS_NS
    assert gpu.advance(25 * MS_NS) == [Stop("0", "t0")]
    assert gpu.wake_ns(25 * MS_NS) == 100 * MS_NS
    assert gpu.advance(100 * MS_NS) == [Go("0", "t0")]


def test_limits_that_slices_keep_need_no_stopping() -> None:
    gpu = gpu_with(Share(0.3), Share(0.7))
    for name, share in {"t0": Share(0.3, 0.3), "t1": Share(0.7, 0.7)}.items():
        gpu.join(name, share, "normal", 0)
    assert gpu.wake_ns(0) is None


def test_a_tenant_keeps_its_limit_while_another_joins() -> None:
    gpu = gpu_with(Share(0.25, 0.25), Share(0.5))
    assert gpu.wake_ns(0) == 25 * MS_NS


def test_a_new_group_of_a_stopped_tenant_is_stopped_too() -> None:
    gpu = gpu_with(Share(0.25, 0.25))
    gpu.advance(30 * MS_NS)
    assert Stop("0", "t0") in gpu.groups("t0", 2, 40 * MS_NS)
    assert not gpu.tenants["t0"].on


def test_best_effort_makes_way_by_the_shortest_slice() -> None:
    gpu = gpu_with(Share(0.5), Share(), classes=("latency-sensitive", "best-effort"))
    assert slices(gpu) == {"t0": SETTINGS.longest_ns // 1000, "t1": 1}
    assert gpu.wake_ns(0) is None
    gpu.groups("t0", 0, 5)  # the service has ended
    assert gpu.tenants["t1"].slice_us == SETTINGS.longest_ns // 1000


def test_beside_a_service_one_best_effort_tenant_runs_at_a_time() -> None:
    gpu = gpu_with(Share(), Share(), Share(), classes=("latency-sensitive", "best-effort", "best-effort"))
    now_ns, seen = 0, set()
    for _ in range(20):
        on = tuple(name for name in ("t1", "t2") if gpu.tenants[name].on)
        assert len(on) == 1, on
        assert gpu.tenants["t0"].on
        seen.add(on)
        wake_ns = gpu.wake_ns(now_ns)
        assert wake_ns is not None
        assert wake_ns > now_ns
        now_ns = wake_ns
        steps = gpu.advance(now_ns)
        assert [type(step) for step in steps] == [Go, Stop]  # a tenant without work does not run
    assert seen == {("t1",), ("t2",)}


def test_tenants_of_several_gpus_run_at_the_same_time_on_all() -> None:
    gang = ("0", "1")
    gpus = [GpuSlices(name) for name in gang]
    for gpu, names in zip(gpus, (("a", "b"), ("b", "a")), strict=True):  # in any order of arrival
        for name in names:
            gpu.join(name, Share(0.5, gang=gang), "normal", 0)
            gpu.groups(name, 1, 0)
    for now_ns in range(0, SECOND_NS, 10 * MS_NS):
        for gpu in gpus:
            gpu.advance(now_ns)
        assert [n for n, t in sorted(gpus[0].tenants.items()) if t.on] == [
            n for n, t in sorted(gpus[1].tenants.items()) if t.on
        ]


def test_a_tenant_without_work_has_no_turn_and_may_run_at_any_time() -> None:
    gang = ("0", "1")
    gpu = gpu_with(Share(0.5, gang=gang), Share(0.3, gang=gang), Share(0.2))
    had = dict.fromkeys(gpu.tenants, 0)
    for now_ns in range(10 * MS_NS, 3 * SECOND_NS, 10 * MS_NS):
        gpu.advance(now_ns)
        had["t0"], had["t1"] = had["t0"] + MS_NS, had["t1"] + MS_NS
        gpu.used({name: Usage(busy_ns) for name, busy_ns in had.items()}, now_ns)
    off = [set(), set()]
    for at_ns in range(now_ns, now_ns + SECOND_NS, 5 * MS_NS):
        gpu.advance(at_ns)
        assert gpu.tenants["t2"].on
        off[0].add(gpu.tenants["t0"].on)
        off[1].add(gpu.tenants["t1"].on)
        assert gpu.tenants["t0"].on != gpu.tenants["t1"].on
    assert off == [{True, False}, {True, False}]
    gpu.used({"t0": Usage(had["t0"]), "t1": Usage(had["t1"]), "t2": Usage(MS_NS)}, at_ns + SECOND_NS)
    assert gpu.shares() == pytest.approx({"t0": 0.5, "t1": 0.3, "t2": 0.2})  # t2 has work again


@given(requests=REQUESTS, limits=st.lists(st.sampled_from([0.3, 0.5, 1.0]), min_size=6, max_size=6))
def test_shares_add_up_and_keep_limits(requests: list[float], limits: list[float]) -> None:
    if sum(requests) > 1.0:
        return
    shares = gpu_with(*(Share(r, max(r, x)) for r, x in zip(requests, limits, strict=False))).shares()
    whole = min(1.0, sum(max(r, x) for r, x in zip(requests, limits, strict=False)))
    assert sum(shares.values()) == pytest.approx(whole)
    for (request, limit), share in zip(zip(requests, limits, strict=False), shares.values(), strict=True):
        assert 0 < share <= max(request, limit) + 1e-9
        assert share >= request * (0.97 if sum(requests) > 0.97 else 1.0) - 1e-9


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "groups", "used", "used", "used", "advance", "wake", "wake"]),
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from([Share(), Share(0.3), Share(0.2, 0.25), Share(0.5, 0.5)]),
        st.sampled_from(CLASSES),
        st.integers(0, 3),
        st.sampled_from([0, 1, 7 * MS_NS, 60 * MS_NS, 210 * MS_NS, 3 * SECOND_NS]),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(events=EVENTS)
def test_any_sequence_of_events_keeps_the_rules(events: list) -> None:
    gpu, now_ns = GpuSlices("0"), 0
    busy: dict[str, int] = {}
    for kind, name, share, work_class, number, step_ns in events:
        now_ns += step_ns
        if kind == "join":
            out = gpu.join(name, share, work_class, now_ns)
            busy.setdefault(name, 0)
        elif kind == "leave":
            busy.pop(name, None)
            out = gpu.leave(name, now_ns)
        elif kind == "groups" and name in gpu.tenants:
            out = gpu.groups(name, number, now_ns)
        elif kind == "used":
            busy = {n: b + number * 20 * MS_NS for n, b in busy.items()}
            out = gpu.used({n: Usage(b, b // MS_NS, number) for n, b in busy.items()}, now_ns)
        elif kind == "wake":
            now_ns = max(now_ns, gpu.wake_ns(now_ns) or now_ns)
            out = gpu.advance(now_ns)
        else:
            out = gpu.advance(now_ns)
        here = {tenant.name for tenant in gpu.present()}
        assert {step.tenant for step in out} <= here
        assert len([s for s in out if isinstance(s, SetSlice)]) <= len(here)
        assert all(t.slice_us >= 1 and t.slice_us * 1000 <= SETTINGS.longest_ns for t in gpu.present())
        # at least one tenant may run, unless limits alone keep all of them off
        if here and all(t.share.limit >= 1.0 for t in gpu.present()):
            assert any(t.on for t in gpu.present())
        wake_ns = gpu.wake_ns(now_ns)
        assert wake_ns is None or wake_ns > now_ns


class Card:
    """Tells a policy each 200 ms what tenants had in them, in milliseconds, and how often their queues ran empty."""

    def __init__(self, gpu: GpuSlices) -> None:
        self.gpu, self.now_ns = gpu, 0
        self.had = dict.fromkeys(gpu.tenants, Usage())
        gpu.used(self.had, 0)

    def step(self, gaps: str = "", yields: int = 100, **busy_ms: int) -> None:
        """`gaps`: whose queue ran empty so often."""
        until_ns = self.now_ns + SETTINGS.step_ns
        while (wake_ns := self.gpu.wake_ns(self.now_ns) or until_ns) < until_ns:
            self.now_ns = wake_ns
            self.gpu.advance(wake_ns)
        self.now_ns = until_ns
        for name, ms in busy_ms.items():
            had, empty = self.had[name], yields if name == gaps else 0
            runs = max(empty, 10) if ms else 0
            self.had[name] = Usage(had.busy_ns + ms * MS_NS, had.runs + runs, had.yields + empty)
        self.gpu.used(self.had, self.now_ns)


def test_time_that_nobody_else_wanted_is_no_debt() -> None:
    """On a card, of two equal tenants the one that had been alone for seconds then got 36 % of a window, not 50."""
    gpu = gpu_with(Share(0.5), Share(0.5))
    card = Card(gpu)
    for _ in range(25):
        card.step(t0=200, t1=0)
    for _ in range(15):
        card.step(t0=99, t1=99)
        assert slices(gpu)["t0"] == slices(gpu)["t1"]


def test_turns_are_judged_by_what_tenants_had_since_they_began() -> None:
    """Short kernels of a host that waits for each: 9 % by slices. The window held that for 2 s, and turns were left."""
    gpu = gpu_with(Share(0.3), Share(0.6))
    card = Card(gpu)
    for _ in range(15):
        card.step(t0=0, t1=40)
    while not gpu.one_at_a_time:
        card.step("t1", t0=180, t1=18)
        assert card.now_ns < 5 * SECOND_NS
    for _ in range(20):
        card.step("t1", 4, t0=66, t1=132)
        assert gpu.one_at_a_time


def test_two_that_yield_and_starve_each_other_are_run_one_at_a_time() -> None:
    """With slices of 1 us all time went into switches: on a card, two best-effort programs had none for a minute."""
    gpu = gpu_with(Share(), Share(), Share(), classes=("best-effort", "best-effort", "latency-sensitive"))
    card = Card(gpu)
    for _ in range(10):  # no tenant has work
        card.step(t0=0, t1=0)
    assert not any(t.competes for t in gpu.background()[0])
    for _ in range(2):
        card.now_ns += SETTINGS.step_ns
        for name in ("t0", "t1"):
            card.had[name] = card.had[name]._replace(runs=card.had[name].runs + 400)
        gpu.used(card.had, card.now_ns)
    on = set()
    for _ in range(20):
        card.now_ns = gpu.wake_ns(card.now_ns) or 0
        gpu.advance(card.now_ns)
        running = [t.name for t in gpu.background()[0] if t.on]
        assert len(running) == 1
        on.update(running)
    assert on == {"t0", "t1"}


def test_a_tenant_that_stopped_does_not_keep_the_next_one_from_turns() -> None:
    gpu = gpu_with(Share(0.3), Share(0.6))
    card = Card(gpu)
    while not gpu.one_at_a_time:
        card.step("t1", t0=180, t1=18)
    for _ in range(3):
        card.step("t1", 4, t0=66, t1=132)
    for _ in range(20):
        card.step(t0=0, t1=0)
    assert gpu.one_at_a_time
    until_ns = card.now_ns + 2 * SECOND_NS
    card.step("t1", 4, t0=66, t1=132)
    assert gpu.one_at_a_time
    assert card.now_ns < until_ns


def test_work_that_ends_sooner_than_a_switch_is_not_preempted() -> None:
    gpu = gpu_with(Share(), Share(), Share(), classes=("best-effort", "best-effort", "latency-sensitive"))
    assert slices(gpu) == {"t0": TINY_US, "t1": TINY_US, "t2": 100_000}
    assert gpu.brief({"t1"}, 0) == [SetSlice("0", "t1", BRIEF_US)]
    assert gpu.brief({"t1"}, 1) == []
    assert gpu.brief((), 2) == [SetSlice("0", "t1", TINY_US)]
    gpu.brief({"t0", "t1"}, 3)
    gpu.leave("t2", 4)  # without a service no tenant has to yield
    assert min(slices(gpu).values()) > BRIEF_US


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=20),
    period_ms=st.integers(100, 400),
)
def test_turns_are_long_enough_and_divide_time_by_part(weights: list[int], period_ms: int) -> None:
    parts = {str(i): weight / sum(weights) for i, weight in enumerate(weights)}
    turn_ns, period_ns = 5 * MS_NS, max(period_ms, 5 * len(parts)) * MS_NS
    periods = 2_000
    had = dict.fromkeys(parts, 0.0)
    for number in range(periods):
        lengths = turn_lengths(parts, period_ns, turn_ns, number)
        assert sum(lengths.values()) <= period_ns * 1.000001
        for name, length in lengths.items():
            had[name] += length
    for name, part in parts.items():
        if part * periods > 500:  # only if the tenant had enough turns for a judgement
            assert had[name] / (periods * period_ns) == pytest.approx(part, rel=0.1)


def test_a_tenant_that_is_owed_nothing_makes_no_turn_longer() -> None:
    """On a card, one that had just stopped made turns of a second: shares were off by 46 points."""
    gpu = gpu_with(Share(0.5), Share(0.5), Share())
    card = Card(gpu)
    while not gpu.one_at_a_time:
        card.step("t1", t0=180, t1=18, t2=1)
    longest = dict.fromkeys(gpu.tenants, 0)
    since = dict.fromkeys(gpu.tenants, 0)
    for now_ns in range(card.now_ns, card.now_ns + 4 * SECOND_NS, MS_NS):
        gpu.advance(now_ns)
        for name, tenant in gpu.tenants.items():
            since[name] = since[name] + 1 if tenant.on else 0
            longest[name] = max(longest[name], since[name])
    assert 49 <= longest["t0"] <= 51
    assert 48 <= longest["t1"] <= 51
    assert 5 <= longest["t2"] <= 6


def test_one_that_wakes_has_its_share_within_the_tenth_of_a_second() -> None:
    gpu = gpu_with(Share(0.5), Share(0.5))
    card = Card(gpu)
    while not gpu.one_at_a_time:
        card.step("t1", t0=180, t1=18)
    while gpu.tenants["t1"].competes:
        card.step(t0=200, t1=0)
    assert gpu.wake_ns(card.now_ns) is None  # no tenant has an exclusive turn
    card.had["t1"] = Usage(card.had["t1"].busy_ns + MS_NS, card.had["t1"].runs + 1, card.had["t1"].yields + 1)
    card.had["t0"] = card.had["t0"]._replace(busy_ns=card.had["t0"].busy_ns + 49 * MS_NS)
    gpu.used(card.had, card.now_ns + 50 * MS_NS)
    assert gpu.one_at_a_time  # as before the tenant became idle


def test_whether_queues_run_empty_is_seen_soon_after_a_tenant_came() -> None:
    gpu = gpu_with(Share(0.5), Share(0.5))
    gpu.used(dict.fromkeys(gpu.tenants, Usage()), 0)
    assert sum(slices(gpu).values()) * 1000 <= SETTINGS.first_period_ns
    gpu.used({"t0": Usage(45 * MS_NS, 7), "t1": Usage(MS_NS, 7, 7)}, SETTINGS.first_step_ns)
    assert gpu.one_at_a_time
