"""Turns on the link: the compiled rule against the pure state machine, the page's layout, worked-out cases."""

from __future__ import annotations

import random
import shutil

import pytest
from copy_oracle import NO_SLOT, Link, before, vtime
from copy_oracle import Queue as OracleQueue
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.abi.copy_page import (
    COPY_PAGE_BYTES,
    COPY_PAGEABLE,
    COPY_QUEUES,
    CopyLinkLayout,
    CopyRank,
)
from cotenant.abi.rules import CopyTicket
from cotenant.agent.copies.page import CopyPage
from cotenant.agent.copies.queue import CopyQueue as Queue
from cotenant.policy.copies import CopySettings

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
MIB = 1 << 20
MS = 1_000_000
SETTINGS = CopySettings(chunk_bytes=MIB, period_bytes=8 * MIB, wait_lapse_ns=5 * MS, slot_lapse_ns=200 * MS)


class Both:
    """The compiled rule and the oracle, told the same; every answer and the whole state must agree.

    `kind` 0 is pinned memory's link, 1 pageable memory's.
    """

    def __init__(self, weights: list[int], ranks: list[CopyRank], given_settings: CopySettings = SETTINGS) -> None:
        self.page = CopyPage(given_settings)
        # There are no other processes' queues: the oracle sees all queues.
        self.links = [Link(given_settings, queues=[OracleQueue() for _ in weights]) for _ in range(2)]
        self.links[0].twin, self.links[1].twin = self.links[1], self.links[0]
        self.link = self.links[0]
        self.asks = [Queue(self.page.fd, number, number + 1) for number in range(len(weights))]
        self.rows = [self.page.layout.links[0], self.page.layout.links[COPY_PAGEABLE]]
        self.row = self.rows[0]
        self.tickets: dict[tuple[int, int], CopyTicket] = {}  # key: copy kind and slot
        for number, (weight, rank) in enumerate(zip(weights, ranks, strict=True)):
            self.describe(number, weight, rank)

    def describe(self, number: int, weight: int, rank: CopyRank) -> None:
        self.page.describe(number, weight / 1000, rank)
        for link in self.links:
            link.queues[number].weight_milli, link.queues[number].rank = weight, rank

    def begin_at(self, origin: int) -> None:
        """All clocks there: near the end of the word differences count, not values."""
        for row, link in zip(self.rows, self.links, strict=True):
            for number in range(len(self.asks)):
                row.queues[number].vruntime = link.queues[number].vruntime = origin
            row.min_vruntime = link.min_vruntime = row.min_ahead = link.min_ahead = origin

    def close(self) -> None:
        for queue in self.asks:
            queue.close()
        self.row = None
        self.rows.clear()
        self.page.close()

    def ask(self, number: int, size: int, now_ns: int, kind: int = 0) -> int | None:
        ticket = self.asks[number].ask(kind * COPY_PAGEABLE, size, now_ns)
        place = self.links[kind].ask(number, number + 1, size, now_ns)
        got = None if ticket is None else ticket.slot if ticket.word else NO_SLOT
        assert got == place
        if ticket is not None and got != NO_SLOT:
            self.tickets[kind, ticket.slot] = ticket
        self.agree(now_ns)
        return place

    def done(self, place: int, now_ns: int, kind: int = 0) -> None:
        """As a process would: its ticket's word must still be there."""
        self.asks[0].done(kind * COPY_PAGEABLE, self.tickets.pop((kind, place)))
        self.links[kind].done(place)
        self.agree(now_ns)

    def withdraw(self, number: int, kind: int = 0) -> None:
        self.asks[number].withdraw(kind * COPY_PAGEABLE)
        self.links[kind].withdraw(number)

    def charge(self, number: int, size: int, kind: int) -> None:
        self.asks[number].charge(kind * COPY_PAGEABLE, size)
        self.links[kind].charge(number, size)

    def rescue(self, number: int, now_ns: int, kind: int) -> None:
        queue = self.asks[number]
        queue._rule.queue_rescue(queue._page, kind * COPY_PAGEABLE, number, now_ns)
        self.links[kind].rescue(number, now_ns)

    def leave(self, number: int) -> None:
        """The agent says that a queue is nobody's."""
        self.describe(number, 0, CopyRank.NORMAL)

    def agree(self, now_ns: int) -> None:
        for kind in (0, 1):
            self._agree(self.rows[kind], self.links[kind], kind * COPY_PAGEABLE, now_ns)

    def _agree(self, row: CopyLinkLayout, link: Link, direction: int, now_ns: int) -> None:
        for number in range(len(self.asks)):
            mine, theirs = row.queues[number], link.queues[number]
            assert (mine.vruntime, mine.seen_ns, mine.active_ns, mine.bytes, mine.chunks) == (
                theirs.vruntime, theirs.seen_ns, theirs.active_ns, theirs.bytes, theirs.chunks,
            )  # fmt: skip
            assert self.asks[number].piece_bytes(direction, now_ns) == link.piece_bytes(number, now_ns)
        assert (row.min_vruntime, row.min_ahead) == (link.min_vruntime, link.min_ahead)
        holder = 0 if link.slice_queue is None else link.slice_queue + 1
        assert row.slice == holder << 48 | link.slice_used
        for place, slot in enumerate(link.slots):
            assert (row.slots[place] >> 48) == (0 if slot is None else slot.participant)
        nearest = self.asks[0]._rule.queue_next(self.asks[0]._page, direction, now_ns)
        assert (None if nearest == COPY_QUEUES else nearest) == link.next(now_ns)


