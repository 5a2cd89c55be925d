"""The feed of the live page: everything once, then changes, whatever a viewer does."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import WITHIN_S

from cotenant.observability.feed import Feed, Row

TABLE = st.dictionaries(st.tuples(st.sampled_from(["shares", "jobs"]), st.sampled_from("abcd")), st.integers(0, 3))


class Source:
    """Rows that a test sets."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], int] = {}
        self.asked = 0

    async def __call__(self) -> AsyncIterator[Row]:
        self.asked += 1
        for (section, key), value in list(self.rows.items()):
            yield section, key, {"value": value}


def apply(shown: dict[tuple[str, str], Any], event: bytes) -> None:
    """What the page does with one event."""
    head, data = event.decode().strip().split("\n")
    body = json.loads(data.removeprefix("data: "))
    if head == "event: all":
        shown.clear()
        changed = body
    else:
        assert head == "event: change"
        changed = body["set"]
        for section, keys in body["gone"].items():
            for key in keys:
                del shown[(section, key)]
    for section, rows in changed.items():
        if section != "time_s":
            shown |= {(section, row["key"]): row["value"] for row in rows}


@settings(max_examples=25, deadline=None)
@given(st.lists(TABLE, min_size=1, max_size=5))
def test_a_viewer_sees_what_is_there(tables: list[dict[tuple[str, str], int]]) -> None:
    async def play() -> None:
        source = Source()
        source.rows = tables[0]
        feed = Feed(source, period_s=0.001)
        events = feed.events()
        shown: dict[tuple[str, str], Any] = {}
        apply(shown, await anext(events))
        assert shown == tables[0]
        for before, table in itertools.pairwise(tables):
            source.rows = table
            if table != before:
                apply(shown, await asyncio.wait_for(anext(events), WITHIN_S))
            assert shown == table
        await feed.close()

    asyncio.run(play())


def test_a_slow_viewer_gets_the_whole_picture_and_nobody_waits_for_it() -> None:
    async def play() -> None:
        source = Source()
        feed = Feed(source, period_s=0.001)
        slow, quick = feed.events(), feed.events()
        shown: dict[tuple[str, str], Any] = {}
        await anext(slow)
        apply(shown, await anext(quick))
        for value in range(1, 40):
            source.rows = {("jobs", "a"): value}
            apply(shown, await asyncio.wait_for(anext(quick), WITHIN_S))
            assert shown == {("jobs", "a"): value}
        late: dict[tuple[str, str], Any] = {}
        first = await anext(slow)
        assert first.startswith(b"event: all")
        apply(late, first)
        while late[("jobs", "a")] != 39:
            apply(late, await asyncio.wait_for(anext(slow), WITHIN_S))
        await feed.close()

    asyncio.run(play())


def test_nobody_looks_nothing_is_asked() -> None:
    async def play() -> None:
        source = Source()
        feed = Feed(source, period_s=0.001)
        events = feed.events()
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.02)
        asked = source.asked
        await asyncio.sleep(0.05)
        assert source.asked == asked
        await feed.close()

    asyncio.run(play())


def test_a_fault_in_one_look_does_not_end_the_page() -> None:
    async def play() -> None:
        state = {"fail": False}

        async def build() -> AsyncIterator[Row]:
            if state["fail"]:
                state["fail"] = False
                raise RuntimeError("once")
            yield "jobs", "a", {"value": len(state) + (1 if feed.fault else 0)}

        feed = Feed(build, period_s=0.001)
        events = feed.events()
        await anext(events)
        state["fail"] = True
        event = await asyncio.wait_for(anext(events), WITHIN_S)
        assert b'"value":2' in event
        assert "once" in feed.fault
        await feed.close()

    asyncio.run(play())


def test_who_looks_already_is_told_what_a_newcomer_finds() -> None:
    """The second viewer's first look comes before the next regular one, so the first viewer has it from that look."""

    async def play() -> None:
        source = Source()
        feed = Feed(source, period_s=0.2)
        first, second = feed.events(), feed.events()
        shown: dict[tuple[str, str], Any] = {}
        apply(shown, await anext(first))
        source.rows = {("jobs", "a"): 1}
        await anext(second)
        apply(shown, await asyncio.wait_for(anext(first), WITHIN_S))
        assert shown == source.rows
        await feed.close()

    asyncio.run(play())
