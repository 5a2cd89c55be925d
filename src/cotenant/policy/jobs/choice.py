"""A job policy as named by a user: ordering + allotment + placement, and their options."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cotenant.core.errors import InputError
from cotenant.policy.jobs.allotment import ALLOTMENTS
from cotenant.policy.jobs.ordering import ORDERINGS, Context, gittins_table
from cotenant.policy.jobs.placement import PLACEMENTS
from cotenant.policy.jobs.rounds import Choice

# GPU-seconds at which a job drops to the next queue: Tiresias (NSDI'19) uses two queues split at one GPU-hour for
# its testbed; three queues, an hour and ten hours apart, suit traces with jobs of days
DEFAULT_QUEUES_GPU_S = (3600.0, 36000.0)


@dataclass(frozen=True)
class JobPolicy:
    """Ordering + allotment + placement by name (see `cotenant policies`); InputError names the known ones."""

    ordering: str = "fifo"
    allotment: str = "tune"
    placement: str = "first-fit"
    sticky: bool = False  #: running jobs that continue keep their GPUs
    reserve_after_s: float = math.inf  #: a job that waited longer goes first, and runs to its end
    solver_limit_s: float = 1.0  #: per decision of allotment optimal
    queue_limits_gpu_s: tuple[float, ...] = DEFAULT_QUEUES_GPU_S
    gittins_sample_gpu_s: tuple[float, ...] = field(default=(), repr=False)  #: empty: the trace's own jobs

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("ordering", self.ordering, ORDERINGS),
            ("allotment", self.allotment, ALLOTMENTS),
            ("placement", self.placement, PLACEMENTS),
        ):
            if name not in known:
                raise InputError(f"unknown {kind} {name!r}; known: {', '.join(known)}", field=kind)
        if list(self.queue_limits_gpu_s) != sorted(set(self.queue_limits_gpu_s)):
            raise InputError("queue limits must increase", field="queues")

    def label(self) -> str:
        """Short name for tables: fifo + tune, with the placement unless it is first-fit."""
        extra = "" if self.placement == "first-fit" else f" + {self.placement}"
        return f"{self.ordering} + {self.allotment}{extra}{' (sticky)' if self.sticky else ''}"

    def choice(self) -> Choice:
        """The codes of the policy for compiled functions."""
        return Choice(
            ORDERINGS[self.ordering].code,
            ALLOTMENTS[self.allotment][0],
            PLACEMENTS[self.placement][0],
            self.sticky,
            self.allotment == "optimal",
        )

    def context(self, gpu_seconds: NDArray[np.float64], cluster_gpus: float) -> Context:
        """Data for ordering keys. `gpu_seconds[J]`: GPU time of each job, the sample for the Gittins index."""
        attained, index = np.zeros(1), np.zeros(1)
        if self.ordering == "gittins":
            sample = np.array(self.gittins_sample_gpu_s) if self.gittins_sample_gpu_s else gpu_seconds
            attained, index = gittins_table(sample)
        return Context(
            queue_limits_gpu_s=np.array(self.queue_limits_gpu_s),
            gittins_gpu_s=attained,
            gittins_index=index,
            cluster_gpus=cluster_gpus,
            reserve_after_s=float(self.reserve_after_s),
        )
