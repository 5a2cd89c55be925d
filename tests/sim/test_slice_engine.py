"""Shares by the hardware's time slices in virtual time: what a card of these costs would give each tenant."""

from __future__ import annotations

from typing import Any

import pytest

from cotenant.policy.shares import MS_NS, SECOND_NS, Share
from cotenant.policy.shares.slice_instructions import Go, SetSlice, Stop
from cotenant.policy.shares.slice_settings import SliceSettings
from cotenant.sim.shares.engine import Load
from cotenant.sim.shares.slices import Hardware, SliceEngine, SliceResult

WINDOW_NS = 2 * SECOND_NS
# the first correction of slices would come after the end of the simulation
FIXED = SliceSettings(step_ns=10**15, first_step_ns=10**15, first_period_ns=10**15)


def run(loads: list[Load], seconds: int = 12, classes: dict[str, str] | None = None) -> SliceResult:
    return SliceEngine(loads, classes=classes).run(seconds * SECOND_NS)


def together(result: SliceResult, loads: list[Load]) -> float:
    return sum(result.worked_ns(load.name, 0, result.end_ns) for load in loads) / result.end_ns


def test_a_switch_costs_as_measured_on_a_card() -> None:
    """Two tenants with 2.048 ms each get 89.8 % of one alone together, with 6 and 14 ms 97.7 %."""
    for slices_us, measured in (((2048, 2048), 0.898), ((6000, 14000), 0.977), ((1000, 1000), 0.811)):
        engine = SliceEngine([Load("a", Share(0.5)), Load("b", Share(0.5))], FIXED)
        engine.run(1)
        for group, slice_us in zip(engine._groups.values(), slices_us, strict=True):
            engine._at(10 * MS_NS, engine._carry_out, SetSlice("0", group.load.name, slice_us))
        result = engine.run(4 * SECOND_NS)
        assert together(result, [g.load for g in engine._groups.values()]) == pytest.approx(measured, abs=0.012)


@pytest.mark.parametrize("requests", [(0.5, 0.5), (0.3, 0.7), (0.2, 0.3, 0.5), (0.1, 0.9)])
def test_every_window_has_the_promise_within_a_point(requests: tuple[float, ...]) -> None:
    loads = [Load(f"t{i}", Share(request)) for i, request in enumerate(requests)]
    result = run(loads)
    for load in loads:
        for part in result.windows(load.name, WINDOW_NS):
            assert part == pytest.approx(load.share.request, abs=0.01)
    assert together(result, loads) >= 0.985


def test_a_card_that_favours_one_tenant_is_corrected() -> None:
    loads = [Load("a", Share(0.3)), Load("b", Share(0.7))]
    result = SliceEngine(loads, hardware=Hardware(bias_ns=3 * MS_NS)).run(20 * SECOND_NS)
    for part in result.windows("a", WINDOW_NS, 12 * SECOND_NS):
        assert part == pytest.approx(0.3, abs=0.01)


def test_a_tenant_that_leaves_and_comes_back_takes_nothing_from_the_others() -> None:
    loads = [
        Load("a", Share(0.3)),
        Load("b", Share(0.7), start_ns=3 * SECOND_NS, stop_ns=9 * SECOND_NS),
    ]
    result = run(loads)
    assert min(result.windows("a", WINDOW_NS)) >= 0.29
    assert result.worked_ns("b", 4 * SECOND_NS, 9 * SECOND_NS) / (5 * SECOND_NS) == pytest.approx(0.7, abs=0.01)
    assert result.worked_ns("a", 10 * SECOND_NS, 12 * SECOND_NS) == 2 * SECOND_NS


