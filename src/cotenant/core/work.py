"""Training jobs as arrays: the content of a trace, independent of its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.extras import needs

with needs("sim"):
    import numpy as np
    from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Names = NDArray[np.object_]


@dataclass
class Jobs:
    """n training jobs, ordered by arrival; jobs with equal arrival times keep their order in the file.

    All arrays have length n. NaN or "" means: not stated.
    """

    id: Names  #: str, unique
    arrival_s: Floats  #: time at which the job arrives, in seconds from the start of the trace, >= 0
    gpus: Floats  #: number of GPUs: whole numbers >= 1, or a fraction of one GPU below 1
    duration_s: Floats  #: run time alone at the GPU-proportional share, seconds
    iterations: Floats  #: amount of work in training iterations; given instead of, or in addition to, duration_s
    model: Names  #: str, the job's model, which is the name of a profile
    tenant: Names  #: str
    priority: Ints  #: a job with a larger priority runs first
    cpus: Floats  #: most CPU cores that the whole job can use; NaN: from its profile
    memory_bytes: Floats  #: most memory that the whole job can use; NaN: from its profile
    deadline_s: Floats  #: latest time at which the job should end, in seconds from the start of the trace
    gpu_models: Names  #: str, the GPU models on which the job can run, separated by "|"; "": any model

    def __len__(self) -> int:
        return len(self.id)

    @classmethod
    def build(cls, n: int, **columns: Any) -> Jobs:
        """Build jobs from the given columns of length n; the others are filled as "not stated"."""
        nan = np.full(n, np.nan)
        texts = {"id", "model", "tenant", "gpu_models"}
        filled: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            given = columns.pop(name, None)
            if name in texts:
                filled[name] = np.full(n, "", dtype=object) if given is None else np.asarray(given, dtype=object)
            elif name == "priority":
                filled[name] = np.zeros(n, dtype=np.int64) if given is None else np.asarray(given, dtype=np.int64)
            else:
                filled[name] = nan.copy() if given is None else np.asarray(given, dtype=np.float64)
            if len(filled[name]) != n:
                raise ValueError(f"column {name} has {len(filled[name])} rows, not {n}")
        if columns:
            raise ValueError(f"unknown columns {sorted(columns)}")
        return cls(**filled)

    def take(self, rows: NDArray[Any] | slice) -> Jobs:
        """Return the jobs of the given rows (indices, a mask or a slice), in that order."""
        return Jobs(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


@dataclass(repr=False)
class Trace:
    """A trace of jobs. `source`: where the jobs come from, such as a file. `seed`: the seed with which some columns of
    the jobs, such as arrivals, were drawn at random; None if none was."""

    jobs: Jobs
    source: str
    left_out: dict[str, int] = field(default_factory=dict)  #: reason -> rows
    #: remarks for the user as sentences, such as "1,203 rows were out of order and sorted"
    remarks: list[str] = field(default_factory=list)
    seed: int | None = None
    #: returns the line of the trace's file that a job comes from, given the job's id; None if that is unknown
    line_of: Callable[[str], int | None] = field(default=lambda job: None)

    def __repr__(self) -> str:
        return f"<trace of {len(self.jobs):,} jobs from {self.source or 'no file'}>"

    def wrong(self, job: str, field: str, message: str) -> InputError:
        """Return an InputError about one of the jobs, with file, line and field."""
        return InputError(message, file=self.source or None, line=self.line_of(job), field=field)

    def require_jobs(self) -> Trace:
        """Return this trace. Raises InputError if it has no jobs; the message has the reasons for which rows were left
        out."""
        if len(self.jobs) == 0:
            why = "; ".join(f"{n} {reason}" for reason, n in self.left_out.items())
            raise InputError(f"the trace has no jobs to run{f' ({why})' if why else ''}", file=self.source)
        return self
