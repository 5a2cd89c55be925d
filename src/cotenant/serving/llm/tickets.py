"""One request to a language model: waits for its model; then the answer is streamed from the program to the client."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

import orjson

from cotenant.serving.gateway.http1 import Exchange
from cotenant.serving.llm.openai import (
    OpenAIError,
    Renamed,
    answer_headers,
    refuse,
    request_bytes,
    request_id_of,
)
from cotenant.serving.llm.program import Program
from cotenant.serving.llm.token_count import TokenCount
from cotenant.serving.llm.upstream import Link
from cotenant.serving.llm.usage import Unasked, asking

OK, REFUSED = 200, (400, 422, 500)
MOST_TRIES = 2  # a request is tried only this often if programs die while it runs, since it may be the cause
DEATH_WITHIN_S = 2.0  # a connection may break up to this long before the server notices that the program has ended


class Ticket:
    """One request to a language model, and the Receiver of its answer. `over` is called once, when the request is
    answered or its client has disconnected; `again` is called if the request should be sent to a program once more.
    """

    __slots__ = (
        "_again", "_count", "_first_s", "_headers", "_kept", "_last_s", "_link", "_over", "_parts", "_program",
        "_refused", "_removed", "_renamed", "_status", "_task", "arrived_s", "began_s", "body", "done", "heard_s",
        "model", "request_id", "streamed", "tries", "unasked", "x",
    )  # fmt: skip

    def __init__(
        self, x: Exchange, model: str, over: Callable[[Ticket, str], None], again: Callable[[Ticket, str], None]
    ) -> None:
        self.x, self.model, self._over, self._again = x, model, over, again
        self.body = x.body
        self.request_id = request_id_of(x)
        self.arrived_s = time.monotonic()
        self.began_s: float | None = None
        self.heard_s = math.inf  # when the program last sent a part of the answer, or got the request
        self.tries = 0
        self.done = self.streamed = False
        self.unasked = False  # the client did not ask for the number of tokens of the stream that it requests
        self._program: Program | None = None
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._kept = False
        self._renamed: Renamed | None = None
        self._removed: Unasked | None = None
        self._refused = False  # the program refused the request, perhaps because it asked for the number of tokens
        self._parts: list[bytes] = []
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._count = TokenCount()
        self._first_s = self._last_s = 0.0  # when the first and the last token came
        x.withdraw = self.withdraw

    @property
    def running(self) -> bool:
        """Whether a program is processing the request."""
        return self._program is not None

    # ---- to the program ----

    def send(self, program: Program, *, fresh: bool = False) -> None:
        """Send the request to a program; `fresh`: on a new connection."""
        self._program = program
        self.tries += 1
        self.began_s = self.heard_s = time.monotonic()
        body, self._renamed, self._removed = self.body, None, None
        if program.served_as != self.model:
            body = orjson.dumps(orjson.loads(body) | {"model": program.served_as})
            self._renamed = Renamed(program.served_as, self.model)
        if self.unasked and not self._refused and program.reports_tokens is not False:
            body = orjson.dumps(asking(orjson.loads(body)))
            self._removed = Unasked()
        self._parts.clear()
        upstream = program.upstream
        upstream.ask(request_bytes(self.x, upstream.host, self.request_id, body), self, self._begun, fresh=fresh)

    def _begun(self, link: Link) -> bool:
        if self.done:
            return False
        self._link, self._kept = link, link.kept
        self.x.slow = link.slow
        return True

    def withdraw(self) -> None:
        """Cancel the request at the program, because the client has disconnected."""
        if self.done:
            return
        link, self._link = self._link, None
        if link is not None:
            link.abandon()
        if self.streamed:
            self.x.cut()
        else:
            refuse(self.x, OpenAIError(503, "cancelled: the client disconnected", "cancelled"), self.request_id)
        self._finish("cancelled")

    # ---- from the program ----

    def got_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Called with the head of the answer. A stream is forwarded from now on. An answer that is not a stream is
        buffered until it is complete, so that the request can be sent again if the program fails before.
        """
        self._status, self._headers = status, headers
        if status == OK and self._program is not None and (self._removed is not None or self._refused):
            self._program.reports_tokens = not self._refused
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if kind.startswith(b"text/event-stream"):
            queued_s = (self.began_s or self.arrived_s) - self.arrived_s
            self.streamed = self.x.begin(status, answer_headers(headers, self.request_id, queued_s))
            if not self.streamed:
                self.fail(OpenAIError(400, "a stream cannot be pipelined", "pipelined"), "failed")

    def got_body(self, data: bytes) -> None:
        now_s = self.heard_s = time.monotonic()
        if not self.streamed:
            self._parts.append(data)
            return
        if self._count.take(data):
            self._first_s = self._first_s or now_s
            self._last_s = now_s
        if self._removed is not None:
            data = self._removed.take(data)
        if self._renamed is not None:
            data = self._renamed.take(data)
        if data:
            self.x.send(data)

    def got_end(self) -> None:
        if self.done:
            return
        self._link = None
        if self._removed is not None and self._status in REFUSED and not self.streamed:
            program = self._program
            assert program is not None
            if program.reports_tokens is None:
                self._refused = True
                self.tries -= 1
                self.send(program)
                return
        if self.streamed:
            rest = b"" if self._removed is None else self._removed.end()
            if self._renamed is not None:
                rest = self._renamed.take(rest) + self._renamed.end()
            if rest:
                self.x.send(rest)
            self.x.end()
        else:
            body = b"".join(self._parts)
            if self._renamed is not None:
                body = self._renamed.take(body) + self._renamed.end()
            queued_s = (self.began_s or self.arrived_s) - self.arrived_s
            self.x.respond(self._status, body, answer_headers(self._headers, self.request_id, queued_s))
        self._finish(_outcome(self._status, self._count.faulty))

    def got_fault(self, why: str) -> None:
        self._link = None
        if not self.done:
            self._task = asyncio.get_running_loop().create_task(self._fault(why))

    async def _fault(self, why: str) -> None:
        """Report the fault to the client, or retry if nothing of an answer was forwarded yet."""
        program = self._program
        assert program is not None
        # a broken connection that had been idle does not count as an attempt, since the program may just have closed it
        if self._kept and not self.streamed:
            self._kept = False
            self.tries -= 1
            self.send(program, fresh=True)
            return
        if not program.ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(program.ended.wait(), DEATH_WITHIN_S)
        if self.done:
            return
        if program.ended.is_set():
            why = program.why_ended
        if not self.streamed and self.tries < MOST_TRIES:
            self._program = None
            self._again(self, why)
            return
        text = f"the program of {self.model} did not finish this answer: {why}"
        self.fail(OpenAIError(502, text, "program_failed"), "failed")

    def fail(self, error: OpenAIError, outcome: str) -> None:
        """End the answer with an error: as the last event if a stream has begun, otherwise as the whole answer."""
        if self.done:
            return
        if self.streamed:
            self.x.send(b"data: " + error.body + b"\n\n")
            self.x.end()
        else:
            refuse(self.x, error, self.request_id)
        link, self._link = self._link, None
        if link is not None:
            link.abandon()
        self._finish(outcome)

    def _finish(self, outcome: str) -> None:
        self.done = True
        self.x.slow = _anything
        self._over(self, outcome)

    @property
    def estimated(self) -> bool:
        """Whether the tokens of a streamed answer are not known, since the program has reported no number of them."""
        return bool(self._first_s) and not self._count.reported

    @property
    def times(self) -> tuple[float, float | None] | None:
        """Times of a streamed answer in seconds: from the request's arrival to the first token, and the mean time
        between tokens of one choice (None if there was only one). The whole is None if there was no token."""
        if not self._first_s:
            return None
        tokens = self._count.tokens / self._count.choices
        between = (self._last_s - self._first_s) / (tokens - 1) if tokens > 1 else None
        return self._first_s - self.arrived_s, between


def _outcome(status: int, faulty: bool) -> str:
    """How a complete answer of the program counts. Clients do not cause 408 and 429."""
    if 400 <= status < 500 and status not in (408, 429):
        return "client_error"
    return "error" if faulty or status >= 400 else "ok"


def _anything(full: bool) -> None:
    """Does nothing, because the stream has ended."""
