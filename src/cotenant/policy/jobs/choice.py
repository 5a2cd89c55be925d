"""A job policy as users name it: an ordering, an allotment and a placement, with their options."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cotenant.core.errors import InputError, unknown_name
from cotenant.policy.jobs.allotment import ALLOTMENTS
from cotenant.policy.jobs.ordering import ORDERINGS, Context, gittins_table
from cotenant.policy.jobs.placement import PLACEMENTS
from cotenant.policy.jobs.rounds import Choice

# A job moves to the next queue at each of these numbers of GPU-seconds. Tiresias (NSDI'19) uses two queues on its
# testbed, with the limit at one GPU-hour. Three queues, with limits at one and ten hours, suit traces with jobs of
# days.
DEFAULT_QUEUES_GPU_S = (3600.0, 36000.0)


@dataclass(frozen=True)
class JobPolicy:
    """An ordering, an allotment and a placement by name (see `cotenant policies`). The InputError for an unknown name
    lists the known ones.
    """

    ordering: str = "fifo"
    allotment: str = "tune"
    placement: str = "first-fit"
    sticky: bool = False  # whether running jobs that are chosen again keep their GPUs
    # a job that has waited for longer than this many seconds comes first, and then runs to its end
    reserve_after_s: float = math.inf
    solver_limit_s: float = 1.0  # time limit for each decision of the allotment `optimal`
    queue_limits_gpu_s: tuple[float, ...] = DEFAULT_QUEUES_GPU_S
    # sample of jobs' GPU time for the Gittins index; if it is empty, the jobs of the trace are the sample
    gittins_sample_gpu_s: tuple[float, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("ordering", self.ordering, ORDERINGS),
            ("allotment", self.allotment, ALLOTMENTS),
            ("placement", self.placement, PLACEMENTS),
        ):
            if name not in known:
                raise unknown_name(kind, name, known, kind)
        if list(self.queue_limits_gpu_s) != sorted(set(self.queue_limits_gpu_s)):
            raise InputError("queue limits must increase", field="queues")

    def label(self) -> str:
        """Return a short name for tables, such as fifo + tune; the placement is included unless it is first-fit."""
        extra = "" if self.placement == "first-fit" else f" + {self.placement}"
        return f"{self.ordering} + {self.allotment}{extra}{' (sticky)' if self.sticky else ''}"

    def choice(self) -> Choice:
        """Return the policy's numbers for ordering, allotment and placement, in the form that compiled functions take.
        """
        return Choice(
            ORDERINGS[self.ordering].code,
            ALLOTMENTS[self.allotment][0],
            PLACEMENTS[self.placement][0],
            self.sticky,
            self.allotment == "optimal",
        )

    def context(self, gpu_seconds: NDArray[np.float64], cluster_gpus: float) -> Context:
        """Return what the keys of the ordering need. `gpu_seconds[J]`: GPU time of each job, the sample for the Gittins
        index.
        """
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
