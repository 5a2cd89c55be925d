"""Measures the step times of a running language-model engine through its API: chooses the requests, sends them, and
derives step times from the times at which tokens arrive."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cotenant.core.errors import WorkError
from cotenant.core.metrics.tokens import Target as Promise
from cotenant.loadgen.openai import OpenAiTest, OpenAiTransport, check_models, run_openai
from cotenant.loadgen.target import Target
from cotenant.profiles.llm.fit import Fit, Point, fit
from cotenant.profiles.llm.profile import Step, pairs_of
from cotenant.workloads.llm.trace import make_trace

PROMPTS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 1024, 4096)
NARROW = 0.1  # a 95 % interval of a median is narrow enough if it is at most this part of the median wide
AGAIN_S = 15.0  # for at most so long are the other points measured again
TOKENS = 32  # number of tokens of each answer in a measurement of decode, which times the intervals between them


@dataclass(frozen=True)
class Cell:
    """Requests that are sent to an engine at once: `batch` prompts of `prompt` tokens. The time to the first token of a
    single request measures prefill; the intervals between tokens measure decode.
    """

    prompt: int
    batch: int
    decode: bool


@dataclass(frozen=True)
class Profiling:
    """Settings of the measurement of an engine. `most_tokens`: the engine's limit for one request; `kv_tokens`: limit
    for all requests that are sent at once; `max_sequences`: the engine's limit for the requests of a step.
    """

    target: Target
    model: str
    most_tokens: int = 8192
    kv_tokens: int = 100_000
    rounds: int = 5
    endpoint: str = "completions"
    seed: int = 0
    max_sequences: int = max(BATCHES)

    def cells(self) -> list[Cell]:
        """Return all cells (combinations of batch and prompt length) that the engine can run."""
        found = [Cell(p, 1, False) for p in PROMPTS if p + 1 <= self.most_tokens]
        # with more requests than a step has, some would wait, and the others' steps would count as larger ones
        for batch in (b for b in BATCHES if b <= self.max_sequences):
            for prompt in CONTEXTS:
                if prompt + TOKENS <= self.most_tokens and batch * (prompt + TOKENS) <= self.kv_tokens:
                    found.append(Cell(prompt, batch, True))
        return found


def measure(work: Profiling, tell: Callable[[int, int], object] = lambda done, of: None) -> Fit:
    """Measure every cell (a combination of batch and prompt length) in every round, each time in a new random order. A
    first round is not counted. Then cells whose interval is wide are measured again, for AGAIN_S at most, and for no
    longer than the counted rounds took.
    """
    cells = work.cells()
    rng = random.Random(work.seed)
    seen: dict[Cell, list[tuple[Step, float]]] = {cell: [] for cell in cells}
    total, done = len(cells) * (work.rounds + 1), 0
    began_s = time.monotonic()
    for number in range(work.rounds + 1):
        if number == 1:
            began_s = time.monotonic()
        for cell in rng.sample(cells, len(cells)):
            found = _once(work, cell, number * len(cells) + cells.index(cell))
            if number:
                seen[cell].append(found)
            done += 1
            tell(done, total)
    _again(work, seen, rng, total, time.monotonic() + min(AGAIN_S, time.monotonic() - began_s))
    return fit([_point(rows) for rows in seen.values()])


def _again(
    work: Profiling, seen: dict[Cell, list[tuple[Step, float]]], rng: random.Random, number: int, until_s: float
) -> None:
    """Measure cells until their intervals are narrow, or until this time. `number`: of the next measurement."""
    while wide := [cell for cell, rows in seen.items() if _point(rows).width > NARROW]:
        for cell in rng.sample(wide, len(wide)):
            if time.monotonic() >= until_s:
                return
            seen[cell].append(_once(work, cell, number))
            number += 1


def _point(rows: Sequence[tuple[Step, float]]) -> Point:
    return Point(rows[len(rows) // 2][0], tuple(seconds for _, seconds in rows))


def _once(work: Profiling, cell: Cell, number: int) -> tuple[Step, float]:
    output = TOKENS if cell.decode else 1
    trace = make_trace("profile", [0.0] * cell.batch, None, [cell.prompt] * cell.batch, [output] * cell.batch,
                       (work.model,))  # fmt: skip
    # different for every cell of the measurement, so that no two cells have the same prompts
    seed = work.seed * 1_000_003 + number
    test = OpenAiTest(
        work.target, trace, (Promise(work.model),), work.endpoint, {"ignore_eos": True}, seed=seed,
        connections=max(BATCHES),
    )  # fmt: skip
    transport = OpenAiTransport(test, stamps=True)
    result = run_openai(test, transport=transport)
    if result.reasons:
        raise WorkError(f"the engine did not answer: {next(iter(result.reasons))}")
    times = result.times
    prompt = int(times.prompt[0]) or cell.prompt
    if not cell.decode:
        return Step(tokens=prompt, pairs=pairs_of(prompt)), float(times.first_s[0] - result.sent_s[0])
    begin, end = float(times.first_s.max()), float(times.last_s.min())
    gap_s = _gap([np.array(x) for x in (transport.stamps or {}).values()], begin, end)
    context = prompt + TOKENS // 2
    return Step(sequences=cell.batch, context=cell.batch * context), gap_s


def _gap(stamps: Sequence[np.ndarray], begin: float, end: float) -> float:
    """Return the seconds per token from `begin` to `end`, while all requests decode: the median over requests of the
    mean interval between a request's tokens in that period (over its whole answer, if it has too few tokens there).
    """
    found = []
    for own in stamps:
        inside = own[(own >= begin) & (own <= end)]
        row = inside if len(inside) > 4 else own
        if len(row) > 1:
            found.append(float(row[-1] - row[0]) / (len(row) - 1))
    if not found:
        raise WorkError("the engine's answers have too few tokens to measure")
    return median(found)


def limits(target: Target, model: str) -> int | None:
    """Return the engine's limit on the tokens of one request, as its API reports it; None if it reports no limit.
    Raises as `check_models`.
    """
    found = check_models(target, [model]).get(model, {}).get("max_model_len")
    return found if isinstance(found, int) else None
