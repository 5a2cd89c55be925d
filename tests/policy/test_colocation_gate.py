"""The compiled rule of best-effort launches: worked cases."""

from __future__ import annotations

import pytest
from colocation_events import EVENTS, US
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.abi.floor import LEAD_NS, RuleKind, WorkClass
from cotenant.abi.rules import FLOOR_REST_NS, FloorRule, FloorState
from cotenant.core.errors import InputError
from cotenant.native.rules import allowed_ns, ended, may_go, rested_at_ns, went
from cotenant.policy.colocation import (
    ColocationSettings,
    CurvePoint,
    choose_budget,
    settings_for,
)

NONE, UNKNOWN, MEMORY, COMPUTE = WorkClass.NONE, WorkClass.UNKNOWN, WorkClass.MEMORY, WorkClass.COMPUTE


def test_tidal_lets_nothing_go_beside_ls_work() -> None:
    rule, state = settings_for("tidal").rule(), FloorState()
    assert not may_go(rule, state, UNKNOWN, 5 * US, 0)
    assert may_go(rule, state, NONE, 5 * US, 0)


def test_tidal_bounds_the_work_in_flight_by_time() -> None:
    rule, state = settings_for("tidal", in_flight_us=100).rule(), FloorState()
    for _ in range(3):
        assert may_go(rule, state, NONE, 30 * US, 0)
        went(rule, state, NONE, 30 * US, 0)
    state.unfinished = 3
    assert not may_go(rule, state, NONE, 30 * US, 0)  # 90 us in flight + 30 us > 100 us
    assert may_go(rule, state, NONE, 10 * US, 0)
    ended(state, 30 * US, 30 * US)
    assert state.outstanding_ns == 60 * US
    assert state.busy_until_ns == 90 * US
    assert may_go(rule, state, NONE, 30 * US, 30 * US)


def test_tidal_queues_a_long_kernel_just_before_the_one_in_front_ends() -> None:
    rule, state = FloorRule(scheme=RuleKind.TIDAL, budget_ns=100 * US, lead_ns=20 * US), FloorState()
    assert may_go(rule, state, NONE, 1600 * US, 0)  # nothing is in flight, so a kernel of any length may be launched
    went(rule, state, NONE, 1600 * US, 0)
    state.unfinished = 1
    assert not may_go(rule, state, NONE, 1600 * US, 1579 * US)
    assert may_go(rule, state, NONE, 1600 * US, 1580 * US)
    went(rule, state, NONE, 1600 * US, 1580 * US)
    state.unfinished = 2
    # two launches are not known to have ended, and a third must not follow
    assert not may_go(rule, state, NONE, 1600 * US, 3190 * US)


def test_tidal_beside_ls_spends_a_credit_that_time_earns() -> None:
    rule, state = settings_for("tidal", overlap=0.1).rule(), FloorState()
    assert not may_go(rule, state, MEMORY, 50 * US, 1000)
    assert not may_go(rule, state, MEMORY, 50 * US, 1000 + 400 * US)  # 40 us of credit have been earned
    assert may_go(rule, state, MEMORY, 50 * US, 1000 + 500 * US)
    went(rule, state, MEMORY, 50 * US, 1000 + 500 * US)
    ended(state, 50 * US, 1000 + 560 * US)
    assert not may_go(rule, state, MEMORY, 50 * US, 1000 + 560 * US)


@pytest.mark.parametrize("length_us", [45, 300])
@pytest.mark.parametrize("overlap", [0.1, 0.33, 1.0])
def test_tidal_beside_ls_that_never_pauses_runs_for_the_part_of_the_time_that_was_set(
    overlap: float, length_us: int
) -> None:
    rule, state, now, busy = settings_for("tidal", overlap=overlap).rule(), FloorState(), US, 0
    while now < 200_000 * US:
        while not may_go(rule, state, MEMORY, length_us * US, now):
            now += US
        went(rule, state, MEMORY, length_us * US, now)
        now += length_us * US
        ended(state, length_us * US, now)
        busy += length_us * US
    assert busy / now == pytest.approx(overlap, abs=0.01)


