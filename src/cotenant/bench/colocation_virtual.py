"""`cotenant bench colocation --gpus virtual`: compares the co-location schemes by simulation from kernel profiles, in
virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cotenant.abi.floor import WorkClass
from cotenant.bench.be_loads import KIND, soft_kernel
from cotenant.bench.colocation import Series, said, summary
from cotenant.bench.ls_client import SOFT_KERNELS_NS, SOFT_SMS, poisson_arrivals
from cotenant.core.errors import InputError
from cotenant.core.units import number_or_nan
from cotenant.policy.colocation import Scheme, settings_for
from cotenant.profiles.kernels.contention import read_table
from cotenant.profiles.kernels.profile import KernelWork, read_kernels
from cotenant.sim.colocation import ColocationEngine, Job, alone

ORION_SMS = 80  # number of SMs of a V100, on which Orion's profiles were measured
CLASSES = {"compute": WorkClass.COMPUTE, "memory": WorkClass.MEMORY, "mixed": WorkClass.UNKNOWN}


def ls_work(text: str) -> tuple[list[KernelWork], float]:
    """Return the kernels of a latency-sensitive request and the rate of requests, from `resnet50:BATCH:RATE` or
    `profile:FILE:RATE`.
    """
    from cotenant.bench.colocation import parse_ls

    if not text.startswith("profile:"):
        kernels = [KernelWork("service", ns, SOFT_SMS, WorkClass.UNKNOWN) for ns in SOFT_KERNELS_NS]
        return kernels, parse_ls(text).rate_rps
    path, _, rate = text.removeprefix("profile:").rpartition(":")
    rate_rps = number_or_nan(rate)
    if not 0.01 <= rate_rps <= 1e5:
        raise InputError(f"{rate!r} is not a rate of 0.01 to 100,000 requests a second", field="--ls")
    return read_kernels(Path(path)), rate_rps


def be_work(text: str, sm_count: int) -> list[KernelWork]:
    """Return the kernels that a best-effort (BE) program repeats: those of a load named as in `cotenant bench
    colocation`, or of `profile:FILE`.
    """
    if text.startswith("profile:"):
        return read_kernels(Path(text.removeprefix("profile:")))
    if not KIND.match(text):
        raise InputError(f"unknown best-effort load {text!r}; write mmN, addN, copyN or profile:FILE", field="--be")
    length_ns, work = soft_kernel(text)
    if text.startswith("train-"):
        return [KernelWork(text, length_ns, sm_count, CLASSES[kind]) for kind in ("compute", "memory")]
    return [KernelWork(text, length_ns, 8 * sm_count, CLASSES[work])]


def measure(
    ls: str,
    loads: list[str],
    schemes: list[Scheme],
    seconds: float,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Simulate each co-location scheme with each best-effort (BE) load, always with the same arrivals of requests.

    Returns {scheme: {load: figures}}. The figures have the same names and meanings as those that `cotenant bench
    colocation` measures on a GPU, but come from the simulation. `changes` override settings of all schemes.
    """
    own = {scheme.name: settings_for(scheme.name, **(changes or {})) for scheme in schemes}
    kernels, rate_rps = ls_work(ls)
    sm_count = ORION_SMS if ls.startswith("profile:") and not ls.split(":")[1].endswith(".json") else 0
    sm_count = sm_count or read_table().sm_count
    end_ns = round(seconds * 1e9)
    arrivals = [round(at * 1e9) for at in poisson_arrivals(seconds, rate_rps, seed)]
    if not arrivals:
        raise InputError("no request arrives in that time: give more seconds or a higher rate", field="--seconds")
    rows: dict[str, Any] = {scheme.name: {} for scheme in schemes}
    for name in loads:
        job = Job(kernels, be_work(name, sm_count), arrivals, end_ns, sm_count)
        base = alone(job, schemes[0], settings_for(schemes[0].name))
        for scheme in schemes:
            found = ColocationEngine(job, scheme, own[scheme.name]).run()
            series = Series(
                [ns / 1e6 for ns in base.latency_ns],
                [ns / 1e6 for ns in found.latency_ns],
                [base.active_ns / end_ns],
                [1.0],
                [found.be_work_ns / end_ns],
                sum(k.duration_ns for k in job.be) / len(job.be) / 1e6,
                # the requests of blocks in which the host never paused: all, since the simulated host never pauses
                [(0, len(arrivals))],
            )
            row = rows[scheme.name][name] = summary(series)
            progress(said(scheme.name, name, row))
    return rows
