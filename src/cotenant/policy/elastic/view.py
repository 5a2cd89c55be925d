"""Input and output of an elastic policy. J unfinished jobs, C configurations, G GPU models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True)
class Configurations:
    """The possible configurations: `gpu[C]` model (an index) and `count[C]` GPUs; of each model there are `capacity[G]`
    GPUs, at a price of `price[G]` per hour.
    """

    gpu: Ints
    count: Ints
    capacity: Ints
    price: Floats


@dataclass(frozen=True)
class View:
    """The unfinished jobs at one moment, by arrival.

    `rate[J, C]`: work per second, 0 if the job cannot run so; `wants[J]`: GPUs requested by its user; `held[J]`: its
    present configuration, NONE if waiting; `most[J]`: the most GPUs that it ever had; `left[J]`: work left; `age_s[J]`
    since its arrival; `restarts[J]`; `restart_s[J]`: cost of a restart; `received_s[J, G]`: seconds run by GPU model;
    `priority[J]`: larger is more important; `kind[J]`: jobs of one kind have equal rates and wants; `job[J]`: its
    number, the same in every view; `host[J]`: the row of the job whose GPU it shares as the second, NONE if it has its
    own; `beside[K, K, G]`: the fraction of its speed that a job of the first kind keeps on one GPU with one of the
    second, 0 if not measured.
    """

    options: Configurations
    rate: Floats
    wants: Ints
    held: Ints
    most: Ints
    left: Floats
    age_s: Floats
    restarts: Ints
    restart_s: Floats
    received_s: Floats
    priority: Ints
    kind: Ints
    job: Ints
    host: Ints
    beside: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))

    def __len__(self) -> int:
        return len(self.wants)


@dataclass(frozen=True)
class Decision:
    """`config[J]`: the configuration of each job from now on, NONE if it waits; `host[J]`: the job whose GPU it shares
    as the second, NONE if it has its own; None: no job shares.
    """

    config: Ints
    host: Ints | None = None


class ElasticPolicy(Protocol):
    """Interface of elastic policies. Pure: the same view gives the same decision. A policy may cache solutions."""

    def decide(self, view: View) -> Decision:
        """Decide which jobs run in which configuration until the next round."""
        ...

    def summary(self) -> dict[str, Any]:
        """Statistics of its solver; empty if it has none."""
        ...


def rigid(view: View) -> Ints:
    """`config[J, G]`: per job and GPU model the configuration with just the GPUs that it asked for, NONE if there is
    none on which it can run."""
    found = np.full((len(view), len(view.options.capacity)), NONE)
    for c in range(len(view.options.gpu)):
        rows = (view.wants == view.options.count[c]) & (view.rate[:, c] > 0)
        found[rows, view.options.gpu[c]] = c
    return found
