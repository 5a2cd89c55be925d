"""The rows that the live page shows, and the stream of their changes.

A component (agent, server, fleet controller) describes its state by rows: (section, key, fields). While the page has
viewers, the feed collects all rows twice a second. It sends each viewer all rows once, and then only rows that have
changed, so that a thousand idle tenants cost nothing.

Sections and their fields (times in seconds, shares as fractions 0..1, memory in bytes; a field may be missing or null;
"words" are text for people):

    sources    one row per component: name, kind (agent, server, models, fleet), address, ok, note
    gpus       node, index, model, memory_bytes, memory_used_bytes, holder (the tenant whose turn it is),
               promised (sum of the fractions that tenants are due), granted (false: the component grants memory of this
               GPU and no fractions of its time)
    shares     one row per tenant, service or job on a GPU: gpu (key of a GPU), tenant, kind (job, service, tenant),
               mechanism (by which the GPU is shared), granted (fraction of the GPU that it is due), limit (fraction
               that it may use at most), got (fraction that it has used lately), short_s (for how long it has got less
               than it is due), memory_bytes, memory_limit_bytes, memory_by (what enforces that limit), sms (how many
               multiprocessors it may use, in words), state, residency (where its memory is, in words), holding
               (whether it has a turn), waiting (whether it waits for one), waited_s, turns (number of its turns), note,
               class (best-effort, latency-sensitive),
               floor (of a best-effort tenant: "held off" while its launches wait; of a latency-sensitive one: "holds"
               while its work is active)
    hours      one row per row of `shares`, with the same key: minutes (a list with an entry for each minute of the last
               hour, oldest first: [due, received] as fractions of the GPU, or null)
    services   rate_rps, slo_ms, p50_ms, p99_ms, attainment, dropped and failed (numbers of requests), queue (number of
               waiting requests), places (the GPUs that it runs on, in words), state,
               part_of (the application of which the service is a stage)
    models     state, gpu (key of the GPU that it is on), memory_bytes (on that GPU), queue (number of waiting
               requests), open (number of requests that the program serves), ttft_ms, ttft_p99_ms, ttft_slo_ms,
               tpot_ms, tpot_slo_ms, attainment (the times are of streamed answers, the share is of these and of
               failed requests), answer_ms, answer_p99_ms (times to answers that are not streamed),
               switches and switch_s (number and total time of starts, evictions, restores and stops), failed
               (number of requests), fault (why the model is unavailable)
    jobs       name, state, reason (of the state), gpus and place (words), progress (fraction done), waited_s, ran_s
    decisions  time_s (unix), source, text
    warnings   source, about, text
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

SECTIONS = ("sources", "gpus", "shares", "hours", "services", "models", "jobs", "decisions", "warnings")
PERIOD_S = 0.5
HEARTBEAT_S = 10.0
PAUSE_EVERY = 50  # after this many rows the feed lets the event loop run, which also grants tenants their turns
QUEUE = 8  # if a viewer has this many unread events when the next one comes, it gets all rows again instead

Row = tuple[str, str, dict[str, Any]]
Build = Callable[[], AsyncIterator[Row]]


class Feed:
    """Sends the rows of one component to any number of viewers. All methods run in one event loop."""

    def __init__(self, build: Build, period_s: float = PERIOD_S) -> None:
        self._build = build
        self._period_s = period_s
        self._rows: dict[tuple[str, str], str] = {}
        self._viewers: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None
        self.fault = ""

    async def snapshot(self) -> str:
        """Return all rows as one JSON object {section: [row]}, each row with its `key`."""
        return _whole(await self._collect())

    async def events(self) -> AsyncIterator[bytes]:
        """Produce the server-sent events for one viewer of the live page: first `all` with all rows, then `change` with
        changed rows. If nothing changes, it sends a comment as keep-alive.
        """
        queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE)
        self._take(await self._collect())
        self._viewers.add(queue)
        yield _event("all", _whole(self._rows))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._viewers.discard(queue)

    async def close(self) -> None:
        """Stop collecting rows of the component."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._viewers:
            await asyncio.sleep(self._period_s)
            try:
                rows = await self._collect()
            except Exception as error:  # an error while rows are collected must not end the viewers' stream
                self.fault = repr(error)
                continue
            self._take(rows)

    def _take(self, rows: dict[tuple[str, str], str]) -> None:
        """Store the new rows and send every viewer the changes."""
        change = _change(self._rows, rows)
        self._rows = rows
        if change is None:
            return
        event = _event("change", change)
        for queue in self._viewers:
            if queue.full():  # the viewer reads too slowly to get every change, so it gets all rows instead
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(_event("all", _whole(rows)))
            else:
                queue.put_nowait(event)

    async def _collect(self) -> dict[tuple[str, str], str]:
        found: dict[tuple[str, str], str] = {}
        async for section, key, fields in self._build():
            found[(section, key)] = json.dumps({"key": key} | fields, separators=(",", ":"), default=str)
            if len(found) % PAUSE_EVERY == 0:
                await asyncio.sleep(0)
        return found


def _whole(rows: dict[tuple[str, str], str]) -> str:
    parts: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for (section, _), text in rows.items():
        parts[section].append(text)
    inside = ",".join(f'"{section}":[{",".join(texts)}]' for section, texts in parts.items())
    return f'{{"time_s":{time.time():.3f},{inside}}}'


def _change(before: dict[tuple[str, str], str], after: dict[tuple[str, str], str]) -> str | None:
    new = {place: text for place, text in after.items() if before.get(place) != text}
    gone: dict[str, list[str]] = {}
    for section, key in before.keys() - after.keys():
        gone.setdefault(section, []).append(key)
    if not new and not gone:
        return None
    return f'{{"set":{_whole(new)},"gone":{json.dumps(gone)}}}'


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
