"""A load test of a server with the OpenAI API: sends requests with the token counts of a trace, and measures when the
first and the last token of each streamed answer arrive.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httptools
import numpy as np
import orjson

from cotenant.core.errors import WorkError
from cotenant.core.metrics.tokens import Target as Promise
from cotenant.core.metrics.tokens import TokenTimes
from cotenant.loadgen.http import Connection, HttpTransport
from cotenant.loadgen.loop import DROPPED, FAILED, FULL, OK, Loop
from cotenant.loadgen.openai_answer import Answer, sentence
from cotenant.loadgen.schedule import Schedule
from cotenant.loadgen.target import Target
from cotenant.workloads.llm.text import fault_of, prompt_text
from cotenant.workloads.llm.trace import TokenTrace

# how a request ended, in words: `refused` by status 429, `unavailable` by 503, `error` by another status, `broken`: the
# stream or the connection broke off, `timeout`: no answer in time
ENDS = ("ok", "refused", "unavailable", "error", "wrong", "broken", "timeout")
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
WRONG = "a wrong answer: "
MOST_MADE = 256 << 20


@dataclass(frozen=True)
class OpenAiTest:
    """Definition of a load test of the OpenAI API. `trace.models`: the models' names, as the server knows them;
    `extra`: fields that are added to the body of every request; `check`: compare each answer with the only right one,
    which a timed engine (`timed_llm`, a stand-in for a real engine) of the requested model would give.

    `clients`: if this is 0, requests are sent at the times of the trace. Otherwise the test is a closed loop: each
    model has this many requests in flight for `duration_s` seconds. Then the times of the trace are ignored, and its
    token counts are used one after the other.
    """

    target: Target
    trace: TokenTrace
    promises: tuple[Promise, ...]
    endpoint: str = "chat"
    extra: Mapping[str, Any] = field(default_factory=dict)
    check: bool = False
    timeout_s: float = 600.0
    connections: int = 1024
    seed: int = 0
    clients: int = 0
    duration_s: float = 60.0


@dataclass(frozen=True)
class OpenAiResult:
    """Result of a load test of the OpenAI API. `test.trace`: the requests that were sent; `outcome`: how each of them
    ended, as a code of `loadgen.loop` (OK, FULL, ...); `ends`: the same as one of the words in ENDS.
    """

    test: OpenAiTest
    times: TokenTimes
    outcome: np.ndarray
    sent_s: np.ndarray
    reasons: Mapping[str, int]
    duration_s: float
    wrong: int
    ends: Sequence[str]
    uncounted: int = 0  # answers whose events are counted as tokens, because their number of tokens is not known

    @property
    def attainment(self) -> float:
        """Return the lowest SLO attainment of any requested model, 0..1."""
        kept = self.times.kept(self.test.promises)
        return min(float(kept[self.times.model == m].mean()) for m in np.unique(self.times.model))

    @property
    def answered_rps(self) -> float:
        """Return the complete answers per second."""
        return float(np.isfinite(self.times.last_s).sum() / self.duration_s)

    @property
    def fault(self) -> str | None:
        """See LoadResult."""
        if self.wrong:
            return f"{self.wrong:,} answers were wrong; they count as failed"
        if len(self.outcome) and not (self.outcome == OK).any():
            return f"none of the {len(self.outcome):,} requests was answered with a result"
        return None

    def summary(self) -> dict[str, Any]:
        """Return the figures of each model, with the keys that the simulator's results have, and how late requests were
        sent."""
        sent = self.sent_s >= 0
        late = (self.sent_s[sent] - self.times.due_s[sent]) * 1e3
        rows = self.times.rows(self.test.promises, self.duration_s)
        for index, row in enumerate(rows.values()):
            mine = self.times.model == index
            row["refused"] = int(((self.outcome == FULL) | (self.outcome == DROPPED))[mine].sum())
            row["failed"] = int((self.outcome == FAILED)[mine].sum())
            row["ends"] = dict(Counter(itertools.compress(self.ends, mine)))
            if (targets := self.test.promises[index]).ttft_ms is None and targets.tpot_ms is None:
                row["attainment"] = None
        total = self.times.total(self.test.promises, self.duration_s)
        if all(row["attainment"] is None for row in rows.values()):
            total["attainment"] = None
        p50, p99 = np.percentile(late, (50, 99)) if len(late) else (None, None)
        return {
            "url": str(self.test.target), "seed": self.test.seed, "duration_s": self.duration_s,
            "trace": self.test.trace.summary(), "in_flight": self.test.clients or None, "models": rows,
            "total": total,
            "lateness_ms": {"p50": p50, "p99": p99}, "wrong_answers": self.wrong,
            "uncounted": self.uncounted, "failures": grouped(self.reasons),
        }  # fmt: skip


class Requests:
    """Makes the bytes of requests to the OpenAI API. Serves as the payload of every model in HttpTransport."""

    def __init__(self, test: OpenAiTest, model: int) -> None:
        self._test, self._model = test, test.trace.models[model]
        target = test.target
        prefix = target.prefix.removesuffix("/v1")
        token = "" if target.token is None else f"Authorization: Bearer {target.token}\r\n"
        self._head = (
            f"POST {prefix}{PATHS[test.endpoint]} HTTP/1.1\r\nHost: {target.authority}\r\n{token}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()

    def prompt(self, index: int, row: int) -> str:
        """Return a prompt with as many tokens as this row of the trace has. No two prompts begin alike."""
        return prompt_text(int(self._test.trace.prompt[row]), f"{self._test.seed}/{index}")

    def request(self, index: int, row: int) -> bytes:
        """Return head and body of request number `index`. The lengths of its prompt and answer, in tokens, are those of
        row `row` of the trace."""
        test, text = self._test, self.prompt(index, row)
        asked = {"messages": [{"role": "user", "content": text}]} if test.endpoint == "chat" else {"prompt": text}
        body = orjson.dumps({
            "model": self._model, **asked, "max_tokens": int(test.trace.output[row]), "stream": True,
            "stream_options": {"include_usage": True}, **test.extra,
        })  # fmt: skip
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    def fault(self, index: int, row: int, text: str) -> str | None:
        """See fault_of."""
        return fault_of(self._model, self.prompt(index, row), text)


class StreamConnection(Connection):
    """A connection whose response is read while it is received."""

    owner: OpenAiTransport
    answer: Answer | None = None

    def _read(self, data: bytes) -> bool:
        if not data:
            self.owner.closed(self)
            return False
        return self.owner.received(self, data)


class OpenAiTransport(HttpTransport):
    """Sends requests over HTTP with streamed answers. A token's time is the time at which its bytes are read."""

    def __init__(self, test: OpenAiTest, stamps: bool = False) -> None:
        """Prepare the requests. `stamps`: whether to record the time of every token."""
        self.requests = [Requests(test, m) for m in range(len(test.trace.models))]
        super().__init__(test.target, self.requests, test.connections)  # type: ignore[arg-type]
        count = 0 if test.clients else len(test.trace)
        self.check = test.check
        self.uncounted = 0  # see OpenAiResult
        self._cut_known = "max_tokens" not in test.extra  # an answer that is cut has as many tokens as the trace says
        self.rows = array("q", range(count))  # number of each request -> its row of the trace
        self.first, self.last = array("d", [np.nan]) * count, array("d", [np.nan]) * count
        self.tokens, self.prompt = array("q", [0]) * count, array("q", [0]) * count
        self.ends: dict[int, str] = {}  # how requests ended that were not answered, as in ENDS
        self.texts: dict[int, list[str]] = {}
        self.stamps: dict[int, list[float]] | None = {} if stamps else None
        self._made: dict[int, bytes] = {}
        self._trace = test.trace
        self._pools = [np.flatnonzero(test.trace.model == m).tolist() for m in range(len(test.trace.models))]
        self._used = [0] * len(self._pools)

    def open(self, loop: Loop) -> None:
        """Connect (see Transport), and prepare the bytes of as many requests as a memory limit allows."""
        size = 0
        for index, svc in enumerate(self._trace.model[: len(self.rows)].tolist()):
            self._made[index] = self.requests[svc].request(index, index)
            size += len(self._made[index])
            if size > MOST_MADE:
                break
        super().open(loop)

    def send(self, index: int, svc: int) -> None:
        """Send a request (see Transport). In a closed loop, its bytes are made now."""
        if index == len(self.rows):
            pool = self._pools[svc]
            self.rows.append(pool[self._used[svc] % len(pool)])
            self._used[svc] += 1
            for times in (self.first, self.last):
                times.append(np.nan)
            for counts in (self.tokens, self.prompt):
                counts.append(0)
        super().send(index, svc)

    def data(self, index: int, svc: int) -> bytes:
        made = self._made.pop(index, None)
        return self.requests[svc].request(index, self.rows[index]) if made is None else made

    def _new(self) -> Connection:
        made = StreamConnection(self)
        self.count += 1
        self.peak = max(self.peak, self.count)
        return made

    def received(self, connection: StreamConnection, data: bytes) -> bool:
        """Handle received bytes. Returns False if the connection should not be read any more."""
        index = connection.index
        if index < 0:
            self.loop.stray += 1
            self._drop(connection)
            return False
        now = self.loop.now()
        if connection.answer is None:
            connection.answer = Answer(lambda text: self._token(index, text))
        answer, before = connection.answer, self.tokens[index]
        try:
            answer.parser.feed_data(data)
        except (httptools.HttpParserError, ValueError, AttributeError) as error:
            self.broken(connection, error)
            return False
        if self.tokens[index] > before:
            self.last[index] = now
            if not before:
                self.first[index] = now
            if self.stamps is not None:
                self.stamps.setdefault(index, []).extend([now] * (self.tokens[index] - before))
        if not answer.ended:
            return True
        self._over(connection, answer)
        return False

    def closed(self, connection: StreamConnection) -> None:
        """Handle the closing of a connection by the server. A response without a stated length ends in this way."""
        answer = connection.answer
        if answer is not None and connection.index >= 0 and (answer.done or answer.error):
            self._over(connection, answer)
        else:
            self.broken(connection, None)

    def _token(self, index: int, text: str) -> None:
        self.tokens[index] += 1
        if self.check:
            self.texts.setdefault(index, []).append(text)

    def _over(self, connection: StreamConnection, answer: Answer) -> None:
        index, svc = connection.index, connection.svc
        del self.busy[index]
        connection.index, connection.answer = -1, None
        if answer.ended and answer.parser.should_keep_alive() and not connection.out:
            self.free.append(connection)
        else:
            self._drop(connection)
        self._judge_stream(index, svc, answer)
        if self.waiting:
            self._next()

    def _judge_stream(self, index: int, svc: int, answer: Answer) -> None:
        status = answer.parser.get_status_code()
        if status == 200 and answer.done and self.tokens[index] and not answer.error:
            reported = answer.usage.get("completion_tokens")
            if reported:
                self.tokens[index] = int(reported)
            elif answer.cut and self._cut_known:
                self.tokens[index] = max(self.tokens[index], int(self._trace.output[self.rows[index]]))
            else:
                self.uncounted += 1
            self.prompt[index] = int(answer.usage.get("prompt_tokens") or 0)
            fault = None
            if self.check:
                fault = self.requests[svc].fault(index, self.rows[index], "".join(self.texts.pop(index)))
            if fault is None:
                self.loop.finish(index, OK)
                return
            self.loop.wrong += 1
            self.ends[index] = "wrong"
            reason = f"{WRONG}{fault}"
        elif status != 200:
            self.ends[index] = {429: "refused", 503: "unavailable"}.get(status, "error")
            reason = f"status {status}: {sentence(answer.error)}"
        else:
            self.ends[index] = "broken"
            reason = f"the stream broke off: {sentence(answer.error)}" if answer.error else "the stream broke off"
        self.loop.finish(index, {429: FULL, 503: DROPPED}.get(status, FAILED), reason=reason)

    def broken(self, connection: Connection, error: Exception | None) -> None:
        assert isinstance(connection, StreamConnection)
        connection.answer = None
        self.ends[connection.index] = "broken"
        super().broken(connection, error)

    def expire(self, index: int) -> None:
        self.ends[index] = "timeout"
        super().expire(index)


