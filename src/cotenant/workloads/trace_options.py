"""Options of all commands that read a job trace: windows, filters, scaling, and columns replaced by random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

GPU_COUNTS = ("all", "single", "multi", "as-single")
ATTEMPTS = ("sum", "last", "longest")
SPLIT_MODES = ("overall", "random")
DEFAULT_SPLIT = "20,70,10"
DEFAULT_SEED = 1


@dataclass(frozen=True)
class TraceOptions:
    """Options of commands that read a job trace. The defaults change nothing. Options that are
    strings are stored as the user wrote them, unparsed.

    Filters apply in this order: window, tenants, GPU counts, durations, max_jobs. Then arrivals are replaced by random
    ones (`arrivals`) or scaled (`rate_scale`), and durations, GPU counts and models are replaced if options ask for it.
    """

    from_s: float = 0.0  #: keep jobs that arrive at or after this time (s), which becomes 0
    to_s: float = math.inf  #: keep jobs that arrive before this time (s)
    tenants: tuple[str, ...] = ()  #: keep only jobs of these tenants; empty: all
    max_jobs: int | None = None  #: keep only this many jobs, the first ones
    gpu_counts: str = "all"  #: one of GPU_COUNTS; as-single gives every job one GPU
    only_gpus: tuple[int, ...] = ()  #: keep only jobs of these GPU counts; empty: all
    min_duration_s: float = 0.0
    max_duration_s: float = math.inf
    rate_scale: float = 1.0  #: factor on the rate of arrivals: 2 makes jobs arrive twice as fast
    arrivals: str = ""  #: an arrival process, which draws.parse_arrivals reads; empty: the trace's arrivals
    rate_per_s: float | None = None  #: rate of drawn arrivals; None: the trace's own mean rate
    #: how durations are drawn: two-part | two-part-short | lognormal:MEDIAN:SIGMA | trace:F; empty: the trace's
    #: durations
    durations: str = ""
    gpu_mix: str = ""  #: GPU counts with weights, such as 1:70,2:10,4:15,8:5; empty: the trace's counts
    #: shares of image, language and speech models, by which all jobs get new models; empty: only jobs without a model
    #: get one, by the shares DEFAULT_SPLIT
    split: str = ""
    split_mode: str = "overall"  #: one of SPLIT_MODES
    seed: int = DEFAULT_SEED  #: seed of every part of the trace that is drawn at random
    time_unit: str = ""  #: time unit of a format that states none (chronus): s | min | h; empty: the format's default
    attempts: str = "sum"  #: philly-json: how a job's duration follows from its attempts, one of ATTEMPTS
