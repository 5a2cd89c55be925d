"""Counters of each model, cheap enough for the request path."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from cotenant.observability.exposition import Histogram
from cotenant.observability.metrics import MODEL_TPOT, MODEL_TTFT

RECENT = 512  # number of latest streams of a model from which the percentiles in `cotenant top` are computed


class ModelStats:
    """Counters of one model. Histograms are created with the first finished stream: idle models have none."""

    __slots__ = ("deaths", "outcomes", "retries", "seconds", "switches", "tpot", "tpots", "ttft", "ttfts")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.switches: Counter[str] = Counter()  # numbers of starts, evictions, restores and stops of the program
        # total duration in s of the starts, evictions, restores and stops of the program
        self.seconds: dict[str, float] = {}
        self.deaths = self.retries = 0
        self.ttft: Histogram | None = None
        self.tpot: Histogram | None = None
        self.ttfts: deque[float] = deque(maxlen=RECENT)
        self.tpots: deque[float] = deque(maxlen=RECENT)

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
