"""Programs whose answers are not what HTTP allows: no other request may get them."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.serving.llm import tickets
from cotenant.serving.llm.openai import request_bytes
from cotenant.serving.llm.token_count import MOST_LINE, TokenCount
from cotenant.serving.llm.upstream import Link, Upstream
from cotenant.serving.llm.usage import MOST_HELD, Unasked

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


class Asked:
    """One request to the program, and what it got."""

    def __init__(self, upstream: Upstream, text: bytes) -> None:
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.status, self.body, self.link = 0, b"", Any
        upstream.ask(b"POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\n" + text, self, self.begun)

    def begun(self, link: Link) -> bool:
        self.link = link
        return True

    def got_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status

    def got_body(self, data: bytes) -> None:
        self.body += data

    def got_end(self) -> None:
        self.done.set_result("end")

    def got_fault(self, why: str) -> None:
        self.done.set_result(why)


async def program(answer: bytes) -> tuple[asyncio.Server, Upstream]:
    """A program that answers each request with `answer`, in which TEXTS becomes the request's text."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                text = await reader.readexactly(5)
                writer.write(answer.replace(b"TEXTS", text))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, Upstream(server.sockets[0].getsockname()[1])


def test_a_second_answer_to_one_request_is_dropped_with_its_connection() -> None:
    """The connection was kept twice, so two requests at a time were sent on it."""

    async def play() -> None:
        server, upstream = await program(ANSWER + b"TEXTS" + ANSWER + b"OTHER")
        async with server:
            for number in range(3):
                asked = [Asked(upstream, b"%05d" % (10 * number + i)) for i in range(4)]
                ends = [await asyncio.wait_for(each.done, 60) for each in asked]
                assert ends == ["end"] * 4
                assert [each.body for each in asked] == [b"%05d" % (10 * number + i) for i in range(4)]
                assert len({id(each.link) for each in asked}) == 4
            assert not upstream._free
            upstream.close()

    asyncio.run(play())


@pytest.mark.parametrize("end", [b"", b"\r\n"])
def test_a_connection_whose_answer_is_complete_is_used_again(end: bytes) -> None:
    async def play() -> None:
        server, upstream = await program(ANSWER + b"TEXTS" + end)
        async with server:
            first = Asked(upstream, b"first")
            await first.done
            second = Asked(upstream, b"later")
            await second.done
            assert (first.body, second.body) == (b"first", b"later")
            assert first.link is second.link
            upstream.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", b"no HTTP at all\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nTEXTS\r\nzz\r\n",
    ],
)  # fmt: skip
def test_what_is_not_http_is_a_fault(answer: bytes) -> None:
    async def play() -> None:
        server, upstream = await program(answer)
        async with server:
            assert await asyncio.wait_for(Asked(upstream, b"texts").done, 60) == "the program's answer is not HTTP/1.1"
            assert not upstream._free
            upstream.close()

    asyncio.run(play())


def test_an_informational_head_is_not_the_answer() -> None:
    """The program ends after it, so there is no answer."""

    async def play() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
            await writer.drain()
            await reader.readexactly(5)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            asked = Asked(Upstream(server.sockets[0].getsockname()[1]), b"texts")
            assert await asyncio.wait_for(asked.done, 60) == "the program closed the connection"

    asyncio.run(play())


