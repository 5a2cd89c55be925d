"""Counters of each model, cheap enough for the request path."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from cotenant.observability.exposition import Histogram
from cotenant.observability.metrics import MODEL_ANSWER, MODEL_TPOT, MODEL_TTFT

RECENT = 512  # number of latest requests of a model from which the percentiles in `cotenant top` are computed
# outcomes of requests that a client sent rightly and got no answer to
FAILURES = ("error", "failed", "full", "unavailable")


class ModelStats:
    """Counters of one model. Histograms are created with the first answer: idle models have none."""

    __slots__ = (
        "answer", "answers", "deaths", "outcomes", "recent", "retries", "seconds", "switches", "tpot", "tpots", "ttft",
        "ttfts",
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
        self.recent: deque[float] = deque(maxlen=RECENT)  # TTFTs of whole streams, and infinity for failed requests
        self.tpots: deque[float] = deque(maxlen=RECENT)

    def finished(self, outcome: str, times: tuple[float, float | None] | None, whole_s: float | None) -> None:
        """Count a request that has ended. `times`: the arguments of `streamed`, None if nothing was streamed.
        `whole_s`: time from arrival to end of an answer that is not streamed, otherwise None.
        """
        self.outcomes[outcome] += 1
        if outcome in FAILURES:
            self.recent.append(math.inf)
        elif outcome == "ok" and times is not None:
            self.recent.append(times[0])
        if times is not None:
            self.streamed(*times)
        elif outcome == "ok" and whole_s is not None:
            self.answered(whole_s)

    def streamed(self, ttft_s: float, between_s: float | None) -> None:
        """Count a stream that has ended, with the time from the request's arrival to the first token, and the mean time
        between tokens."""
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

    @property
    def failed(self) -> int:
        """Requests that failed or were refused, other than by a fault of the client."""
        return sum(self.outcomes[outcome] for outcome in FAILURES)

    def attainment(self, ttft_s: float) -> float | None:
        """Return the fraction of the recent streams, refused and failed requests included, whose TTFT is at most
        `ttft_s`; None if there are none."""
        return sum(t <= ttft_s for t in self.recent) / len(self.recent) if self.recent else None

    def switched(self, what: str, seconds: float) -> None:
        """Count a start, eviction, restore or stop of the model's program, and add its duration."""
        self.switches[what] += 1
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds


def percentile_ms(values: Sequence[float], fraction: float) -> float | None:
    """Return a percentile of recent values in milliseconds, interpolated linearly between the two nearest values; None
    if there are no values.
    """
    if not values:
        return None
    ordered = sorted(values)
    whole, part = divmod(fraction * (len(ordered) - 1), 1.0)
    low, high = ordered[int(whole)], ordered[min(int(whole) + 1, len(ordered) - 1)]
    return round(1e3 * (low + part * (high - low)), 3)
