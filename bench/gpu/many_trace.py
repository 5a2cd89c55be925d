"""The requests of models_many.py: bursts to several models of unequal popularity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.workloads.llm.drawn import draw_trace

HOTTEST_RPS, SKEW = 4.0, 0.8
BURST_PAUSE_S, SHORT_PAUSE_S = 5.0, 2.0
SEED = 0


@dataclass(frozen=True)
class Request:
    """A request of the trace: seconds from its start, model, and tokens."""

    at_s: float
    model: str
    prompt: int
    output: int


@dataclass(frozen=True)
class Kind:
    """How requests are drawn: mean lengths in seconds of the times with and without requests to a model, the lengths of
    prompts and answers in tokens (mean, or mean~coefficient of variation), and the longest prompt.
    """

    on_s: float = 8.0
    off_s: float = 30.0
    prompt: str = "512~1"
    answer: str = "64~0.7"
    most_prompt: int = 2048


def draw(names: Sequence[str], seconds: float, kind: Kind) -> list[Request]:
    """Draw the requests of all models, in ascending order of time. While the k-th model gets requests, its rate is
    HOTTEST_RPS k^-SKEW.
    """
    part = kind.on_s / (kind.on_s + kind.off_s)
    rates = [HOTTEST_RPS * (k + 1) ** -SKEW * part for k in range(len(names))]
    arrivals = f"mmpp:1,{kind.on_s};0,{kind.off_s}"
    found = draw_trace(names, rates, kind.prompt, kind.answer, seconds, arrivals, SEED)
    rows = zip(found.times_s, found.model, found.prompt, found.output, strict=True)
    return [Request(float(at), names[int(m)], min(kind.most_prompt, int(p)), int(o)) for at, m, p, o in rows]


def bursts(requests: Sequence[Request], name: str) -> list[tuple[float, float]]:
    """Begin and end in seconds of each burst of a model's requests: pauses of at most BURST_PAUSE_S belong to it."""
    found: list[tuple[float, float]] = []
    for at in (r.at_s for r in requests if r.model == name):
        if found and at - found[-1][1] <= BURST_PAUSE_S:
            found[-1] = (found[-1][0], at)
        else:
            found.append((at, at))
    return found


def together(spans: Sequence[tuple[float, float]], seconds: float) -> tuple[int, float]:
    """The largest number of spans that overlap, and the mean number over `seconds`."""
    edges = sorted([(a, -1) for a, _ in spans] + [(b, 1) for _, b in spans])  # at equal times, begins before ends
    now = most = 0
    for _, edge in edges:
        now -= edge
        most = max(most, now)
    return most, round(sum(b - a for a, b in spans) / seconds, 2)


def shortened(requests: Sequence[Request]) -> list[Request]:
    """The same requests with every pause shortened to at most SHORT_PAUSE_S."""
    found: list[Request] = []
    cut = before = 0.0
    for r in requests:
        cut += max(0.0, r.at_s - before - SHORT_PAUSE_S)
        before = r.at_s
        found.append(Request(r.at_s - cut, r.model, r.prompt, r.output))
    return found