def test_a_longer_kernel_than_the_credit_can_be_leaves_a_debt() -> None:
    rule, state = settings_for("tidal", overlap=0.5, in_flight_us=100).rule(), FloorState()
    may_go(rule, state, MEMORY, 300 * US, 1)
    assert may_go(rule, state, MEMORY, 300 * US, 1 + 200 * US)
    went(rule, state, MEMORY, 300 * US, 1 + 200 * US)
    ended(state, 300 * US, 1 + 500 * US)
    assert state.credit_ns == -200 * US
    assert not may_go(rule, state, MEMORY, 300 * US, 1 + 500 * US)  # 150 us were earned since, so 50 us of debt remain


def test_orion_pairs_other_classes_and_drains_each_batch() -> None:
    rule = FloorRule(scheme=RuleKind.ORION, budget_ns=160 * US, work_class=MEMORY)
    state = FloorState()
    assert not may_go(rule, state, MEMORY, 100 * US, 0)
    assert may_go(rule, state, COMPUTE, 100 * US, 0)
    assert may_go(rule, state, UNKNOWN, 100 * US, 0)  # Orion lets kernels of unknown class pass
    for _ in range(2):
        assert may_go(rule, state, NONE, 100 * US, 0)
        went(rule, state, NONE, 100 * US, 0)
    state.unfinished = 2
    # 200 us > 160 us: the window is full, which counts also while the LS process is idle
    assert not may_go(rule, state, NONE, 1, 0)
    ended(state, 100 * US, 100 * US)
    assert not may_go(rule, state, NONE, 1, 100 * US)  # no launch until all of them have ended
    ended(state, 100 * US, 200 * US)
    assert may_go(rule, state, NONE, 1, 200 * US)
    assert state.batch_ns == 0


def test_orion_keeps_kernels_that_fill_more_sms_than_the_threshold_away_from_ls() -> None:
    rule = FloorRule(scheme=RuleKind.ORION, budget_ns=160 * US, sm_threshold=80, work_class=MEMORY, work_sms=98)
    assert not may_go(rule, FloorState(), COMPUTE, 10 * US, 0)
    assert may_go(rule, FloorState(), NONE, 10 * US, 0)


def test_temporal_has_one_kernel_in_flight() -> None:
    rule, state = settings_for("temporal").rule(), FloorState()
    assert may_go(rule, state, NONE, 1600 * US, 0)
    went(rule, state, NONE, 1600 * US, 0)
    assert not may_go(rule, state, NONE, US, 1599 * US)
    state.unfinished = 1
    ended(state, 1600 * US, 1600 * US)
    assert may_go(rule, state, NONE, US, 1600 * US)


def test_several_best_effort_processes_divide_the_time_in_flight() -> None:
    assert ColocationSettings(in_flight_us=100).rule(tenants=4).budget_ns == 25 * US


@pytest.mark.parametrize(
    "bad", [{"in_flight_us": 0}, {"overlap": 1.5}, {"run_ahead": "no"}, {"heartbeat_timeout_ms": 0}, {"duty_cycle": 0}]
)
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        ColocationSettings(**bad)  # type: ignore[arg-type]


def test_the_budget_is_interpolated_to_what_ls_tolerates() -> None:
    curve = [CurvePoint(0.1, 1.02, 150.0), CurvePoint(0.2, 1.08, 300.0), CurvePoint(0.5, 3.0, 800.0)]
    budget = choose_budget(curve, 1.05)
    assert budget.overlap == pytest.approx(0.15)
    assert budget.gb_per_s == pytest.approx(225.0)
    assert choose_budget([CurvePoint(0.1, 1.3, 150.0)], 1.0).overlap == 0.0
    assert choose_budget([], 1.05) == CurvePoint(0.0, 1.0)


def test_the_budget_takes_the_sms_that_move_most_bytes() -> None:
    curve = [CurvePoint(0.2, 1.04, 100.0, 0.12), CurvePoint(0.1, 1.04, 250.0, 1.0)]
    assert choose_budget(curve, 1.05) == CurvePoint(0.1, 1.04, 250.0, 1.0)


