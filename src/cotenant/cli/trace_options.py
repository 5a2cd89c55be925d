"""Options of every command that reads a trace or names a cluster, declared once.

    @app.command()
    @takes_trace_options
    @takes_cluster_options
    def simulate(..., trace_options: TraceOptions, cluster_options: ClusterOptions) -> None: ...

A decorated command gets the options as one object, its parameter `trace_options` or `cluster_options`. The command line
shows the options one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cotenant.cli.added_options import Command, Options, with_options
from cotenant.core.errors import InputError
from cotenant.core.units import parse_rate_per_s, parse_seconds
from cotenant.workloads.trace_options import DEFAULT_SEED, DEFAULT_SPLIT, TraceOptions

if TYPE_CHECKING:
    from cotenant.core.cluster import Cluster

TRACE_PANEL = "Trace: filters, scaling and redrawn parts"
CLUSTER_PANEL = "Cluster"
Text = str | None

TRACE_OPTIONS: Options = {
    "from_": (Text, None, "Keep arrivals from this time on, which becomes time 0: 10d, 2400h."),
    "to": (Text, None, "Keep arrivals before this time, counted from the trace's start."),
    "tenant": (list[str] | None, None, "Keep this tenant's jobs; repeatable."),
    "max_jobs": (int | None, None, "Keep only the first N jobs."),
    "gpu_counts": (str, "all", "all, single or multi (keep only those), as-single (set all to 1 GPU)."),
    "only_gpus": (Text, None, "Keep only these GPU counts: 1,2,4,8,16."),
    "min_duration": (Text, None, "Keep jobs with at least this run time."),
    "max_duration": (Text, None, "Keep jobs with at most this run time."),
    "rate_scale": (float, 1.0, "Factor on the arrival rate; 2 halves all gaps."),
    "arrivals": (
        Text,
        None,
        "Replace arrivals: poisson, static, bursty:CV, lognormal:CV, hyperexp:..., trace:FORMAT:PATH.",
    ),
    "rate": (Text, None, "Rate of replaced arrivals: 8/h (default: the trace's mean)."),
    "durations": (
        Text,
        None,
        "Replace durations: two-part, two-part-short, lognormal:MEDIAN:SIGMA, trace:FORMAT:PATH.",
    ),
    "gpu_mix": (Text, None, "Replace GPU counts, by COUNT:WEIGHT: 1:70,2:10,4:15,8:5."),
    "split": (
        Text,
        None,
        "Give every job a model by these shares of image,language,speech models (default: only jobs without a model "
        f"get one, by {DEFAULT_SPLIT}).",
    ),
    "split_mode": (str, "overall", "overall (round robin, not random) or random (by the seed)."),
    "seed": (int, DEFAULT_SEED, "Seed of all random draws."),
    "time_unit": (Text, None, "Format chronus: time unit s, min (default) or h."),
    "attempts": (str, "sum", "Format philly-json: duration is the sum, last or longest of attempts."),
}
CLUSTER_OPTIONS: Options = {
    "cluster": (Text, None, "16x8, FILE.yaml, openb:F, alibaba-spot:F, tiresias:F or synergy-ini:F."),
    "gpu": (Text, None, "GPU model (default: A100-40GB)."),
    "cpus_per_node": (float | None, None, "Cores per node (default: 3 per GPU)."),
    "memory_per_node": (Text, None, "Memory per node (default: 62.5GB per GPU)."),
    "storage_mbps": (float | None, None, "Storage read speed per node (default: 500)."),
}


@dataclass(frozen=True)
class ClusterOptions:
    """The options that describe the cluster, as given on the command line."""

    cluster: str | None = None
    gpu: str | None = None
    cpus_per_node: float | None = None
    memory_per_node: str | None = None
    storage_mbps: float | None = None

    def parse(self, remarks: list[str] | None = None, *, default: str | None = None) -> Cluster:
        """Return the cluster; `default` is used without --cluster. Remarks for the user are appended to `remarks`."""
        from cotenant.workloads.clusters.forms import parse_cluster

        spec = self.cluster or default
        if spec is None:
            raise InputError("a cluster is needed, such as --cluster 16x8", field="cluster")
        return parse_cluster(
            spec,
            gpu=self.gpu,
            cpus_per_node=self.cpus_per_node,
            memory_per_node=self.memory_per_node,
            storage_mbps=self.storage_mbps,
            remarks=remarks,
        )


def trace_options(**given: Any) -> TraceOptions:
    """TraceOptions from the values of TRACE_OPTIONS as given on the command line (texts with units)."""
    return TraceOptions(
        from_s=_seconds(given["from_"], "from", 0.0),
        to_s=_seconds(given["to"], "to", math.inf),
        tenants=tuple(given["tenant"] or ()),
        max_jobs=given["max_jobs"],
        gpu_counts=given["gpu_counts"],
        only_gpus=_whole_numbers(given["only_gpus"]) if given["only_gpus"] else (),
        min_duration_s=_seconds(given["min_duration"], "min-duration", 0.0),
        max_duration_s=_seconds(given["max_duration"], "max-duration", math.inf),
        rate_scale=given["rate_scale"],
        arrivals=given["arrivals"] or "",
        rate_per_s=parse_rate_per_s(given["rate"], field="rate") if given["rate"] else None,
        durations=given["durations"] or "",
        gpu_mix=given["gpu_mix"] or "",
        split=given["split"] or "",
        split_mode=given["split_mode"],
        seed=given["seed"],
        time_unit=given["time_unit"] or "",
        attempts=given["attempts"],
    )


def takes_trace_options(command: Command) -> Command:
    """Decorator that adds every trace option to a command, which receives them as `trace_options: TraceOptions`."""
    return with_options(command, {TRACE_PANEL: TRACE_OPTIONS}, "trace_options", trace_options)


def takes_cluster_options(command: Command) -> Command:
    """Decorator that adds every cluster option to a command, which receives them as `cluster_options:
    ClusterOptions`.
    """
    return with_options(command, {CLUSTER_PANEL: CLUSTER_OPTIONS}, "cluster_options", ClusterOptions)


def _seconds(text: str | None, field: str, default: float) -> float:
    return parse_seconds(text, field=field) if text else default


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is not a list of GPU counts like 1,2,4,8", field="only-gpus") from None
