"""Autoscaling: follows the request rates of services, predicts them, and chooses the number of GPUs with hysteresis.
Pure: no clock.

There are two predictions: `Ewma`, which follows rates as the public gpulet scheduler does, and `Trend`, which also
follows rising rates and covers its own recent errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Ewma:
    """Exponentially weighted mean of a service's request rates, each counted over an interval of the same length: alpha
    = 2 / (samples + 1).

    The forecast is the mean times 1.2, or times 1.5 under 125 requests/s, where chance weighs more.
    """

    samples: int = 40
    rate_rps: float | None = None

    def observe(self, rate_rps: float) -> None:
        """Update the mean with the request rate of one interval."""
        alpha = 2.0 / (self.samples + 1)
        self.rate_rps = rate_rps if self.rate_rps is None else alpha * rate_rps + (1 - alpha) * self.rate_rps

    def forecast(self, ahead: int) -> float:
        """Return the request rate to plan for. How many intervals `ahead` it is for makes no difference."""
        if self.rate_rps is None:
            return 0.0
        return self.rate_rps * (1.5 if self.rate_rps < 125.0 else 1.2)


@dataclass
class Trend:
    """Predicts a request rate from its level and trend (Holt's linear smoothing), plus `cover` times the mean absolute
    error of recent forecasts.

    The trend is never followed downwards: scaling down is slow by intent.
    """

    level_gain: float = 0.3
    trend_gain: float = 0.1
    error_gain: float = 0.1
    cover: float = 2.0
    level: float | None = None
    trend: float = 0.0
    error: float = 0.0

    def observe(self, rate_rps: float) -> None:
        """Update level, trend and error with the request rate of one interval."""
        if self.level is None:
            self.level = rate_rps
            return
        expected = self.level + self.trend
        self.error += self.error_gain * (abs(rate_rps - expected) - self.error)
        level = self.level_gain * rate_rps + (1 - self.level_gain) * expected
        self.trend += self.trend_gain * (level - self.level - self.trend)
        self.level = level

    def forecast(self, ahead: int) -> float:
        """Return the request rate to plan for, `ahead` intervals from now."""
        if self.level is None:
            return 0.0
        expected = self.level + max(0.0, self.trend) * ahead
        # a plan is used for many intervals, so the errors of single intervals partly cancel over `ahead` of them
        scatter = self.cover * self.error / math.sqrt(max(1, ahead))
        return max(0.0, expected + scatter)


FORECASTS: dict[str, Callable[[], Ewma | Trend]] = {"ewma": Ewma, "trend": Trend}


@dataclass
class Autoscaler:
    """Chooses the number of GPUs that the services should hold. It scales up at once, but down only after `patience`
    decisions in a row for fewer GPUs, and then to the largest of these numbers; a reduction by less than `margin` of
    the GPUs is ignored.
    """

    least: int = 1
    most: int = 1_000_000
    patience: int = 3
    margin: float = 0.0
    wishes: list[int] = field(default_factory=list)

    def decide(self, held: int, needed: Callable[[], int | None]) -> int:
        """Return the number of GPUs that the services should hold next. `needed`: returns the smallest number of GPUs
        for the predicted rate; None if even the largest number does not suffice.
        """
        wish = needed()
        want = self.most if wish is None else min(self.most, max(self.least, wish))
        if want >= held or held - want < self.margin * held:
            self.wishes.clear()
            return max(held, want)
        self.wishes.append(want)
        if len(self.wishes) < self.patience:
            return held
        down = max(self.wishes[-self.patience :])
        self.wishes.clear()
        return down