# -- a bound that grows ------------------------------------------------------------------------------------------------


def stretched(stretch: float) -> FloorRule:
    """tidal with a budget that may grow so far."""
    return FloorRule(scheme=RuleKind.TIDAL, budget_ns=100 * US, lead_ns=LEAD_NS, stretch_permille=round(stretch * 1000))


class Play:
    """A program before the rule: its launches, each after so much time of its host, on a GPU that runs as predicted."""

    def __init__(self, rule: FloorRule) -> None:
        self.rule, self.state, self.now = rule, FloorState(), 1
        self.pieces: list[tuple[int, int]] = []  # (end, length) of each kernel in flight
        self.area = 0.0
        self.busy = self.took = 0

    def _pass(self, to: int) -> None:
        for end, _ in self.pieces[-1:]:
            left = max(0, end - self.now)
            inside = min(left, to - self.now)
            self.area += inside * left - inside * inside / 2
            self.busy += inside
        self.took += to - self.now
        self.now = to
        while self.pieces and self.pieces[0][0] <= to:
            ended(self.state, self.pieces.pop(0)[1], to)

    def launch(self, length: int, host: int) -> None:
        self._pass(self.now + host)
        while not may_go(self.rule, self.state, NONE, length, self.now):
            marks = [end for end, _ in self.pieces[:1]] + [self.state.busy_until_ns - self.rule.lead_ns]
            marks.append(rested_at_ns(self.state))
            self._pass(min(mark for mark in marks if mark > self.now))
        went(self.rule, self.state, NONE, length, self.now)
        self.state.unfinished += 1
        self.pieces.append((self.state.busy_until_ns, length))


def bursts(host_us: int, kernels_us: int) -> list[tuple[int, int]]:
    """A step: 30 launches that the host makes fast, then 30 that it is slow at."""
    return [(kernels_us * US, 2 * US)] * 30 + [(kernels_us * US, host_us * US)] * 30


def test_a_program_that_keeps_the_gpu_full_has_no_more_than_the_interval() -> None:
    play = Play(stretched(10))
    for _ in range(4000):
        play.launch(26 * US, 3 * US)
        assert allowed_ns(play.rule, play.state) == 100 * US


def test_a_program_that_its_host_holds_back_runs_ahead_as_far_as_ls_waits_no_longer() -> None:
    fixed, grown = (Play(stretched(stretch)) for stretch in (1, 4))
    for play in (fixed, grown):
        for _ in range(60):
            for length, host in bursts(60, 30):
                play.launch(length, host)
    assert grown.state.stretch_permille > 1500
    assert grown.took < fixed.took * 0.99
    assert grown.area / grown.took < 100 * US, "what LS finds in flight, on average over time"


@pytest.mark.parametrize("stretch", [2.0, 4.0, 8.0])
def test_ls_finds_at_most_a_quarter_of_what_the_bound_may_grow_to(stretch: float) -> None:
    play = Play(stretched(stretch))
    for _ in range(60):
        for length, host in bursts(60, 30):
            play.launch(length, host)
    assert play.area / play.took < 100 * US * stretch / 4


def test_gaps_in_which_a_program_has_nothing_to_do_do_not_count() -> None:
    play = Play(settings_for("tidal").rule())
    for _ in range(300):
        for _ in range(20):
            play.launch(26 * US, 3 * US)
        play._pass(play.now + 5_000 * US)
    assert allowed_ns(play.rule, play.state) == 100 * US


@pytest.mark.parametrize(("length_us", "host_us"), [(26, 3), (195, 3), (1600, 3)])
def test_a_duty_leaves_that_part_of_the_time_idle_and_lets_nothing_grow(length_us: int, host_us: int) -> None:
    play = Play(settings_for("tidal", duty_cycle=0.8).rule())
    for _ in range(1000):
        play.launch(length_us * US, host_us * US)
        assert allowed_ns(play.rule, play.state) == 100 * US
        assert play.state.owed_ns < FLOOR_REST_NS + length_us * US // 4
    assert play.busy / (play.took + play.state.owed_ns) == pytest.approx(0.8, abs=0.01)


