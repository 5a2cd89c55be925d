"""A timed engine in a thread, and plain requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cotenant.profiles.llm.profile import LlmProfile, Step, StepTimes
from cotenant.timed_llm.engine import Device
from cotenant.timed_llm.serve import serve
from cotenant.workloads.llm.text import answer_token, digest


def answer_text(model: str, prompt: str, tokens: int) -> str:
    """The complete answer of a timed engine."""
    return "".join(answer_token(model, digest(prompt), index) for index in range(tokens))


NO_TIME = StepTimes(0, 0, 0, 0, 0, 0)


class Instant:
    """A device whose steps take no time; `hold` makes it wait before the step with that number (from 1)."""

    def __init__(self, hold: int | None = None) -> None:
        self.steps: list[Step] = []
        self.held, self.go = threading.Event(), threading.Event()
        self._hold = hold

    def run(self, step: Step, began_s: float, seconds: float) -> float:
        self.steps.append(step)
        if len(self.steps) == self._hold:
            self.held.set()
            assert self.go.wait(60)
        return began_s


@contextmanager
def running(profile: LlmProfile, device: Device) -> Iterator[int]:
    """Run an engine in a thread; yields its port."""
    listening = threading.Event()
    port = 0
    stop: Callable[[], None] = lambda: None  # noqa: E731
    loops: list[asyncio.AbstractEventLoop] = []

    def ready(at: int, end: Callable[[], None]) -> None:
        nonlocal port, stop
        port, stop = at, end
        listening.set()

    def body() -> None:
        asyncio.run(serve(profile, device, "127.0.0.1", 0, ready))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert listening.wait(60)
    try:
        yield port
    finally:
        stop()
        thread.join(60)
        assert not thread.is_alive(), loops


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Send one request; returns status and JSON of the answer."""
    made = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        made.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = made.getresponse()
        raw = answer.read()
        return answer.status, json.loads(raw) if raw else None
    finally:
        made.close()


def stream(port: int, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without the last one, which must be [DONE]."""
    made = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        made.request("POST", path, json.dumps({**body, "stream": True}))
        answer = made.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream"), answer.read()
        lines = [x for x in answer.read().decode().split("\n\n") if x]
        assert all(x.startswith("data: ") for x in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(x[6:]) for x in lines[:-1]]
    finally:
        made.close()
