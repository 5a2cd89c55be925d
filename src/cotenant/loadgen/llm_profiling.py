"""Measures the step times of a running language-model engine through its API: chooses the requests, sends them, and
derives step times from the times at which tokens arrive."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from cotenant.core.errors import InputError, WorkError
from cotenant.core.metrics.tokens import Target as Promise
from cotenant.core.partial import Partial
from cotenant.loadgen.model_list import check_models
from cotenant.loadgen.openai import OpenAiResult, OpenAiTest, OpenAiTransport, run_openai
from cotenant.loadgen.target import Target
from cotenant.profiles.llm.fit import LEAST, Fit, Point, fit
from cotenant.profiles.llm.profile import Step, pairs_of
from cotenant.workloads.llm.trace import make_trace

PROMPTS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 1024, 4096)
NARROW = 0.1  # a 95 % interval of a median is narrow enough if it is at most this part of the median wide
AGAIN_S = 15.0  # for at most so long are the other points measured again
LEAD = 4  # intervals between tokens before a prompt is sent beside the request that decodes, and after it
# Prompts beside one request that decodes. More of them measure a step more often in the same time, and as it is in an
# engine at work: the first steps after a pause take longer.
PROMPTS_BESIDE = 4
# fields of /v1/models that vLLM makes anew for each request
PASSING = ("created", "permission")
MERGED = 1.05  # with more tokens per event, the length of a single step cannot be told from the times of events
TOKENS = 32  # number of tokens of each answer in a measurement of decode, which times the intervals between them


@dataclass(frozen=True)
class Cell:
    """Requests that are sent to an engine at once: `batch` prompts of `prompt` tokens. The intervals between tokens
    measure decode. The time to the first token of a single request measures prefill and what the request spends outside
    of steps. If it is sent `beside` a request that decodes, the delay of that request's tokens measures prefill alone.
    """

    prompt: int
    batch: int
    decode: bool
    beside: bool = False

    def __str__(self) -> str:
        return f"{'beside' if self.beside else 'decode' if self.decode else 'prefill'} {self.batch} x {self.prompt}"


SHORT = Cell(PROMPTS[0], 1, False)
LONE = Cell(CONTEXTS[0], 1, True)


@dataclass(frozen=True)
class Profiling:
    """Settings of the measurement of an engine. `most_tokens`: the engine's limit for one request; `kv_tokens`: limit
    for all requests that are sent at once; `max_sequences`: the engine's limit for the requests of a step. `seed`: of
    the order of measurements; `run`: the seed of the prompts.
    """

    target: Target
    model: str
    most_tokens: int = 8192
    kv_tokens: int = 100_000
    rounds: int = 5
    endpoint: str = "completions"
    seed: int = 0
    max_sequences: int = max(BATCHES)
    run: int = 0

    def cells(self) -> list[Cell]:
        """Return all cells (combinations of batch and prompt length) that the engine can run."""
        found = [Cell(p, 1, False) for p in PROMPTS if p + 1 <= self.most_tokens]
        # with more requests than a step has, some would wait, and the others' steps would count as larger ones
        for batch in (b for b in BATCHES if b <= self.max_sequences):
            for prompt in CONTEXTS:
                if prompt + TOKENS <= self.most_tokens and batch * (prompt + TOKENS) <= self.kv_tokens:
                    found.append(Cell(prompt, batch, True))
        if LONE in found and self.max_sequences > 1:
            found += [Cell(cell.prompt, 1, False, beside=True) for cell in found if not cell.decode]
        return found

    def check(self) -> None:
        """Raise InputError if the limits of the engine leave fewer cells than a fit needs."""
        cells = self.cells()
        single = [cell for cell in cells if not (cell.decode or cell.beside)]
        if min(len(single), sum(cell.decode for cell in cells)) < LEAST:
            raise InputError(
                f"the limits leave too few measurements for a profile: requests of up to {self.most_tokens:,} tokens "
                f"(the engine's limit), --kv-tokens {self.kv_tokens} and --max-sequences {self.max_sequences}; "
                f"it needs {LEAST} lengths of prompts (16, 64, 256 ... tokens), and {LEAST} combinations of a context "
                "(64, 1024 or 4096 tokens, and the answer) with a number of requests (1, 2, 4 ...)"
            )


@dataclass(frozen=True)
class Sample:
    """One measurement of a cell: steps and their seconds, none if the measurement yielded none; and how long it took.
    """

    took_s: float
    found: tuple[tuple[Step, float], ...]

    def row(self) -> list[Any]:
        """Return the sample as a row of the partial file."""
        return [self.took_s, *([asdict(step), seconds] for step, seconds in self.found)]


def _sample(row: list[Any]) -> Sample:
    return Sample(float(row[0]), tuple((Step(**step), float(seconds)) for step, seconds in row[1:]))


class Samples:
    """The measurements of a run that count, by cell. Each is kept in the partial file, if there is one, as soon as it
    is made. `warm`: the cells that an interrupted run has not finished, which are measured once without being counted,
    because the engine may have been started again; `total`: number of measurements, with those of the interrupted run.
    """

    def __init__(self, work: Profiling, partial: Partial | None = None) -> None:
        self.cells = work.cells()
        self._partial, self._rounds = partial, work.rounds
        rows = {} if partial is None else partial.rows
        self.made = {cell: [_sample(row) for row in rows.get(str(cell), ())] for cell in self.cells}
        self.kept = sum(map(len, self.made.values()))
        self.warm = [cell for cell, own in self.made.items() if len(own) < work.rounds] + self.wide()
        self.tokens_each = 1.0  # tokens of each event of the engine's streams, in the mean
        self.total = self.kept + len(self.warm) + sum(max(0, work.rounds - len(x)) for x in self.made.values())

    def add(self, cell: Cell, sample: Sample) -> None:
        """Count a measurement."""
        own = self.made[cell]
        own.append(sample)
        if self._partial is not None:
            self._partial.put(str(cell), [x.row() for x in own])

    def found(self, cell: Cell) -> list[tuple[Step, float]]:
        """Return the steps of a cell and their seconds."""
        return [one for x in self.made[cell] for one in x.found]

    def wide(self) -> list[Cell]:
        """Return the cells of which all rounds are measured, and whose interval is wide."""
        complete = [cell for cell, own in self.made.items() if len(own) >= self._rounds and self.found(cell)]
        return [cell for cell in complete if _point(self.found(cell)).width > NARROW]

    def left_s(self) -> float:
        """Return for how long cells with a wide interval may still be measured again: AGAIN_S in all, and no longer
        than the rounds took."""
        in_rounds = sum(x.took_s for own in self.made.values() for x in own[: self._rounds])
        again = sum(x.took_s for own in self.made.values() for x in own[self._rounds :])
        return min(AGAIN_S, in_rounds) - again


def measure(
    work: Profiling, tell: Callable[[int, int], None] = lambda done, of: None, samples: Samples | None = None
) -> Fit:
    """Measure every cell (a combination of batch and prompt length) in every round, each time in a new random order. A
    first round is not counted. Then cells whose interval is wide are measured again. `samples` may have measurements of
    an interrupted run, which are not made again.
    """
    samples = Samples(work) if samples is None else samples
    rng = random.Random(work.seed)
    run = _Run(work, {cell: median(x for _, x in rows) for cell in samples.cells if (rows := samples.found(cell))})
    # the duration of a measurement beside another request follows from the other measurements
    for cell in sorted(rng.sample(samples.warm, len(samples.warm)), key=lambda cell: cell.beside):
        run.once(cell)
        tell(samples.kept + run.number, samples.total)
    for number in range(1, work.rounds + 1):
        for cell in rng.sample(samples.cells, len(samples.cells)):
            if len(samples.made[cell]) < number:
                samples.add(cell, _timed(run, cell))
                tell(samples.kept + run.number, samples.total)
    until_s = time.monotonic() + samples.left_s()
    while wide := samples.wide():
        for cell in rng.sample(wide, len(wide)):
            if time.monotonic() >= until_s:
                break
            samples.add(cell, _timed(run, cell))
        else:
            continue
        break
    samples.tokens_each = run.tokens_each or 1.0
    return fit([_point(rows) for cell in samples.cells if (rows := samples.found(cell))])


def _timed(run: _Run, cell: Cell) -> Sample:
    began_s = time.monotonic()
    found = run.once(cell)
    return Sample(time.monotonic() - began_s, tuple(found))


def _point(rows: Sequence[tuple[Step, float]]) -> Point:
    return Point(rows[len(rows) // 2][0], tuple(seconds for _, seconds in rows))


class _Run:
    """Sends the requests of measurements, one after the other. `number`: how many were made; `last_s`: the seconds of
    the last measurement of each cell."""

    def __init__(self, work: Profiling, last_s: Mapping[Cell, float] | None = None) -> None:
        self._work = work
        self.number = self._sent = 0
        self._last_s = dict(last_s or {})
        self.tokens_each: float | None = None  # tokens per event in the last measurement of decode; None: none yet

    def once(self, cell: Cell) -> list[tuple[Step, float]]:
        """Measure a cell. Returns steps and their seconds; none if the request that decodes ended too early."""
        found = self._beside(cell.prompt) if cell.beside else [self._together(cell)]
        self.number += 1
        if found:
            self._last_s[cell] = median(seconds for _, seconds in found)
        return found

    def _together(self, cell: Cell) -> tuple[Step, float]:
        output = TOKENS if cell.decode else 1
        result, transport = self._send([0.0] * cell.batch, [cell.prompt] * cell.batch, [output] * cell.batch)
        times = result.times
        prompt = int(times.prompt[0]) or cell.prompt
        if not cell.decode:
            return Step(tokens=prompt, pairs=pairs_of(prompt)), float(times.first_s[0] - result.sent_s[0])
        begin, end = float(times.first_s.max()), float(times.last_s.min())
        stamps = {index: np.array(x) for index, x in (transport.stamps or {}).items()}
        pairs = [(int(times.output[index]), len(own)) for index, own in stamps.items() if len(own) > 1]
        self.tokens_each = max(1.0, median((tokens - 1) / (events - 1) for tokens, events in pairs)) if pairs else 1.0
        gap_s = _gap(list(stamps.values()), begin, end) / self.tokens_each
        context = prompt + TOKENS // 2
        return Step(sequences=cell.batch, context=cell.batch * context), gap_s

    def _beside(self, prompt: int) -> list[tuple[Step, float]]:
        """Send prompts, one after the other, while one request decodes, and measure the delay of that request's tokens
        by each of them. There are fewer than PROMPTS_BESIDE if the engine has no space for so many tokens, and none if
        its events have several tokens.
        """
        if self.tokens_each is None:
            self._together(LONE)
        if (self.tokens_each or 1.0) > MERGED:
            return []
        work, gap_s = self._work, self._last_s[LONE]
        at_s, each_s = 2 * self._last_s[SHORT] + LEAD * gap_s, 2 * self._last_s[Cell(prompt, 1, False)] + LEAD * gap_s
        most = min(work.most_tokens, work.kv_tokens - prompt - 1) - SHORT.prompt
        count = min(PROMPTS_BESIDE, math.floor((most * gap_s - at_s) / each_s))
        if count < 1:
            return []
        output = min(most, math.ceil((at_s + count * each_s) / gap_s) + LEAD)
        result, transport = self._send(
            [0.0, *(at_s + n * each_s for n in range(count))], [SHORT.prompt] + [prompt] * count, [output] + [1] * count
        )
        stamps, times = np.array((transport.stamps or {}).get(0, ())), result.times
        sent_s, first_s = [*result.sent_s.tolist(), math.inf], [-math.inf, *times.first_s.tolist()[1:]]
        found = []
        for n in range(1, count + 1):
            if not first_s[n - 1] < sent_s[n] < first_s[n] < sent_s[n + 1]:
                continue  # two prompts were at the engine at the same time
            seconds = _delayed(stamps, sent_s[n], first_s[n])
            if seconds is not None:
                tokens = int(times.prompt[n]) or prompt
                context = (int(times.prompt[0]) or SHORT.prompt) + int((stamps < sent_s[n]).sum())
                found.append((Step(tokens, pairs_of(tokens), 1, context), seconds))
        return found

    def _send(
        self, times_s: list[float], prompts: list[int], outputs: list[int]
    ) -> tuple[OpenAiResult, OpenAiTransport]:
        work = self._work
        trace = make_trace("profile", times_s, None, prompts, outputs, (work.model,))
        # different for every measurement, so that no two have the same prompts
        test = OpenAiTest(
            work.target, trace, (Promise(work.model),), work.endpoint, {"ignore_eos": True},
            seed=work.run * 1_000_003 + self._sent, connections=max(BATCHES),
        )  # fmt: skip
        self._sent += 1
        transport = OpenAiTransport(test, stamps=True)
        result = run_openai(test, transport=transport)
        if result.reasons:
            raise WorkError(f"the engine did not answer: {next(iter(result.reasons))}")
        return result, transport


def _delayed(stamps: np.ndarray, sent_s: float, first_s: float) -> float | None:
    """Return the length of the step that computed a prompt, sent at `sent_s` and answered at `first_s`, from the times
    of the tokens of a request that decoded meanwhile: the time from its last token before `sent_s` to its first one
    after the answer, without the other tokens' intervals. None if it has too few tokens before and after.
    """
    gap_s = float(np.median(np.diff(stamps))) if len(stamps) > 1 else 0.0
    begin = int(np.searchsorted(stamps, sent_s)) - 1
    # both tokens of the step arrive at about the same time, in any order
    end = int(np.searchsorted(stamps, first_s - gap_s / 2))
    if begin < 1 or end >= len(stamps):
        return None
    return float(stamps[end] - stamps[begin]) - (end - begin - 1) * gap_s


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
    return limit_of(describe(target, model))


def describe(target: Target, model: str) -> dict[str, Any]:
    """Return what the engine's list of models says of a model, without what differs from one request to the next.
    Raises as `check_models`.
    """
    row = check_models(target, [model]).get(model, {})
    return {key: value for key, value in row.items() if key not in PASSING}


def limit_of(row: dict[str, Any]) -> int | None:
    """Return the limit on the tokens of one request that a model's description has; None if it has none."""
    found = row.get("max_model_len")
    return found if isinstance(found, int) else None
