"""The input and output of an elastic policy. There are J unfinished jobs of K kinds, C configurations (GPU model and
number of GPUs) and G GPU models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True)
class Configurations:
    """The possible configurations: `gpu[C]`, the index of a GPU model, and `count[C]`, a number of GPUs. Of each model
    there are `capacity[G]` GPUs, at a price of `price[G]` per hour.
    """

    gpu: Ints
    count: Ints
    capacity: Ints
    price: Floats


@dataclass(frozen=True)
class View:
    """The unfinished jobs at one moment, ordered by arrival.

    `rate[J, C]`: work per second, 0 if the job cannot run in that configuration; `wants[J]`: number of GPUs that the
    user requested; `held[J]`: present configuration, NONE if the job waits; `most[J]`: largest number of GPUs that the
    job ever had; `left[J]`: remaining work; `age_s[J]`: time since its arrival; `restarts[J]`: number of restarts;
    `restart_s[J]`: duration of a restart; `received_s[J, G]`: seconds that it ran on each GPU model; `priority[J]`:
    larger is more important; `kind[J]`: jobs of one kind have equal rates and wants; `job[J]`: number of the job, the
    same in every view; `host[J]`: row of the job to whose GPU this job was added as the second one, NONE if it was
    added to none; `beside[K, K, G]`: the fraction of its speed that a job of the first kind keeps on a GPU with a job
    of the second kind, 0 if not measured.
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
    """A decision of an elastic policy. `config[J]`: the configuration of each job from now on, NONE if it waits;
    `host[J]`: the job whose GPU it shares as the second one, NONE if it has its own. If `host` is None, no job shares a
    GPU.
    """

    config: Ints
    host: Ints | None = None


@dataclass(kw_only=True)
class ElasticPolicy(ABC):
    """Base of elastic policies. A policy is pure: the same view gives the same decision. A policy may cache solutions.
    `solves`: number of programs that it has solved.
    """

    solves: int = 0

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """Decide which jobs run in which configuration until the next round."""

    def summary(self) -> dict[str, Any]:
        """Return statistics of the policy's solver; empty if it has none."""
        return {"solves": self.solves, "reused": 0, "timed_out": 0, "worst_gap": 0.0}


def rigid(view: View) -> Ints:
    """Return `config[J, G]`: for each job and GPU model the configuration with exactly the number of GPUs that the job
    requests; NONE if it cannot run on that model.
    """
    found = np.full((len(view), len(view.options.capacity)), NONE)
    for c in range(len(view.options.gpu)):
        rows = (view.wants == view.options.count[c]) & (view.rate[:, c] > 0)
        found[rows, view.options.gpu[c]] = c
    return found
