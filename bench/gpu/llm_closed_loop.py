"""Compares the LLM simulator with rows that models_vllm.py or models_pair.py measured of one model alone.

    PYTHONPATH=src python bench/gpu/llm_closed_loop.py PROFILE.json ROWS.jsonl

PROFILE.json: what `cotenant profile llm` measured of the same engine. The clients of the rows are a closed loop: each
sends its next request when its answer is complete. This script has the same clients with the same lengths of answers in
virtual time, in which the engine's steps take the times of the profile. It prints a JSON row per number of requests in
flight: of each figure the simulated and the live value, and simulated / live - 1.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stream_client import Answer, Client, lengths

from cotenant.policy.llm_batching import Batcher
from cotenant.profiles.llm.files import find_profile
from cotenant.profiles.llm.profile import LlmProfile

STEP, NAME = "alone", "one"  # the rows that are compared, and the model's name in them
OLDER = {"seconds": 22.0, "prompt": 2048, "output": 256}  # of rows that do not state them
FIGURES = ("tokens_per_s", "ttft_ms", "ttft_p90_ms", "tpot_ms", "tpot_p90_ms")


@dataclass(frozen=True, order=True)
class Request:
    """A request of a client: when it was sent, in seconds, and the tokens of its answer."""

    sent_s: float
    client: int
    output: int
    answer: Answer = field(compare=False)


def closed(profile: LlmProfile, count: int, seconds: float, prompt: int, output: int) -> list[Request]:
    """Simulate `count` clients for some seconds. Returns all requests, with the times of their tokens."""
    draws: list[Iterator[int]] = [lengths(NAME, number, output) for number in range(count)]
    engine, now_s = Batcher(profile), 0.0
    found: list[Request] = []
    due = [Request(0.0, number, next(draw), Answer(0.0)) for number, draw in enumerate(draws)]
    while True:
        while due and due[0].sent_s + profile.request_s <= now_s:
            one = heapq.heappop(due)
            engine.add(len(found), prompt, one.output)
            found.append(one)
        step = engine.begin()
        if step is None:
            now_s = due[0].sent_s + profile.request_s
            continue
        now_s += profile.times.seconds(step)
        if now_s > seconds:
            return found
        for token in engine.end():
            one = found[token.id]
            one.answer.stamps.append(now_s)
            if token.last:
                one.answer.whole = True
                heapq.heappush(due, Request(now_s, one.client, next(draws[one.client]), Answer(now_s)))


def simulated(profile: LlmProfile, live: dict[str, Any]) -> dict[str, Any]:
    """Return what the clients of a live row measure in virtual time, counted as there: without the first quarter."""
    seconds, prompt, output = ((OLDER | live)[key] for key in ("seconds", "prompt", "output"))
    requests = closed(profile, live["in_flight"], seconds, prompt, output)
    client = Client({}, {NAME: [one.answer for one in requests]})
    return client.row(seconds / 4, seconds)


def compared(profile: LlmProfile, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the comparison of each row of one model alone."""
    for live in rows:
        if live.get("step") != STEP or "in_flight" not in live:
            continue
        virtual = simulated(profile, live)
        yield {"in_flight": live["in_flight"], "requests": live["first_tokens"]} | {
            key: {"simulated": virtual[key], "live": live[key], "deviation": round(virtual[key] / live[key] - 1, 3)}
            for key in FIGURES if virtual[key] and live[key]
        }  # fmt: skip


if __name__ == "__main__":
    spec, path = sys.argv[1:]
    for row in compared(find_profile(spec, NAME), [json.loads(x) for x in Path(path).read_text().splitlines()]):
        print(json.dumps(row))