def grouped(reasons: Mapping[str, int]) -> dict[str, int]:
    """Return why requests failed with their numbers, the most frequent first. Wrong answers, whose reasons name the
    request, are one reason, with the first of them as an example."""
    found: Counter[str] = Counter()
    wrong = [reason for reason in reasons if reason.startswith(WRONG)]
    for reason, count in reasons.items():
        found[f"{wrong[0]} (the first of them)" if reason in wrong and len(wrong) > 1 else reason] += count
    return dict(found.most_common())


def run_openai(
    test: OpenAiTest, tell: Callable[[Loop], None] | None = None, transport: OpenAiTransport | None = None,
    on_loop: Callable[[Loop], None] = lambda loop: None,
) -> OpenAiResult:  # fmt: skip
    """Send all requests of the test from this process and thread. Requests leave at their scheduled times, even if
    earlier ones are not answered yet; if the test has clients, a request leaves when the client's previous request has
    ended.

    `on_loop` is called with the loop before it runs. If it is stopped, the result is that of the requests that were due
    until then; WorkError if there is none.
    """
    trace = test.trace
    schedule = Schedule(trace.times_s, trace.model.astype(np.int32), ())
    length_s = max(trace.span_s, 1e-3)
    if test.clients:
        schedule = Schedule(np.zeros(0), np.zeros(0, np.int32), tuple(np.unique(trace.model).tolist()) * test.clients)
        length_s = test.duration_s
    transport = transport or OpenAiTransport(test)
    loop = Loop(schedule, transport, length_s, test.timeout_s, tell)
    on_loop(loop)
    records = loop.run()
    index = np.arange(len(records.svc))
    due = (index < loop.next) | (index >= loop.open_count)
    if not due.any():
        raise WorkError("the load test was stopped before its first request was due")
    rows = np.array(transport.rows)[due]
    sent = replace(trace, times_s=np.array(records.scheduled)[due], **{
        name: getattr(trace, name)[rows] for name in ("model", "prompt", "output", "cached")
    })  # fmt: skip
    outcome = np.frombuffer(bytes(records.outcome), np.uint8)[due]
    whole = outcome == OK
    ends = ["ok" if done else transport.ends.get(int(i), "broken") for i, done in zip(index[due], whole, strict=True)]
    first, last, tokens, prompt = (
        np.array(x)[due] for x in (transport.first, transport.last, transport.tokens, transport.prompt)
    )
    times = TokenTimes(
        sent.model, sent.times_s, np.where(tokens > 0, first, np.nan), np.where(whole, last, np.nan),
        np.where(whole, prompt, sent.prompt), tokens,
    )  # fmt: skip
    duration_s = max(min(length_s, loop.duration_s), float(np.array(records.finished).max()))
    made = replace(test, trace=sent)
    return OpenAiResult(
        made, times, outcome, np.array(records.sent)[due], dict(loop.reasons), duration_s, loop.wrong, ends,
        transport.uncounted,
    )  # fmt: skip


def promises(models: Sequence[str], ttft: Mapping[str, float], tpot: Mapping[str, float]) -> tuple[Promise, ...]:
    """Return each model's SLOs. In `ttft` and `tpot`, the name "" stands for all models."""
    return tuple(Promise(m, ttft.get(m, ttft.get("")), tpot.get(m, tpot.get(""))) for m in models)
