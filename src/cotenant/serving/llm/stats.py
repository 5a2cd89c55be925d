"""Counters of each model, cheap enough for the request path."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from cotenant.observability.exposition import Histogram
from cotenant.observability.metrics import MODEL_ANSWER, MODEL_TPOT, MODEL_TTFT

RECENT = 512  # number of latest streams of a model from which the percentiles in `cotenant top` are computed


class ModelStats:
    """Counters of one model. Histograms are created with the first answer: idle models have none."""

    __slots__ = (
        "answer", "answers", "deaths", "outcomes", "retries", "seconds", "switches", "tpot", "tpots", "ttft", "ttfts",
    )  # fmt: skip

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.switches: Counter[str] = Counter()  # numbers of starts, evictions, restores and stops of the program
        # total duration in s of the starts, evictions, restores and stops of the program
        self.seconds: dict[str, float] = {}
        self.deaths = self.retries = 0
        self.ttft: Histogram | None = None
        self.tpot: Histogram | None = None
        self.answer: Histogram | None = None
        self.answers: deque[float] = deque(maxlen=RECENT)
        self.ttfts: deque[float] = deque(maxlen=RECENT)
        self.tpots: deque[float] = deque(maxlen=RECENT)

    def finished(self, outcome: str, times: tuple[float, float | None] | None, whole_s: float | None) -> None:
        """Count a request that has ended. `times`: the arguments of `streamed`, None if nothing was streamed.
        `whole_s`: time from arrival to end of an answer that is not streamed, otherwise None.
        """
        self.outcomes[outcome] += 1
        if times is not None:
            self.streamed(*times)
        elif outcome == "ok" and whole_s is not None:
            self.answered(whole_s)

    def streamed(self, ttft_s: float, between_s: float | None) -> None:
        """Count a stream that has ended, with the time from the request's arrival to the first event, and the mean time
        between events."""
        if self.ttft is None or self.tpot is None:
            self.ttft, self.tpot = Histogram(MODEL_TTFT.buckets), Histogram(MODEL_TPOT.buckets)
        self.ttft.observe(ttft_s)
        self.ttfts.append(ttft_s)
        if between_s is not None:
            self.tpot.observe(between_s)
            self.tpots.append(between_s)

    def answered(self, seconds: float) -> None:
        """Count a successful answer that was not streamed, with the time since the request's arrival."""
        if self.answer is None:
            self.answer = Histogram(MODEL_ANSWER.buckets)
        self.answer.observe(seconds)
        self.answers.append(seconds)

    def switched(self, what: str, seconds: float) -> None:
        """Count a start, eviction, restore or stop of the model's program, and add its duration."""
        self.switches[what] += 1
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds


def percentile_ms(values: Sequence[float], fraction: float) -> float | None:
    """Return a percentile of recent values in milliseconds; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, int(fraction * len(ordered)))], 3)
