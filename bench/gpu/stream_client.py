"""A client of streamed answers for models_pair.py and models_many.py, by asyncio's streams alone: `prompt` words to
`output` tokens. Each word of an answer counts as a token.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

WORDS = 100_000  # prompts consist of the numbers below this, in digits


@dataclass
class Answer:
    """Times of one request, in seconds of time.monotonic. `queued_ms`: how long it waited in the server's queue, if the
    server says so; `models`: the models that the events of the answer name.
    """

    sent_s: float
    stamps: list[float] = field(default_factory=list)
    whole: bool = False
    queued_ms: float | None = None
    models: set[str] = field(default_factory=set)


@dataclass
class Client:
    """Sends requests to models at (name, port), and keeps all answers."""

    ports: dict[str, int]
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    async def ask(self, name: str, prompt: int, output: int) -> None:
        """Send one streamed request on a connection of its own."""
        words = " ".join(str(random.randrange(WORDS)) for _ in range(prompt))
        body = {
            "model": name, "messages": [{"role": "user", "content": words}], "max_tokens": output, "stream": True,
            "temperature": 0.0,
        }  # fmt: skip
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[name])
        answer = Answer(time.monotonic())
        self.answers.setdefault(name, []).append(answer)
        try:
            writer.write(head.encode() + data)
            status = await reader.readline()
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    answer.whole = True
                    return
                if line.startswith(b"cotenant-queued-ms:"):
                    answer.queued_ms = float(line.partition(b":")[2])
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    answer.models |= {event["model"]} if "model" in event else set()
                    choices = event.get("choices") or [{}]
                    if text := choices[0].get("delta", {}).get("content"):  # an event may have several tokens
                        answer.stamps += [time.monotonic()] * max(1, len(text.split()))
            self.faults.append(f"{name}: {status.decode().strip()}, after {len(answer.stamps)} tokens")
        except OSError as error:
            self.faults.append(f"{name}: {error}")
        finally:
            writer.transport.abort()

    async def closed(self, name: str, number: int, prompt: int, output: int) -> None:
        """Keep one request in flight until cancelled, with the answers of `lengths`."""
        for length in lengths(name, number, output):
            await self.ask(name, prompt, length)

    async def open(self, name: str, prompt: int, output: int, rate: float, until_s: float) -> None:
        """Poisson requests."""
        draw, due = random.Random(name), time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (due := due + draw.expovariate(rate)) < until_s:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self.ask(name, prompt, output))

    def row(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """Statistics of all models over an interval of time."""
        every = [a for answers in self.answers.values() for a in answers]
        tokens = sum(begin_s <= at < end_s for a in every for at in a.stamps)
        ended = sum(a.whole and begin_s <= a.stamps[-1] < end_s for a in every if a.stamps)
        first = [(a.stamps[0] - a.sent_s) * 1e3 for a in every if a.stamps and begin_s <= a.sent_s < end_s]
        gaps = []
        for a in every:
            inside = [at for at in a.stamps if begin_s <= at < end_s]
            if len(inside) >= 4:
                gaps.append((inside[-1] - inside[0]) / (len(inside) - 1) * 1e3)
        return {
            "tokens_per_s": round(tokens / (end_s - begin_s), 1), "first_tokens": len(first), "ended": ended,
            "still_waiting": sum(not a.stamps and begin_s <= a.sent_s < end_s for a in every),
            "ttft_ms": middle(first), "ttft_p90_ms": middle(first, 0.9), "tpot_ms": middle(gaps),
            "tpot_p90_ms": middle(gaps, 0.9), "faults": self.faults[:3],
        }  # fmt: skip


def lengths(name: str, number: int, output: int) -> Iterator[int]:
    """Yield the tokens of the answers to one client of a closed loop: `output` on average, and at random up to a
    quarter less or more; the first one is shortened at random. Otherwise clients and models with equal speeds would
    send their prompts at the same times all the time. Each (name, number) has the same lengths in each run.
    """
    draw = random.Random(f"{name} {number}")
    yield max(2, round(output * draw.random()))
    while True:
        yield round(output * draw.uniform(0.75, 1.25))


def middle(values: list[float], part: float = 0.5) -> float | None:
    """A quantile of the values; None if there are none."""
    values = sorted(values)
    return round(values[min(len(values) - 1, int(part * len(values)))], 2) if values else None