def test_each_part_of_an_answer_gives_its_program_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(tickets, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    ticket = tickets.Ticket(SimpleNamespace(body=b"", headers={}), "a", print, print)  # type: ignore[arg-type]
    assert ticket.heard_s == math.inf
    for now_s[0] in (105.0, 110.0):
        ticket.got_body(b"part")
        assert ticket.heard_s == now_s[0]


def streamed(monkeypatch: pytest.MonkeyPatch, *parts: tuple[float, bytes]) -> tuple[Any, list[str]]:
    """The times of a streamed answer whose parts come at these times, and its outcome."""
    now_s = [100.0]
    monkeypatch.setattr(tickets, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    x = SimpleNamespace(body=b"", headers={}, begin=lambda *_: True, send=lambda _: None, end=lambda: None)
    outcomes: list[str] = []
    ticket = tickets.Ticket(x, "a", lambda _, outcome: outcomes.append(outcome), print)  # type: ignore[arg-type]
    ticket.got_head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
    for now_s[0], part in parts:
        ticket.got_body(part)
    ticket.got_end()
    return ticket.times, outcomes


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_tokens_are_counted_whatever_ends_an_event(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines may end with CR LF. A comment, which keeps the connection open, is no token."""
    token, done = b'data: {"choices": [{"text": "a"}]}' + end, b"data: [DONE]" + end
    parts = [(100.5, b": ping" + end), (101.0, token), (102.0, token + token), (104.0, token + done)]
    assert streamed(monkeypatch, *parts) == ((1.0, 1.0), ["ok"])


ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
WORD = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
TOOL = b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}\n\n'
FINISH = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("parts", "times"),
    [
        ([(101.0, ROLE), (102.0, WORD), (104.0, WORD), (105.0, FINISH + DONE)], (2.0, 2.0)),
        ([(101.0, ROLE + TOOL), (104.0, TOOL + FINISH + DONE)], (1.0, 3.0)),
        # an event may have several tokens; then only the engine knows their number
        ([(101.0, ROLE + WORD), (105.0, WORD), (106.0, FINISH + USAGE + DONE)], (1.0, 1.0)),
        ([(101.0, ROLE + WORD), (105.0, FINISH + DONE)], (1.0, None)),
        ([(101.0, ROLE), (105.0, FINISH + USAGE + DONE)], None),
        ([(101.0, WORD[:30]), (102.0, WORD[30:] + WORD[:-1]), (103.0, WORD[-1:]), (104.0, WORD)], (2.0, 1.0)),
        ([(101.0, b'data: "text"\n\ndata: {"choices": [1], "usage": 2}\n\ndata: {')], None),
    ],
)
def test_only_tokens_of_the_answer_count(
    parts: list[tuple[float, bytes]], times: tuple[float, float | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert streamed(monkeypatch, *parts) == (times, ["ok"])


def test_tokens_of_other_forms_of_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of /v1/responses, and of Anthropic's API."""
    part = b'data: {"type": "response.output_text.delta", "delta": "a"}\n\n'
    end = b'data: {"type": "response.completed", "response": {"error": null, "usage": {"output_tokens": 3}}}\n\n'
    assert streamed(monkeypatch, (101.0, part), (105.0, part), (106.0, end)) == ((1.0, 2.0), ["ok"])
    part = b'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}\n\n'
    end = b'data: {"type": "message_delta", "delta": {"stop_reason": "x"}, "usage": {"output_tokens": 3}}\n\n'
    assert streamed(monkeypatch, (101.0, part), (105.0, part), (106.0, end)) == ((1.0, 2.0), ["ok"])


def test_a_program_gets_no_slash_at_the_end_of_a_path_and_no_keys() -> None:
    headers = {b"authorization": b"Bearer key", b"x-api-key": b"key", b"x-mine": b"1"}
    for url, path in (
        (b"/v1/chat/completions/", b"/v1/chat/completions"), (b"/v1/rerank//?a=b/", b"/v1/rerank?a=b/")
    ):  # fmt: skip
        x = SimpleNamespace(method=b"POST", url=url, headers=headers)
        head, _, body = request_bytes(x, b"h:1", b"id-1", b"{}").partition(b"\r\n\r\n")  # type: ignore[arg-type]
        lines = [b"POST %s HTTP/1.1" % path, b"host: h:1", b"x-mine: 1", b"x-request-id: id-1", b"content-length: 2"]
        assert (head.split(b"\r\n"), body) == (lines, b"{}")


REPORT = b'data: {"id": "1", "choices": [], "usage": {"completion_tokens": 9}}'


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_a_report_of_tokens_is_removed_wherever_pieces_cut_the_stream(line: bytes) -> None:
    kept = [WORD.strip(), b'data: {"choices": [], "usage": null}', b'data: {"choices":[{"text":"\\"choices\\":[]"}]}',
            b": a comment", b"data: [DONE]"]  # fmt: skip
    whole, right = (b"".join(event + 2 * line for event in events) for events in ([*kept[:4], REPORT, kept[4]], kept))
    for first in range(len(whole)):
        for second in {first, (first + len(whole)) // 2, len(whole)}:
            stream = Unasked()
            pieces = [stream.take(part) for part in (whole[:first], whole[first:second], whole[second:])]
            assert b"".join(pieces) + stream.end() == right
    stream = Unasked()
    assert stream.take(whole) == right, "nothing is held back at the end of an event"
    assert stream.take(REPORT) + stream.end() == REPORT, "an event without an end is no event"


def test_events_of_any_size_pass_without_being_held() -> None:
    stream = Unasked()
    large = b'data: {"choices": [{"text": "' + b"x" * 200_000 + b'"}]}\n\n'
    passed = [stream.take(large[at : at + 9999]) for at in range(0, len(large), 9999)]
    assert sum(map(len, passed[:-1])) >= 180_000 - 2 * MOST_HELD
    assert b"".join(passed) == large
    assert stream.take(REPORT + b"\n\n" + WORD) == WORD
    for cut in range(-4, 1):
        whole = large.replace(b"\n\n", b"\r\n\r\n") + REPORT + b"\r\n\r\n" + WORD
        at, stream = len(large) + 2 + cut, Unasked()
        assert stream.take(whole[:at]) + stream.take(whole[at:]) == whole.replace(REPORT + b"\r\n\r\n", b"")


def test_the_choices_of_one_request_have_their_tokens_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers of three tokens each, two seconds apart."""
    both = b"".join(b'data: {"choices": [{"index": %d, "text": "a"}]}\n\n' % index for index in (0, 1))
    assert streamed(monkeypatch, (101.0, both), (103.0, both), (105.0, both)) == ((1.0, 2.0), ["ok"])


def test_a_line_without_an_end_is_not_kept() -> None:
    count = TokenCount()
    for _ in range(40):
        assert not count.take(b"data: " + b"x" * (1 << 16))
    assert len(count._rest) <= MOST_LINE
    assert not count.take(b"x\n\n")
    assert count.take(WORD)


def test_a_stream_in_which_the_program_reports_an_error_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    token = b'data: {"choices": [{"text": "data: {\\"error\\": 1}"}]}\n\n'
    fault = b'data: {"error": {"message": "no memory"}}\n\n'
    assert streamed(monkeypatch, (101.0, token), (102.0, token))[1] == ["ok"]
    assert streamed(monkeypatch, (101.0, token), (102.0, fault + b"data: [DONE]\n\n"))[1] == ["error"]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "ok"), (400, "client_error"), (422, "client_error"), (408, "error"), (429, "error"), (500, "error")],
)
def test_what_a_client_sent_wrongly_is_no_error_of_the_program(status: int, outcome: str) -> None:
    x = SimpleNamespace(body=b"", headers={}, respond=lambda *_: None)
    outcomes: list[str] = []
    ticket = tickets.Ticket(x, "a", lambda _, outcome: outcomes.append(outcome), print)  # type: ignore[arg-type]
    ticket.got_head(status, [(b"content-type", b"application/json")])
    ticket.got_body(b"{}")
    ticket.got_end()
    assert outcomes == [outcome]