def test_a_launch_bound_tenant_gets_its_sixty_per_cent_beside_a_busy_one() -> None:
    """Bursts of 4 ms and gaps of 0.2 ms: by slices in the ratio of requests it would have 31 %."""
    loads = [Load("busy", Share(0.3)), Load("gaps", Share(0.6), busy_ns=4 * MS_NS, pause_ns=MS_NS // 5)]
    result = run(loads, 20)
    assert min(result.windows("gaps", WINDOW_NS)) >= 0.59
    assert min(result.windows("busy", WINDOW_NS, SECOND_NS)) >= 0.28
    plain = SliceEngine(loads, FIXED).run(10 * SECOND_NS)
    assert plain.worked_ns("gaps", 0, 10 * SECOND_NS) / (10 * SECOND_NS) < 0.35


def test_bursts_too_short_for_switches_run_one_tenant_at_a_time() -> None:
    """Bursts of 0.5 ms: each would cost two switches of 0.22 ms. On for its part of the time, the tenant works in
    0.5 of each 0.55 ms."""
    loads = [Load("busy", Share(0.3)), Load("gaps", Share(0.6), busy_ns=MS_NS // 2, pause_ns=50_000)]
    result = run(loads, 12)
    assert result.worked_ns("gaps", 4 * SECOND_NS, 12 * SECOND_NS) / (8 * SECOND_NS) >= 0.59
    assert together(result, loads) >= 0.92


def test_a_tenant_that_hardly_works_costs_the_others_nothing() -> None:
    loads = [
        Load("a", Share(0.3)),
        Load("b", Share(0.3)),
        Load("seldom", Share(0.4), busy_ns=4 * MS_NS, pause_ns=80 * MS_NS),
    ]
    result = run(loads, 20)
    assert together(result, loads) >= 0.98
    for name in ("a", "b"):
        for part in result.windows(name, WINDOW_NS, 4 * SECOND_NS):
            assert part == pytest.approx(0.47, abs=0.01)


def test_a_limit_holds_alone_and_beside_a_tenant_with_gaps() -> None:
    result = run([Load("a", Share(0.25, 0.25))])
    for part in result.windows("a", WINDOW_NS):
        assert part == pytest.approx(0.25, abs=0.01)
    loads = [Load("a", Share(0.3, 0.3)), Load("b", Share(0.3), busy_ns=2 * MS_NS, pause_ns=8 * MS_NS)]
    for part in run(loads).windows("a", WINDOW_NS, 2 * SECOND_NS):
        assert part <= 0.31


@pytest.mark.parametrize("beside", [1, 2, 3])
def test_a_service_waits_one_switch_whatever_runs_beside_it(beside: int) -> None:
    service = Load("service", Share(0.5), busy_ns=MS_NS, pause_ns=9 * MS_NS)
    others = [Load(f"be{i}", Share()) for i in range(beside)]
    classes = {"service": "latency-sensitive"} | {load.name: "best-effort" for load in others}
    result = run([service, *others], 12, classes)
    waits = sorted(end - came - MS_NS for name, came, end in result.bursts[2:] if name == "service")
    assert waits[len(waits) * 9 // 10] <= 220_000
    assert waits[-1] <= 700_000  # the longest waits are where the turn goes from one best-effort tenant to the next
    left = 1.0 - result.worked_ns("service", 0, result.end_ns) / result.end_ns
    best_effort = sum(result.worked_ns(load.name, 0, result.end_ns) for load in others) / result.end_ns
    assert best_effort >= 0.94 * left  # two switches in each 10 ms take 4.4 %
    for load in others:
        for part in result.windows(load.name, WINDOW_NS, SECOND_NS):
            assert part == pytest.approx(best_effort / beside, abs=0.025)


def test_a_service_that_never_rests_takes_nothing_that_others_were_promised() -> None:
    loads = [Load("service", Share(0.5)), Load("normal", Share(0.5)), Load("be", Share())]
    result = run(loads, 20, {"service": "latency-sensitive", "be": "best-effort"})
    assert min(result.windows("normal", WINDOW_NS, 2 * SECOND_NS)) >= 0.47
    # nearly nothing is left for best-effort work
    assert result.worked_ns("be", 0, result.end_ns) < 0.05 * result.end_ns


def test_orders_are_few() -> None:
    """Each costs about a third of a millisecond of the firmware's time."""
    loads = [Load(f"t{i}", Share(0.2), busy_ns=(3 + i) * MS_NS, pause_ns=MS_NS) for i in range(5)]
    assert len(run(loads, 20).orders) <= 20 * 102  # two orders a turn, ten turns of five tenants each second
    assert len(run([Load("a", Share(0.5)), Load("b", Share(0.5))], 20).orders) <= 10


IDLE = Load("idle", Share(0.2), busy_ns=1000, pause_ns=10**12)


def test_a_limit_holds_from_the_first_moment_beside_a_tenant_that_is_idle() -> None:
    """On a card, a tenant limited to 25 % that began beside an idle one had 26.7 % of the first two seconds, and 22.5 %
    of later ones, because it was first stopped when it had already used its part of a window."""
    result = run([Load("a", Share(0.25, 0.25), start_ns=4 * SECOND_NS), IDLE])
    for part in result.windows("a", WINDOW_NS, 4 * SECOND_NS):
        assert part == pytest.approx(0.25, abs=0.01)


def test_a_tenant_that_was_idle_may_not_use_the_limit_of_its_idle_time() -> None:
    """It works for a second of each four; when its limit was judged over the idle time, too, it had 38 %."""
    result = run([Load("a", Share(0.25, 0.25), busy_ns=SECOND_NS, pause_ns=3 * SECOND_NS), IDLE], 24)
    assert max(result.windows("a", WINDOW_NS)) <= 0.26


def test_a_limit_is_enforced_soon_after_the_other_tenant_has_stopped() -> None:
    """The agent reads usage each 50 ms, so the tenant has the GPU for itself for 0.1 s at most: 4 points of a window,
    and a period of the timetable may begin meanwhile."""
    loads = [Load("a", Share(0.25, 0.25)), Load("b", Share(0.5), busy_ns=4 * SECOND_NS, pause_ns=20 * SECOND_NS)]
    parts = run(loads).windows("a", WINDOW_NS)
    assert max(parts) <= 0.30
    assert parts[-1] == pytest.approx(0.25, abs=0.01)


def test_a_limit_holds_after_a_pause_too_short_to_count_as_idle() -> None:
    loads = [Load("a", Share(0.25, 0.25), busy_ns=700 * MS_NS, pause_ns=400 * MS_NS), IDLE]
    assert max(run(loads, 24).windows("a", WINDOW_NS)) <= 0.26


@pytest.mark.parametrize("pause_ns", [0, 50_000])
def test_limits_equal_to_requests_cost_no_share(pause_ns: int) -> None:
    """On a card, three tenants that wait for each four products had 9, 18 and 34 % of some windows, since a limit was
    applied to the tenant's turn, not to the period."""
    shares = {"a": 0.2, "b": 0.3, "c": 0.5}
    work = {"busy_ns": 8 * MS_NS, "pause_ns": pause_ns} if pause_ns else {}
    loads = [Load(n, Share(s, s), start_ns=i * SECOND_NS, **work) for i, (n, s) in enumerate(shares.items())]
    result = run(loads, 20)
    for name, share in shares.items():
        for part in result.windows(name, WINDOW_NS, 2 * SECOND_NS):
            assert share - 0.015 <= part <= share + 0.005


def test_limited_tenants_do_not_start_their_periods_together() -> None:
    """The third one had nothing at all: its part of the period ended within the first one's time slice."""
    loads = [
        Load("a", Share(0.31, 0.31)),
        Load("train", Share(0.28, 0.28), busy_ns=47 * MS_NS, pause_ns=4 * MS_NS),
        Load("b", Share(0.11, 0.11)),
    ]
    result = run(loads)
    for load in loads:
        for part in result.windows(load.name, WINDOW_NS, SECOND_NS):
            assert load.share.request - 0.025 <= part <= load.share.limit + 0.01


def test_a_limited_tenant_is_not_kept_off_by_the_slices_of_others() -> None:
    """It could run for 9 ms of each 100, in which another tenant had its time slice of 16 ms."""
    loads = [
        Load("limited", Share(0.1, 0.1), busy_ns=411_200_000, pause_ns=761_760_000),
        Load("gaps1", Share(0.38, 0.78), busy_ns=100_000, pause_ns=80_000),
        Load("gaps2", Share(0.21), busy_ns=80_000, pause_ns=140_000),
        Load("busy", Share()),
    ]
    assert run(loads).worked_ns("limited", 2 * SECOND_NS, 8 * SECOND_NS) >= 0.05 * 6 * SECOND_NS


def test_time_above_a_limit_goes_to_the_others() -> None:
    """A tenant with gaps had longer turns than its limit let it use, and the rest of them passed unused: 23 %."""
    limited = Load("limited", Share(0.3, 0.3), busy_ns=36 * MS_NS, pause_ns=8 * MS_NS)
    free = Load("free", Share(), busy_ns=1700_000, pause_ns=50_000)
    assert min(run([limited, free], 20).windows("free", WINDOW_NS, 4 * SECOND_NS)) >= 0.57


def test_a_compensated_tenant_leaves_one_without_a_request_its_part() -> None:
    """It had a quarter of its part, so the timetable was left for eight seconds, and "gaps" had 4 %, not 43."""
    loads = [
        Load("busy", Share()),
        Load("gaps", Share(0.43), busy_ns=370_000, pause_ns=20_000),
        Load("train", Share(0.31), busy_ns=37 * MS_NS, pause_ns=1_330_000),
    ]
    result = run(loads)
    assert min(result.windows("gaps", WINDOW_NS, 3 * SECOND_NS)) >= 0.41
    assert min(result.windows("busy", WINDOW_NS, 3 * SECOND_NS)) >= 0.2


def test_a_limit_beside_a_tenant_with_pauses_costs_no_share() -> None:
    """Stopped for a part of each period and preempted in the other part, it had 32 % of some windows."""
    loads = [Load("limited", Share(0.46, 0.46)), Load("long", Share(0.44), busy_ns=1212 * MS_NS, pause_ns=756 * MS_NS)]
    for part in run(loads, 20).windows("limited", WINDOW_NS, 3 * SECOND_NS):
        assert 0.43 <= part <= 0.48


def test_a_tenant_alone_with_pauses_keeps_its_limit() -> None:
    """Its part of the period grew to the whole after a pause, and it ran for 1.6 s without a stop."""
    left = Load("left", Share(0.22, 0.22), busy_ns=5_660_000, pause_ns=40_000, stop_ns=11_840 * MS_NS)
    loads = [Load("alone", Share(0.78, 0.78), busy_ns=1_727_330_000, pause_ns=398_210_000), left]
    assert max(run(loads, 20).windows("alone", WINDOW_NS, 12 * SECOND_NS)) <= 0.81


def test_the_limit_of_a_latency_sensitive_tenant_holds_beside_two_others() -> None:
    """It was not in the timetable of the others, so nothing stopped it: it had 60 %."""
    loads = [Load("service", Share(0.11, 0.11)), Load("a", Share(0.2)), Load("b", Share(0.5))]
    result = run(loads, 20, {"service": "latency-sensitive"})
    assert max(result.windows("service", WINDOW_NS, 4 * SECOND_NS)) <= 0.13


def test_instructions_take_effect_in_their_order() -> None:
    engine = SliceEngine([Load("a", Share(0.5))])
    engine.run(10 * MS_NS)
    engine._obey([Stop("0", "a")])
    engine.run(10 * MS_NS + 50_000)
    engine._obey([Go("0", "a")])
    engine.run(12 * MS_NS)
    assert engine._groups["a"].enabled


def test_a_tenant_that_cannot_use_half_of_its_turns_keeps_them() -> None:
    """Turns ended for eight seconds because it used less than half of its share, and it had 1 % in them."""
    loads = [
        Load("gaps", Share(0.54), busy_ns=200_000, pause_ns=250_000),
        Load("train", Share(0.23), busy_ns=41 * MS_NS, pause_ns=9 * MS_NS),
        Load("busy", Share(0.2)),
    ]
    assert min(run(loads).windows("gaps", WINDOW_NS, SECOND_NS)) >= 0.22


def test_a_service_that_nearly_always_works_takes_little_of_a_request() -> None:
    """It got its precedence back each second, since it used less than its share without it: "normal" had 39 %."""
    loads = [Load("service", Share(), busy_ns=6 * MS_NS, pause_ns=1_400_000), Load("normal", Share(0.75))]
    parts = run(loads, 20, {"service": "latency-sensitive"}).windows("normal", WINDOW_NS, 2 * SECOND_NS)
    assert min(parts) >= 0.64
    assert sum(parts) / len(parts) >= 0.68


def test_switches_to_a_service_count_as_used_by_it() -> None:
    """It used 0.12 of each 0.6 ms, and the switches took the rest: "normal" had nothing at all."""
    loads = [Load("service", Share(0.2), busy_ns=120_000, pause_ns=180_000), Load("normal", Share(0.5))]
    parts = run(loads, 20, {"service": "latency-sensitive"}).windows("normal", WINDOW_NS, 2 * SECOND_NS)
    assert min(parts) >= 0.34
    assert sum(parts) / len(parts) >= 0.45


def test_pauses_lengthen_no_turn_of_a_limited_tenant() -> None:
    """Pauses were taken for gaps, so it had a turn in which it used twice its limit while it did not pause."""
    loads = [
        Load("limited", Share(0.3, 0.3), busy_ns=400 * MS_NS, pause_ns=300 * MS_NS),
        Load("gaps", Share(0.3), busy_ns=500_000, pause_ns=50_000),
        Load("busy", Share(0.2)),
    ]
    assert max(run(loads, 20).windows("limited", WINDOW_NS)) <= 0.305


class Held(SliceEngine):
    """An engine in which the tenants of `held` begin no work in a span of time. `held`: name -> (start_ns, end_ns)."""

    held: dict[str, tuple[int, int]]

    def _burst(self, group: Any) -> None:
        start_ns, end_ns = self.held.get(group.load.name, (0, 0))
        if start_ns <= self.now_ns < end_ns:
            self._at(end_ns, self._burst, group)
        else:
            super()._burst(group)


PHASES_MS = (0, 30, 60, 90, 130, 160)


def test_tenants_that_stopped_have_no_turns() -> None:
    """Tenants without a request had turns of 5.4 ms every 1.1 s for as long as they did nothing: "busy" had 0.687, and
    each idle tenant cost the GPU half a per cent."""
    loads = [Load("gaps", Share(0.3), busy_ns=5 * MS_NS, pause_ns=200_000), Load("busy", Share(0.7))]
    loads += [Load(f"stopped{i}", Share(), busy_ns=MS_NS // 2, pause_ns=10**13) for i in range(3)]
    assert min(run(loads).windows("busy", WINDOW_NS, 4 * SECOND_NS)) >= 0.695


@pytest.mark.parametrize("phase_ms", PHASES_MS)
def test_a_limit_holds_from_the_first_moment_if_no_tenant_has_worked_yet(phase_ms: int) -> None:
    """The tenant was on all the time until its work was noticed: 0.27 of the first window, then 0.23 of others."""
    begin_ns = 4 * SECOND_NS + phase_ms * MS_NS
    engine = Held([Load("a", Share(0.25, 0.25)), IDLE])
    engine.held = {"a": (0, begin_ns)}
    for part in engine.run(10 * SECOND_NS).windows("a", WINDOW_NS, begin_ns):
        assert part == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("phase_ms", PHASES_MS)
def test_a_limit_holds_after_a_pause(phase_ms: int) -> None:
    """On a card, training had 0.2327 of the second window. A step in which it began to work was taken to say how much
    of its time it uses, so it had up to 0.2 s too much, and less than its limit for the next second."""
    begin_ns = 4 * SECOND_NS + phase_ms * MS_NS
    engine = Held([Load("a", Share(0.25), busy_ns=60 * MS_NS, pause_ns=100_000), IDLE])
    engine.held = {"a": (begin_ns - 340 * MS_NS, begin_ns)}
    engine.change(begin_ns - 280 * MS_NS, "a", Share(0.25, 0.25))
    for part in engine.run(10 * SECOND_NS).windows("a", WINDOW_NS, begin_ns + 20 * MS_NS):
        assert part == pytest.approx(0.25, abs=0.01)


def test_a_limit_holds_while_another_tenant_joins() -> None:
    """Limits were not kept until the next correction: the first one had 0.254 of a window."""
    loads = [
        Load("first", Share(0.0, 0.23), busy_ns=17 * MS_NS, pause_ns=2_900_000),
        Load("second", Share(0.0, 0.22), start_ns=3443 * MS_NS),
    ]
    assert max(run(loads).windows("first", WINDOW_NS)) <= 0.235


def test_a_tenant_that_a_service_leaves_no_time_has_work() -> None:
    """It was taken to be idle, so the service regained its precedence: "gaps" had 0.13 of some windows. It can use 0.43
    of its request."""
    loads = [
        Load("be", Share(0.0, 0.1)),
        Load("limited", Share(0.0, 0.1)),
        Load("service", Share()),
        Load("gaps", Share(0.54), busy_ns=210_000, pause_ns=280_000),
    ]
    result = run(loads, 14, {"service": "latency-sensitive", "be": "best-effort"})
    assert min(result.windows("gaps", WINDOW_NS)) >= 0.43 * 0.54 - 0.005
