"""What the rule of copies promises, on the pure queue in virtual time: fairness, waits, no starvation, no idle link."""

from __future__ import annotations

import itertools

import pytest
from copy_oracle import CREDIT_SLICES, Link
from copy_world import Program, World
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.abi.copy_page import CopyRank
from cotenant.policy.copies import CopySettings

MIB = 1 << 20
CHUNK = 8 * MIB
MS = 1_000_000

weights = st.lists(st.sampled_from([0.25, 1.0, 1.0, 2.0, 3.0, 8.0]), min_size=2, max_size=5)
periods = st.sampled_from([CHUNK, 3 * CHUNK, 8 * CHUNK])


def chunked(period: int = 8 * CHUNK, in_flight: int = 2) -> CopySettings:
    return CopySettings(chunk_bytes=CHUNK, alone_chunks=1, period_bytes=period, in_flight=in_flight)


def most_ahead(period: int, mine: float, everybody: float) -> float:
    """By how many bytes over weight a queue can be before another: its slice, and a chunk where that is no multiple."""
    slice_bytes = max(CHUNK, int(period * mine / everybody))
    return (slice_bytes + (CHUNK if slice_bytes % CHUNK else 0)) / mine


@settings(max_examples=25, deadline=None)
@given(weights, periods, st.integers(1, 4), st.integers(0, 9))
def test_over_any_interval_shares_are_the_weights_within_a_slice(
    given_weights: list[float], period: int, in_flight: int, seed: int
) -> None:
    """Within one chunk each, where the period is no longer than a chunk."""
    world = World(chunked(period, in_flight), [Program(weight) for weight in given_weights], seed=seed).run(0.06)
    total = sum(given_weights)
    for one, other in itertools.combinations(range(len(given_weights)), 2):
        lead, leads = 0.0, [0.0]
        for grant in world.grants:
            if grant.number in (one, other):
                lead += (1 if grant.number == one else -1) * grant.size / given_weights[grant.number]
                leads.append(lead)
        bound = sum(most_ahead(period, given_weights[number], total) for number in (one, other))
        # the lead over an interval is a difference of two leads
        assert max(leads) - min(leads) <= bound + 1.0


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(1, 4), st.integers(0, 9))
def test_the_link_never_idles_while_somebody_waits(given_weights: list[float], in_flight: int, seed: int) -> None:
    world = World(chunked(in_flight=in_flight), [Program(weight) for weight in given_weights], seed=seed).run(0.05)
    held: list[int] = []
    for grant in world.grants:
        held.append(grant.others_flying)
        assert grant.others_flying < in_flight
    flying = sum(program.flying for program in world.programs)
    assert flying == in_flight, "as many as may be, at every moment: also at the last"


@settings(max_examples=20, deadline=None)
@given(weights, st.lists(st.integers(1, 4000), min_size=1, max_size=4), st.integers(0, 9))
def test_nobody_starves_beside_programs_that_come_and_go(
    given_weights: list[float], thinks_us: list[int], seed: int
) -> None:
    """Whoever always waits has its part by weight, less the credit of those who come back, once and not each time."""
    patient = Program(1.0)
    others = [
        Program(weight, size=CHUNK * (1 + 3 * number), think_ns=think * 1000)
        for number, (weight, think) in enumerate(zip(given_weights, itertools.cycle(thinks_us), strict=False))
    ]
    world = World(chunked(), [patient, *others], seed=seed).run(0.15)
    total = sum(given_weights) + 1.0
    moved = sum(program.moved for program in world.programs)
    credit = sum(CREDIT_SLICES * max(CHUNK, 8 * CHUNK * weight / total) for weight in given_weights)
    assert patient.moved >= moved / total - credit - 4 * CHUNK


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(1, 4), st.integers(3, 3000), st.integers(0, 9))
def test_who_goes_ahead_finds_at_most_what_is_in_flight(
    given_weights: list[float], in_flight: int, think_us: int, seed: int
) -> None:
    ls = Program(size=MIB, think_ns=think_us * 1000, rank=CopyRank.AHEAD, begin_ns=1_234_567)
    world = World(chunked(in_flight=in_flight), [ls, *(Program(weight) for weight in given_weights)], seed=seed).run(
        0.05
    )
    assert len(ls.waits_ns) > 3
    assert set(ls.waits_ns) == {0}, "its turn comes at once"
    for before, after in itertools.pairwise(world.grants):
        if before.number == 0:
            assert before.others_flying <= in_flight
            # others begin again only after the copy was seen to have ended, which is after at least 20 us of link time
            assert after.number == 0 or after.at_ns - before.at_ns > MIB / 55


