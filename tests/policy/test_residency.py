"""Residency: no card overfilled, nobody moved in vain, and time for moving bounded. Values are worked out by hand."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_loads import saturated

from cotenant.policy.residency import GpuResidency, MoveRates, ResidencySettings, Victim
from cotenant.policy.shares import SECOND_NS, QuotaSettings, Share
from cotenant.sim.shares.engine import Load
from cotenant.sim.shares.moves import Card, MovingTokenEngine

GIB = 1 << 30


def gpu(capacity: int, **tenants: tuple[int, int]) -> GpuResidency:
    residency = GpuResidency(capacity)
    for index, (name, (movable, resident)) in enumerate(tenants.items()):
        residency.resize(name, movable=movable, resident=resident).used_ns = index
    return residency


def test_only_what_is_lacking_moves() -> None:
    """70 + 70 on 100: the one that comes lacks 70, 30 are free, so 40 leave."""
    switch = gpu(100, a=(70, 70), b=(70, 0)).switch("b")
    assert switch.out == (("a", 40),)
    assert (switch.in_bytes, switch.short_bytes) == (70, 0)


def test_the_last_in_line_leaves_first() -> None:
    """a, b, c in a round of which two fit: c comes, a is next, so b leaves, though a was used longer ago."""
    residency = gpu(90, a=(40, 40), b=(40, 40), c=(40, 0))
    assert residency.switch("c", line=["a", "b"]).out == (("b", 30),)
    # no tenant waits, so the one leaves that was not used for longest
    assert residency.switch("c").out == (("a", 30),)
    # a tenant that does not wait leaves before one that does
    assert residency.switch("c", line=["a"]).out == (("b", 30),)


def test_those_that_run_or_cannot_move_stay() -> None:
    residency = gpu(100, a=(60, 60), b=(30, 30), c=(50, 0))
    assert residency.switch("c", stay=["a"]).short_bytes == 10
    residency.resize("b", movable=30, resident=30, can_leave=False)
    assert residency.switch("c").out == (("a", 40),)
    residency.resize("a", movable=60, resident=60, can_leave=False)
    assert residency.switch("c").short_bytes == 40


def test_a_card_that_has_less_than_the_sums_say() -> None:
    residency = gpu(800, a=(400, 400), b=(300, 0))
    assert residency.switch("b").out == ()
    residency.ran_short(50)
    assert residency.switch("b").out == ()
    residency.ran_short(100)
    assert residency.overhead_bytes == 150
    assert residency.switch("b").out == (Victim("a", 50),)
    # Of the card's 800 bytes, 400 are a's and 150 are free. So others hold 250, however much the card really has.
    residency.driver_says(150)
    assert residency.overhead_bytes == 250
    assert residency.switch("b").out == (Victim("a", 150),)
    # `a` is charged with 400 bytes but never took 100 of them, and 500 are free. So others hold 800 - 300 - 500 = 0.
    residency.driver_says(500, not_taken=100)
    assert residency.overhead_bytes == 0
    residency.driver_says(900)  # more than the card has, as on a card of which the tenants share only a part
    assert residency.overhead_bytes == 0


def test_a_driver_that_refuses_what_it_calls_free() -> None:
    gib = 1 << 30
    residency = gpu(80 * gib, a=(40 * gib, 40 * gib), b=(45 * gib, 0))
    for refusals in range(1, 20):
        residency.need_margin()
        residency.driver_says(40 * gib)
        assert residency.overhead_bytes == min(refusals << 27, 2 * gib)
    assert residency.switch("b").out == (Victim("a", 7 * gib),)  # 5 GiB are lacking, and 2 GiB are added as a margin


def test_a_turn_pays_for_its_move() -> None:
    """1 s of moving at 5 % of the time: 19 s of work."""
    residency = gpu(100, a=(70, 70), b=(70, 0))
    assert residency.settings.most_moving == 0.05
    assert residency.floor_ns(SECOND_NS) == pytest.approx(19 * SECOND_NS)
    residency.remove("a")
    assert residency.floor_ns(SECOND_NS) == 0  # no tenant will have to move again
    with pytest.raises(ValueError, match="between 0 and 1"):
        ResidencySettings(1.0)


def test_the_time_of_a_switch() -> None:
    """32 GB out and 32 in at 40 each way: 0.8 s; what one direction has more goes at its own rate."""
    rates = MoveRates(out_bps=50e9, in_bps=50e9, both_bps=40e9, fixed_s=0.0)
    assert rates.seconds(32_000_000_000, 32_000_000_000) == pytest.approx(0.8)
    assert rates.seconds(0, 10_000_000_000) == pytest.approx(0.2)
    assert rates.seconds(32_000_000_000, 42_000_000_000) == pytest.approx(1.0)
    assert rates.seconds(0, 0) == 0.0
    rates.observe(0, 10_000_000_000, 0.25)  # the first measurement is used without an average
    assert rates.in_bps == pytest.approx(40e9)


@pytest.mark.parametrize("size", [64 << 20, 1 << 30, 24 << 30])
@pytest.mark.parametrize("ways", [(1, 0), (0, 1), (1, 1)])
def test_a_move_that_takes_as_long_as_expected_changes_no_rate(size: int, ways: tuple[int, int]) -> None:
    rates = MoveRates()
    expected = rates.seconds(size * ways[0], size * ways[1])
    for _ in range(200):
        rates.observe(size * ways[0], size * ways[1], rates.seconds(size * ways[0], size * ways[1]))
    assert rates.seconds(size * ways[0], size * ways[1]) == pytest.approx(expected)


def test_rates_that_small_moves_teach_are_right_for_large_ones() -> None:
    """Figures of an H200: 805 MB leave in 15.4 ms, of which 1.3 ms are the fixed part, and 24 GiB in 0.48 s."""
    rates = MoveRates()
    rates.observe(805_000_000, 0, 0.0154)
    assert rates.seconds(24 << 30, 0) == pytest.approx(0.48, rel=0.08)
    for _ in range(20):
        rates.observe(24 << 30, 0, 0.48)
    assert rates.seconds(24 << 30, 0) == pytest.approx(0.48, abs=1.1 * rates.fixed_s)


def test_a_slow_link_is_noticed_by_small_moves() -> None:
    """PCIe 3.0 with 12 GB/s: 512 MiB take 45 ms."""
    rates = MoveRates()
    rates.observe(0, 512 << 20, 0.045)
    assert rates.seconds(0, 512 << 20) == pytest.approx(0.045)
    for _ in range(20):
        rates.observe(0, 24 << 30, 2.15)
    assert rates.seconds(0, 24 << 30) == pytest.approx(2.15, rel=0.01)


@st.composite
def cards(draw: st.DrawFn) -> GpuResidency:
    capacity = draw(st.integers(10, 1000))
    residency = GpuResidency(capacity)
    left = capacity
    for name in "abcdef"[: draw(st.integers(1, 6))]:
        resident = draw(st.integers(0, left))
        fixed = draw(st.integers(0, left - resident))
        left -= resident + fixed
        more = draw(st.integers(0, 500))
        leave = draw(st.booleans())
        occupant = residency.resize(name, movable=resident + more, resident=resident, fixed=fixed, can_leave=leave)
        occupant.used_ns = draw(st.integers(0, 9))
    return residency


@given(cards(), st.data())
def test_every_switch_is_possible_and_no_larger_than_needed(residency: GpuResidency, data: st.DataObject) -> None:
    names = list(residency.occupants)
    me = data.draw(st.sampled_from(names))
    line = data.draw(st.permutations(names))[: data.draw(st.integers(0, len(names)))]
    stay = data.draw(st.sets(st.sampled_from(names)))
    more = data.draw(st.integers(0, 300))
    free = residency.free_bytes
    switch = residency.switch(me, more_bytes=more, line=line, stay=stay)
    need = residency.occupants[me].missing_bytes + more
    assert switch.in_bytes == need
    victims = [victim.tenant for victim in switch.out]
    assert len(set(victims)) == len(victims)
    assert not set(victims) & ({me} | stay)
    for victim in switch.out:
        occupant = residency.occupants[victim.tenant]
        assert occupant.can_leave
        assert 0 < victim.size <= occupant.resident_bytes
    # exactly the lacking amount leaves, or everything that can leave
    assert switch.out_bytes == max(0, need - free) - switch.short_bytes
    if switch.short_bytes:
        can = sum(o.resident_bytes for o in residency.occupants.values() if o.can_leave and o.name not in {me} | stay)
        assert switch.out_bytes == can


# ---- with turns, in virtual time ----

TURNS = QuotaSettings(min_quota_ns=20_000_000, quota_ns=50_000_000, max_quota_ns=50_000_000)


def engine(card_gib: int, memory: dict[str, int], loads: list[Load], most_moving: float = 0.05) -> MovingTokenEngine:
    sizes = {name: gib * GIB for name, gib in memory.items()}
    return MovingTokenEngine(loads, TURNS, Card(card_gib * GIB, sizes, ResidencySettings(most_moving)))


def equal(names: str) -> list[Load]:
    return [saturated(name, 1.0 / len(names)) for name in names]


@pytest.mark.parametrize("most", [0.02, 0.05, 0.2])
def test_three_that_do_not_fit_two_at_a_time_do_not_thrash(most: float) -> None:
    """48 GiB each on 80: at most that fraction of the time moves, and each gets its third."""
    run = engine(80, dict.fromkeys("abc", 48), equal("abc"), most)
    until_ns = 3000 * SECOND_NS
    result = run.run(until_ns)
    # the run may end before the turn that pays for the last move
    last = max(move.end_ns - move.start_ns for move in run.moves)
    assert 0 < run.moving_ns(0, until_ns) <= most * until_ns + last
    shares = result.shares(100 * SECOND_NS, until_ns)
    assert shares == pytest.approx(dict.fromkeys("abc", 1 / 3), abs=0.07)


def test_two_jobs_of_70_percent_reach_90_percent_of_one_alone() -> None:
    run = engine(80, {"a": 56, "b": 56}, equal("ab"))
    until_ns = 300 * SECOND_NS
    result = run.run(until_ns)
    worked = sum(end - start for _, _, start, end in result.worked)
    assert worked / until_ns >= 0.94
    # only the lacking amount moves: 112 - 80 = 32 GiB each way
    assert {(m.out_bytes // GIB, m.in_bytes // GIB) for m in run.moves[2:]} == {(32, 32)}


def test_what_fits_moves_once_and_turns_stay_short() -> None:
    run = engine(80, {"a": 30, "b": 30}, equal("ab"))
    result = run.run(60 * SECOND_NS)
    assert len(run.moves) == 2
    late = [t for t in result.turns if t.start_ns > 25 * SECOND_NS and t.reason != "open"]
    assert statistics.median(t.end_ns - t.start_ns for t in late) <= 60_000_000


def test_a_resident_pair_beside_a_third_keeps_its_short_turns() -> None:
    """a and b fit together, c fits with neither: c's turns are long and few, a and b share between them."""
    run = engine(80, {"a": 30, "b": 30, "c": 60}, equal("abc"))
    until_ns = 600 * SECOND_NS
    result = run.run(until_ns)
    assert run.moving_ns(0, until_ns) <= 0.06 * until_ns
    shares = result.shares(100 * SECOND_NS, until_ns)
    assert shares == pytest.approx(dict.fromkeys("abc", 1 / 3), abs=0.1)


def test_a_short_pause_does_not_cost_a_move() -> None:
    """a pauses 100 ms within each step; a switch takes a second, so its turn is not taken for that."""
    paused = Load("a", Share(0.5), busy_ns=400_000_000, pause_ns=100_000_000)
    run = engine(80, {"a": 56, "b": 56}, [paused, saturated("b", 0.5)])
    until_ns = 200 * SECOND_NS
    run.run(until_ns)
    assert run.moving_ns(0, until_ns) <= 0.06 * until_ns


def test_a_tenant_that_leaves_makes_room() -> None:
    run = engine(80, {"a": 56, "b": 56}, [Load("a", Share(0.5), stop_ns=30 * SECOND_NS), saturated("b", 0.5)])
    result = run.run(90 * SECOND_NS)
    assert result.shares(60 * SECOND_NS, 90 * SECOND_NS)["b"] > 0.95