def test_a_paced_program_owes_idle_time_and_pays_it_at_once() -> None:
    rule, state = settings_for("tidal", duty_cycle=0.5).rule(), FloorState()
    assert may_go(rule, state, NONE, 100 * US, 1000 * US)
    went(rule, state, NONE, 100 * US, 1000 * US)
    state.unfinished = 1
    ended(state, 100 * US, 1100 * US)
    # the debt of 100 us is less than the idle time that is paid at once
    assert may_go(rule, state, NONE, 400 * US, 1100 * US)
    went(rule, state, NONE, 400 * US, 1100 * US)
    state.unfinished = 1
    ended(state, 400 * US, 1500 * US)
    assert state.owed_ns == 500 * US
    assert not may_go(rule, state, NONE, 200 * US, 1999 * US)
    assert may_go(rule, state, NONE, 200 * US, 2000 * US)


def test_idle_time_of_the_programs_own_pays_and_the_time_of_ls_work_does_not() -> None:
    rule, state = settings_for("tidal", duty_cycle=0.8).rule(), FloorState()
    assert may_go(rule, state, NONE, 700 * US, 1000 * US)
    went(rule, state, NONE, 700 * US, 1000 * US)
    ended(state, 700 * US, 1700 * US)
    state.unfinished = 0
    assert may_go(rule, state, NONE, 100 * US, 1800 * US)  # the debt is 175 us, of which 100 have passed idle
    went(rule, state, NONE, 100 * US, 1800 * US)
    assert state.owed_ns == 100 * US
    ended(state, 100 * US, 1900 * US)
    assert not may_go(rule, state, UNKNOWN, 100 * US, 1900 * US)
    assert may_go(rule, state, NONE, 100 * US, 9000 * US)
    went(rule, state, NONE, 100 * US, 9000 * US)
    assert state.owed_ns == 125 * US


def test_the_bound_shrinks_again() -> None:
    play = Play(settings_for("tidal").rule())
    for _ in range(60):
        for length, host in bursts(60, 30):
            play.launch(length, host)
    assert allowed_ns(play.rule, play.state) > 150 * US
    for _ in range(6000):
        play.launch(26 * US, 3 * US)
    assert allowed_ns(play.rule, play.state) == 100 * US


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 300), st.integers(1, 400)), min_size=1, max_size=30),
    st.sampled_from([1.0, 2.0, 4.0, 10.0]),
)
def test_whatever_the_program_does_the_bound_stays_between_its_ends(
    step: list[tuple[int, int]], stretch: float
) -> None:
    play = Play(stretched(stretch))
    for _ in range(200):
        for length, host in step:
            play.launch(length * US, host * US)
            allowed = allowed_ns(play.rule, play.state)
            assert 100 * US <= allowed <= 100 * US * stretch
            longest = max((piece for _, piece in play.pieces), default=0)
            # one kernel may be longer than the bound, and another one may be queued just before it ends
            assert sum(piece for _, piece in play.pieces) <= 100 * US * stretch + 2 * longest


@settings(max_examples=200, deadline=None)
@given(st.integers(10 * US, 400 * US), st.integers(0, 50 * US), EVENTS)
def test_tidal_never_has_more_in_flight_than_it_says(
    interval: int, lead: int, events: list[tuple[int, int, int, bool]]
) -> None:
    """At most budget_ns, or one kernel that is longer and one behind it, queued lead_ns before its end."""
    rule, state = FloorRule(scheme=RuleKind.TIDAL, budget_ns=interval, lead_ns=lead), FloorState()
    pieces: list[int] = []
    now = 0
    for active, length, passes, done in events:
        now += passes
        if done and pieces:
            ended(state, pieces.pop(0), now)
        if may_go(rule, state, WorkClass(active), length, now):
            assert not active
            assert not pieces or sum(pieces) + length <= interval or len(pieces) == 1
            went(rule, state, WorkClass(active), length, now)
            state.unfinished += 1
            pieces.append(length)
        assert state.outstanding_ns == sum(pieces)