@pytest.mark.parametrize("think_us", [5, 30, 100, 200, 300])
@pytest.mark.parametrize(("pair", "size"), [((1.0, 3.0), 64 * MIB), ((1.0, 1.0), 16 * MIB), ((1.0, 3.0), 256 * MIB)])
def test_programs_that_copy_one_by_one_get_their_weights(think_us: int, pair: tuple[float, float], size: int) -> None:
    """While the thread of one is back in its program others take what it leaves; it gets it back."""
    programs = [Program(weight, size=size, think_ns=think_us * 1000) for weight in pair]
    world = World(chunked(), programs, seen_ns=(2_000, 30_000)).run(0.3)
    for share, weight in zip(world.shares(), pair, strict=True):
        assert share == pytest.approx(weight / sum(pair), rel=0.05)


def test_a_copy_of_few_chunks_cannot_outweigh_what_its_pauses_leave() -> None:
    """The limit of a rule that never idles: two chunks of the others pass for each copy, whatever the weights."""
    programs = [Program(weight, size=2 * CHUNK, think_ns=30_000) for weight in (1.0, 3.0)]
    assert World(chunked(), programs).run(0.3).shares()[1] == pytest.approx(0.5, abs=0.02)


def test_one_that_moved_much_alone_is_not_made_to_wait_for_it() -> None:
    """Small copies are charged while nobody competes; the debt that is left of them is bounded."""
    world = World(chunked(), [Program(1.0), Program(1.0)])
    for _ in range(10_000):
        world.link.charge(0, 64 << 10)  # 640 MiB, a quarter of the copies that follow
    world.run(0.05)
    assert world.shares()[0] == pytest.approx(0.5, abs=0.11), "three slices of 32 MiB in 2.7 GiB"


def test_pieces_are_larger_only_where_nobody_is_held_up() -> None:
    rules = CopySettings()
    link, now_ns = Link(rules), 10**12
    link.queues[0].weight_milli = 1000
    assert link.is_sole(0)
    assert link.piece_bytes(0, now_ns) == rules.alone_bytes
    link.queues[1].weight_milli = 1000
    assert not link.is_sole(0)
    assert link.piece_bytes(0, now_ns) == rules.alone_bytes, "the other does not copy"
    assert link.ask(1, 2, MIB, now_ns) is not None
    assert link.piece_bytes(0, now_ns + 199 * MS) == rules.chunk_bytes
    assert link.piece_bytes(0, now_ns + 201 * MS) == rules.alone_bytes
    link.queues[2].weight_milli, link.queues[2].rank = 1000, CopyRank.AHEAD
    assert link.piece_bytes(0, now_ns + 201 * MS) == rules.chunk_bytes, "one that goes ahead may come at any time"
    assert link.piece_bytes(2, now_ns) == rules.alone_bytes, "for it the others stop anyway"
    link.queues[3].weight_milli, link.queues[3].rank = 1000, CopyRank.AHEAD
    assert link.piece_bytes(2, now_ns) == rules.chunk_bytes


def test_a_tenant_alone_gains_and_two_are_cut_again() -> None:
    """Words between pieces cost the link: one in 64 MiB costs a seventh of one in 8."""
    alone = World(CopySettings(), [Program(1.0, size=256 * MIB)]).run(0.1)
    assert {grant.size for grant in alone.grants} == {64 * MIB}
    pair = World(CopySettings(), [Program(1.0, size=256 * MIB), Program(1.0, size=256 * MIB, begin_ns=20 * MS)]).run(
        0.1
    )
    late = [grant for grant in pair.grants if grant.number == 1]
    assert late[0].size == CHUNK
    assert pair.grants[-1].size == CHUNK


def test_what_one_held_that_is_killed_comes_back() -> None:
    """Killed with every slot in its hand: the others go on when the agent frees them, or when the slots lapse."""
    link, now_ns = Link(CopySettings()), 10**12
    for number in (0, 1):
        link.queues[number].weight_milli = 1000
    assert [link.ask(0, 1, CHUNK, now_ns) for _ in range(2)] == [0, 1]
    assert link.ask(1, 2, CHUNK, now_ns + 30 * MS) is None, "both are in flight as far as anybody knows"
    # free the slots of process 1, as the agent does
    link.slots = [None if slot and slot.participant == 1 else slot for slot in link.slots]
    link.queues[0].seen_ns = 0
    assert link.ask(1, 2, CHUNK, now_ns + 30 * MS) == 0
    # nobody frees the slots, because the agent is gone as well
    link = Link(CopySettings())
    for number in (0, 1):
        link.queues[number].weight_milli = 1000
    assert [link.ask(0, 1, CHUNK, now_ns) for _ in range(2)] == [0, 1]
    assert link.ask(1, 2, CHUNK, now_ns + 200 * MS + 2000) == 0
