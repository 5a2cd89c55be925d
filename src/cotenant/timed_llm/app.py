"""OpenAI's API, as an ASGI application, for an engine that computes nothing: its steps take the times of a profile."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.policy.llm_batching import Token
from cotenant.profiles.llm.profile import LlmProfile
from cotenant.timed_llm.engine import Device, Engine
from cotenant.timed_llm.requests import (
    CHAT,
    COMPLETION,
    DIMENSIONS,
    EMBEDDING,
    RefusalError,
    Request,
    embedding_inputs,
    parse_body,
    parse_request,
)  # fmt: skip
from cotenant.workloads.llm.text import answer_token, count_tokens, digest

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
JSON, SSE = b"application/json", b"text/event-stream; charset=utf-8"
MOST_BODY = 64 << 20


class App:
    """Serves one timed model over OpenAI's API. Must be created inside the event loop that serves it."""

    def __init__(self, profile: LlmProfile, device: Device, lost: Callable[[], None] = lambda: None) -> None:
        """Start the engine's thread. `lost` is called once, if the device fails."""
        self._profile = profile
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Queue[bool | None]] = {}
        self._ids = itertools.count(1)
        self._created = int(time.time())
        self._lost = lost
        self.engine = Engine(profile, device, self._deliver)

    def close(self) -> None:
        """End the engine's thread."""
        self.engine.close()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        try:
            await self._route(scope["method"], scope["path"], receive, send)
        except RefusalError as refusal:
            await _answer(send, refusal.status, refusal.body())

    async def _route(self, method: str, path: str, receive: Receive, send: Send) -> None:
        if path == "/health" and method == "GET":
            await _answer(send, 200 if self.engine.error is None else 503, b"")
        elif path == "/v1/models" and method == "GET":
            row = {"id": self._profile.name, "object": "model", "created": self._created, "owned_by": "cotenant",
                   "max_model_len": self._profile.max_context}  # fmt: skip
            await _answer(send, 200, json.dumps({"object": "list", "data": [row]}).encode())
        elif path == "/load" and method == "GET":
            await _answer(send, 200, json.dumps({"server_load": self.engine.load}).encode())
        elif path not in (CHAT, COMPLETION, EMBEDDING):
            raise RefusalError(404, f"there is no {method} {path}")
        elif method != "POST":
            raise RefusalError(405, f"{path} accepts only POST")
        elif path == EMBEDDING:
            await self._embed(parse_body(await _body(receive)), receive, send)
        else:
            request = parse_request(path, parse_body(await _body(receive)), self._profile)
            await asyncio.sleep(self._profile.request_s)
            await self._generate(request, receive, send)

    async def _generate(self, request: Request, receive: Receive, send: Send) -> None:
        id_ = next(self._ids)
        writer = _Writer(request, f"{'chatcmpl' if request.path == CHAT else 'cmpl'}-{id_:08x}")
        queue = self._begin(id_, request.prompt_tokens, request.output_tokens)
        gone = asyncio.create_task(_hung_up(receive))
        try:
            if request.stream:
                await self._stream(request, writer, queue, gone, send)
            else:
                for _ in range(request.output_tokens):
                    if not await self._next(queue, gone):
                        return
                await _answer(send, 200, writer.whole())
        finally:
            gone.cancel()
            self._end(id_)

    async def _stream(
        self, request: Request, writer: _Writer, queue: asyncio.Queue[bool | None], gone: asyncio.Task[None], send: Send
    ) -> None:
        began = False
        for index in range(request.output_tokens):
            try:
                here = await self._next(queue, gone)
            except RefusalError as refusal:
                if not began:
                    raise
                await send({"type": "http.response.body", "body": b"data: " + refusal.body() + b"\n\n"})
                return
            if not here:
                return
            data = writer.event(index)
            if not began:
                began = True
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", SSE)]})
                data = writer.first() + data
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": writer.last()})

    async def _embed(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        texts = embedding_inputs(body, self._profile)
        ids = [next(self._ids) for _ in texts]
        queues = [self._begin(id_, count_tokens(text), 1) for id_, text in zip(ids, texts, strict=True)]
        gone = asyncio.create_task(_hung_up(receive))
        try:
            for queue in queues:
                if not await self._next(queue, gone):
                    return
        finally:
            gone.cancel()
            for id_ in ids:
                self._end(id_)
        as_text = body.get("encoding_format") == "base64"
        rows = [{"object": "embedding", "index": i, "embedding": _vector(self._profile.name, text, as_text)}
                for i, text in enumerate(texts)]  # fmt: skip
        tokens = sum(map(count_tokens, texts))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        content = {"object": "list", "model": self._profile.name, "data": rows, "usage": usage}
        await _answer(send, 200, json.dumps(content).encode())

    def _begin(self, id_: int, prompt: int, output: int) -> asyncio.Queue[bool | None]:
        queue = self._answers[id_] = asyncio.Queue()
        try:
            self.engine.add(id_, prompt, output)
        except WorkError as error:
            del self._answers[id_]
            raise RefusalError(503, str(error)) from None
        return queue

    def _end(self, id_: int) -> None:
        if self._answers.pop(id_, None) is not None:
            self.engine.cancel(id_)

    async def _next(self, queue: asyncio.Queue[bool | None], gone: asyncio.Task[None]) -> bool:
        """Wait for the next token of a request. Returns False if the client disconnects first. RefusalError if the
        device failed.
        """
        if not queue.empty():
            token = queue.get_nowait()
        else:
            getting = asyncio.ensure_future(queue.get())
            await asyncio.wait((getting, gone), return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                return False
            token = getting.result()
        if token is None:
            raise RefusalError(503, f"the device failed: {self.engine.error}")
        return True

    def _deliver(self, tokens: Sequence[Token]) -> None:
        """Pass the tokens of a step to the event loop; called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, tokens)

    def _take(self, tokens: Sequence[Token]) -> None:
        if not tokens and self.engine.error is not None:
            for queue in self._answers.values():
                queue.put_nowait(None)
            self._lost()
        for token in tokens:
            queue_of = self._answers.get(token.id)
            if queue_of is not None:
                queue_of.put_nowait(token.last)


class _Writer:
    """Writes the response to one request."""

    def __init__(self, request: Request, id_: str) -> None:
        self._request = request
        self._chat = request.path == CHAT
        kind = "chat.completion" if self._chat else "text_completion"
        self._head: dict[str, Any] = {"id": id_, "object": kind, "created": int(time.time()), "model": request.model}
        if request.stream and self._chat:
            self._head["object"] = "chat.completion.chunk"
        self._usage = {
            "prompt_tokens": request.prompt_tokens, "completion_tokens": request.output_tokens,
            "total_tokens": request.prompt_tokens + request.output_tokens,
        }  # fmt: skip

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + json.dumps({**self._head, "choices": choices, **more}).encode() + b"\n\n"

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        part: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        return {"index": 0, **part, "logprobs": None, "finish_reason": finish}

    def first(self) -> bytes:
        """Return the bytes of a streamed response before its first token."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def event(self, index: int) -> bytes:
        """Return the bytes of a streamed response for its token number `index`."""
        return self._event([self._choice(answer_token(self._request.model, self._request.name, index), None)])

    def last(self) -> bytes:
        """Return the bytes of a streamed response after its last token."""
        end = self._event([self._choice("", self._request.finish)])
        if self._request.usage:
            end += self._event([], usage=self._usage)
        return end + b"data: [DONE]\n\n"

    def whole(self) -> bytes:
        """Return the complete response, for a request without streaming."""
        request = self._request
        text = "".join(answer_token(request.model, request.name, index) for index in range(request.output_tokens))
        part: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": request.finish}
        return json.dumps({**self._head, "choices": [choice], "usage": self._usage}).encode()


def _vector(model: str, text: str, as_text: bool) -> list[float] | str:
    """Return a deterministic embedding of the text: numbers from -1 to 1, derived from a hash of model and text."""
    raw = hashlib.shake_128(f"{model}/{digest(text)}".encode()).digest(DIMENSIONS)
    values = [x / 127.5 - 1 for x in raw]
    return base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *values)).decode() if as_text else values


async def _body(receive: Receive) -> bytes:
    raw = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusalError(400, "the client disconnected")
        raw += message.get("body", b"")
        if len(raw) > MOST_BODY:
            raise RefusalError(413, f"the body is over {MOST_BODY} bytes")
        if not message.get("more_body"):
            return bytes(raw)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