steps = st.lists(
    st.tuples(
        st.sampled_from([*["ask"] * 9, *["done"] * 3, *["withdraw"] * 3, *["charge"] * 3, "leave", "rescue"]),
        st.integers(0, 4),
        st.sampled_from([4096, MIB // 3, MIB, MIB, 3 * MIB]),
        st.sampled_from([0, 1, 50_000, MS, 3 * MS, 6 * MS, 250 * MS]),
        st.sampled_from([0, 0, 1]),
    ),
    min_size=5,
    max_size=70,
)


@settings(max_examples=60, deadline=None)
@given(
    steps,
    st.lists(st.sampled_from([1, 250, 1000, 1000, 3000, 64000]), min_size=5, max_size=5),
    st.lists(st.sampled_from([CopyRank.NORMAL, *CopyRank]), min_size=5, max_size=5),
    st.integers(1, 4),
    st.sampled_from([0, (1 << 64) - (5 << 20)]),
)
def test_c_and_python_agree_step_by_step(
    events: list[tuple[str, int, int, int, int]], weights: list[int], ranks: list[CopyRank], in_flight: int, origin: int
) -> None:
    chosen = CopySettings(
        chunk_bytes=MIB, period_bytes=8 * MIB, in_flight=in_flight, wait_lapse_ns=5 * MS, slot_lapse_ns=200 * MS
    )  # fmt: skip
    both = Both(weights, ranks, chosen)
    both.begin_at(origin)
    now_ns = 10**12
    for what, number, size, pause_ns, kind in events:
        now_ns += pause_ns
        if what == "ask":
            both.ask(number, size, now_ns, kind)
        elif what == "withdraw":
            both.withdraw(number, kind)
        elif what == "charge":
            both.charge(number, size, kind)
        elif what == "rescue":
            both.rescue(number, now_ns, kind)
        elif what == "leave":
            both.leave(number)
        elif both.tickets:
            held = sorted(both.tickets)
            chosen_kind, place = held[number % len(held)]
            both.done(place, now_ns, chosen_kind)
        both.agree(now_ns)
    both.close()


def run(
    weights: list[float], *, ranks: list[CopyRank] | None = None, rounds: int = 4000, chunk_ns: int = 40_000
) -> Link:
    """A link on which all copy without end: chunks end one after the other, whoever waits asks again at once."""
    link = Link(SETTINGS)
    for number, weight in enumerate(weights):
        link.queues[number].weight_milli = round(weight * 1000)
        link.queues[number].rank = (ranks or [CopyRank.NORMAL] * len(weights))[number]
    now_ns = 10**12
    flying: list[int] = []
    for _ in range(rounds):
        for _again in range(2):
            for number in range(len(weights)):
                place = link.ask(number, number + 1, MIB, now_ns)
                if place is not None:
                    flying.append(place)
        now_ns += chunk_ns
        if flying:
            link.done(flying.pop(0))
    return link


@pytest.mark.parametrize("weights", [[1, 3], [1, 1], [1, 2, 4], [0.25, 7.5]])
def test_shares_are_the_weights_within_a_slice(weights: list[float]) -> None:
    link = run(weights)
    total = sum(queue.bytes for queue in link.queues)
    for number, weight in enumerate(weights):
        wanted = total * weight / sum(weights)
        assert abs(link.queues[number].bytes - wanted) <= 2 * SETTINGS.period_bytes
    assert total == pytest.approx(4000 * MIB, rel=0.01), "the link never idles while somebody waits"


def test_a_lone_tenant_has_all_of_it_whatever_its_weight() -> None:
    assert run([0.001]).queues[0].bytes == pytest.approx(4000 * MIB, rel=0.001)


def test_who_slept_gets_three_slices_of_credit_not_its_past() -> None:
    link = Link(SETTINGS)
    for number in (0, 1):
        link.queues[number].weight_milli = 1000
    now_ns = 10**12
    for _ in range(1000):  # only queue 0 copies, 1000 MiB
        place = link.ask(0, 1, MIB, now_ns)
        assert place is not None
        link.done(place)
        now_ns += 40_000
    link.withdraw(0)
    link.ask(1, 2, MIB, now_ns)
    # At that moment queue 0 copies alone, so its slice is the whole period of 8 MiB.
    least = link.min_vruntime - vtime(3 * 8 * MIB, 1000)
    assert link.queues[1].vruntime == least + vtime(MIB, 1000)
    assert link.queues[0].bytes == 1000 * MIB


def test_ahead_goes_first_and_stops_the_others_but_not_what_flies() -> None:
    both = Both([1000, 1000], [CopyRank.NORMAL, CopyRank.AHEAD])
    now_ns = 10**12
    first, second = both.ask(0, MIB, now_ns), both.ask(0, MIB, now_ns)
    assert (first, second) == (0, 1)
    assert both.ask(0, MIB, now_ns) is None, "two are in flight"
    ahead = both.ask(1, MIB, now_ns)
    assert ahead == 2, "the link's two slots are taken, but not by those who go ahead"
    both.withdraw(1)
    both.done(0, now_ns)
    assert both.ask(0, MIB, now_ns) is None, "nobody starts while a copy ahead is under way"
    both.done(2, now_ns)
    assert both.ask(0, MIB, now_ns) == 0
    both.close()


def test_pinned_and_pageable_do_not_wait_for_each_other_but_for_those_ahead() -> None:
    """A thread that copies pageable memory keeps its turn for a millisecond: the link is not idle meanwhile."""
    both = Both([1000, 1000, 1000], [CopyRank.NORMAL, CopyRank.NORMAL, CopyRank.AHEAD])
    now_ns = 10**12
    assert both.ask(0, MIB, now_ns, kind=1) == 0
    assert both.ask(0, MIB, now_ns, kind=1) == 1
    assert both.ask(0, MIB, now_ns, kind=1) is None, "two of it are in flight"
    assert (both.ask(1, MIB, now_ns), both.ask(1, MIB, now_ns)) == (0, 1)
    both.done(0, now_ns, kind=1)
    both.done(0, now_ns)
    assert both.ask(2, MIB, now_ns, kind=1) == 0
    both.withdraw(2, kind=1)
    assert both.ask(1, MIB, now_ns) is None, "nobody begins while one that goes ahead is on its way"
    both.done(0, now_ns, kind=1)
    assert both.ask(1, MIB, now_ns) == 0
    both.close()


def test_claims_of_the_dead_lapse() -> None:
    both = Both([1000, 1000], [CopyRank.NORMAL] * 2)
    now_ns = 10**12
    assert both.ask(0, MIB, now_ns) == 0
    assert both.ask(0, MIB, now_ns) == 1
    assert both.ask(1, MIB, now_ns) is None
    # Process 0 is gone. Its slots are free again 200 ms after they were taken, to the microsecond.
    assert both.ask(1, MIB, now_ns + 200 * MS) is None
    assert both.ask(1, MIB, now_ns + 200 * MS + 2000) == 0
    # a ticket that has expired must not free the slot, which another process now holds
    stale = CopyTicket(slot=0, word=1 << 48 | (10**12 // 1000))
    both.asks[0].done(0, stale)
    assert both.row.slots[0] >> 48 == 2
    both.close()


def test_a_waiter_that_stopped_asking_is_passed_over() -> None:
    both = Both([1000, 1000], [CopyRank.NORMAL] * 2)
    now_ns = 10**12
    assert both.ask(1, MIB, now_ns) == 0
    assert both.ask(0, MIB, now_ns) is None, "it is still the slice of queue 1, which may ask again"
    assert both.ask(0, MIB, now_ns + 4 * MS) is None
    late = now_ns + 5 * MS  # queue 1 has not asked for 5 ms
    assert both.ask(0, MIB, late) == 1
    both.close()


def test_a_queue_that_became_nobody_s_does_not_wait_for_ever() -> None:
    """Its tenant has gone, a process of it waits: without a weight it would never be the next, so it goes."""
    both = Both([1000, 1000], [CopyRank.NORMAL] * 2)
    now_ns = 10**12
    assert (both.ask(0, MIB, now_ns), both.ask(0, MIB, now_ns)) == (0, 1)
    assert both.ask(1, MIB, now_ns) is None
    both.leave(1)
    assert both.ask(1, MIB, now_ns) == NO_SLOT
    both.asks[1].done(0, CopyTicket(slot=0, word=0))
    both.link.done(NO_SLOT)
    both.agree(now_ns)  # the two copies in flight hold their slots
    both.done(0, now_ns)
    assert both.ask(0, MIB, now_ns) == 0
    both.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([10, 2000]), st.booleans())
def test_whatever_is_written_on_the_page_nobody_waits_for_ever(seed: int, words: int, also_the_clock: bool) -> None:
    """As by a wild pointer of a tenant: the agent puts its own right, each queue has a turn within two seconds more."""
    wild = random.Random(seed)
    page = CopyPage(SETTINGS)
    ranks = [CopyRank.NORMAL, CopyRank.BEST_EFFORT, CopyRank.AHEAD]
    claims = {number: (1.0, rank) for number, rank in enumerate(ranks)}
    for number, (weight, rank) in claims.items():
        page.describe(number, weight, rank)
    asks = [Queue(page.fd, number, number + 1) for number in claims]
    assert not page.put_right(SETTINGS, claims)
    for _ in range(words):
        at = wild.randrange(0, COPY_PAGE_BYTES, 8)
        page._map[at : at + 8] = wild.randbytes(8)
    if also_the_clock:
        page.layout.links[0].min_vruntime = wild.randrange(1 << 64)
        page.layout.links[0].queues[0].vruntime = wild.randrange(1 << 64)
    for queue in asks:
        assert 4096 <= queue.piece_bytes(0, 10**12) <= 1 << 64
    page.put_right(SETTINGS, claims)
    assert not page.put_right(SETTINGS, claims)
    now_ns, served = 10**12, set()
    for step in range(2600):
        now_ns += MS
        for number, queue in enumerate(asks):
            if ranks[number] == CopyRank.AHEAD and step % 10:
                continue  # a queue of rank AHEAD goes before all others, so it must pause for them to be served
            if step > 2000 and number not in served:
                queue._rule.queue_rescue(queue._page, 0, number, now_ns)
            ticket = queue.ask(0, MIB, now_ns)
            if ticket is not None:
                served.add(number)
                queue.done(0, ticket)
                if ranks[number] == CopyRank.AHEAD:
                    queue.withdraw(0)
        if len(served) == len(ranks):
            break
    assert served == {0, 1, 2}
    for queue in asks:
        queue.close()
    page.close()


def test_vruntimes_wrap() -> None:
    assert before((1 << 64) - 1, 3)
    assert not before(3, (1 << 64) - 1)
    assert vtime(MIB, 3000) == MIB * 16 // 3


@pytest.mark.parametrize("values", [{"chunk_bytes": 100}, {"period_bytes": 0}, {"in_flight": 0}, {"in_flight": 9}])
def test_settings_out_of_range_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must (have|be) "):
        CopySettings(**values)  # type: ignore[arg-type]
