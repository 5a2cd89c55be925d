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
    """Options of commands that read a job trace. The defaults change nothing. Texts are as the user wrote them.

    Filters apply in this order: window, tenants, GPU counts, durations, max_jobs. Then arrivals are replaced by random
    ones (`arrivals`) or scaled (`rate_scale`), and durations, GPU counts and models are replaced if options ask for it.
    """

    from_s: float = 0.0  #: keep arrivals at or after this, seconds from the start of the trace, which becomes 0
    to_s: float = math.inf  #: keep arrivals before this
    tenants: tuple[str, ...] = ()  #: keep only these; empty: all
    max_jobs: int | None = None  #: keep the first so many
    gpu_counts: str = "all"  #: one of GPU_COUNTS; as-single gives every job one GPU
    only_gpus: tuple[int, ...] = ()  #: keep only jobs of these GPU counts; empty: all
    min_duration_s: float = 0.0
    max_duration_s: float = math.inf
    rate_scale: float = 1.0  #: 2 makes jobs arrive twice as fast
    arrivals: str = ""  #: as draws.parse_arrivals reads it; empty: as in the trace
    rate_per_s: float | None = None  #: for drawn arrivals; None: the trace's own mean rate
    durations: str = ""  #: two-part | two-part-short | lognormal:MEDIAN:SIGMA | trace:F; empty: as in the trace
    gpu_mix: str = ""  #: such as 1:70,2:10,4:15,8:5; empty: as in the trace
    split: str = ""  #: image,language,speech shares; given, it replaces the trace's models; empty: fills absent ones
    split_mode: str = "overall"  #: one of SPLIT_MODES
    seed: int = DEFAULT_SEED  #: of every drawn part
    time_unit: str = ""  #: of a format that states none (chronus): s | min | h; empty: the format's default
    attempts: str = "sum"  #: philly-json: a job's duration from its attempts, one of ATTEMPTS
