"""A GPU that the steps of several models share: the speed of each step, and the time at which the next step ends.
Between two events speeds are constant, so times are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotenant.core.errors import InputError

SHARING = ("conserving", "fixed")


@dataclass
class Running:
    """A model's step that runs on the GPU. `left_s`: the seconds that the rest of it would take on the whole GPU."""

    left_s: float
    weight: float
    best_effort: bool
    rate: float = 0.0


class SharedGpu:
    """The steps (iterations of models' batches) that run on a GPU. `conserving`: concurrent steps divide the GPU's
    speed in proportion to their weights, and best-effort steps run only while no latency-sensitive step does. `fixed`:
    a step's weight is its fraction of full speed, whatever else runs, as on a fixed fraction of the SMs.
    """

    def __init__(self, sharing: str = "conserving") -> None:
        if sharing not in SHARING:
            raise InputError(f"{sharing!r} is not {' or '.join(SHARING)}", field="sharing")
        self._fixed = sharing == "fixed"
        self.running: dict[int, Running] = {}
        self._at_s = 0.0
        self.busy_s = 0.0
        self.version = 0  # changes whenever a step's predicted end is no longer valid

    def begin(self, key: int, seconds: float, weight: float, best_effort: bool, now_s: float) -> None:
        """Begin a step that takes this many seconds on the whole GPU."""
        self._advance(now_s)
        self.running[key] = Running(seconds, weight, best_effort)
        self._share()

    def end(self, key: int, now_s: float) -> None:
        """Remove the step with this key, which has ended, from the GPU."""
        self._advance(now_s)
        del self.running[key]
        self._share()

    def next_end(self) -> tuple[float, int]:
        """Return (time, key) of the next end of a step; infinity and -1 if none runs."""
        at_s, key = math.inf, -1
        for k, step in self.running.items():
            if step.rate > 0.0 and self._at_s + step.left_s / step.rate < at_s:
                at_s, key = self._at_s + step.left_s / step.rate, k
        return at_s, key

    def _advance(self, now_s: float) -> None:
        passed = now_s - self._at_s
        if self.running and passed > 0:
            self.busy_s += passed
            for step in self.running.values():
                step.left_s = max(0.0, step.left_s - passed * step.rate)
        self._at_s = now_s

    def _share(self) -> None:
        self.version += 1
        steps = self.running.values()
        if self._fixed:
            for step in steps:
                step.rate = step.weight
            return
        first = any(not step.best_effort for step in steps)
        total = sum(step.weight for step in steps if not (first and step.best_effort))
        for step in steps:
            step.rate = 0.0 if first and step.best_effort else step.weight / total
