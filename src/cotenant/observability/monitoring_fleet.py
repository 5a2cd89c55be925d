"""Panels and alerts of fleets, for monitoring.py."""

from __future__ import annotations

from cotenant.observability import metrics as names
from cotenant.observability.panels import Alert, Panel, quantile, rate


def panels() -> list[Panel]:
    """Graphs of jobs and nodes of fleets."""
    n = names
    return [
        Panel("Jobs by state", "short", ((f"sum by (state) ({n.FLEET_JOBS.name})", "{{state}}"),)),
        Panel(
            "Jobs that ended, per second",
            "ops",
            ((rate(n.FLEET_ENDED, "state"), "{{state}}"),),
        ),
        Panel(
            "GPUs held of those there are",
            "percentunit",
            ((f"{n.FLEET_HELD.name} / {n.FLEET_GPUS.name}", "{{node}}"),),
        ),
        Panel(
            "Longest wait",
            "s",
            ((n.FLEET_LONGEST_WAIT.name, "without GPUs"),),
            "Of the jobs that have no GPUs now, the one that has waited longest.",
        ),
        Panel(
            "Wait until the first start",
            "s",
            (
                (quantile(0.5, n.FLEET_WAIT, "instance", "1h"), "p50 {{instance}}"),
                (quantile(0.9, n.FLEET_WAIT, "instance", "1h"), "p90 {{instance}}"),
            ),
            "Of the jobs that first ran within the last hour.",
        ),
        Panel(
            "Time of decisions",
            "s",
            (
                (quantile(0.5, n.FLEET_DECISION, "instance"), "p50 {{instance}}"),
                (quantile(0.99, n.FLEET_DECISION, "instance"), "p99 {{instance}}"),
            ),
        ),
        Panel("Controller's memory at its peak", "bytes", ((n.FLEET_MEMORY.name, "peak"),)),
    ]


def alerts() -> list[Alert]:
    """Rules of fleets, worst first."""
    n = names
    return [
        Alert(
            "CotenantNodeLost",
            f"{n.FLEET_REACHABLE.name} == 0",
            "2m",
            "critical",
            "Node {{ $labels.node }} does not answer the fleet's controller; its jobs are started elsewhere.",
        ),
        Alert(
            "CotenantFleetStalled",
            f'(sum({n.FLEET_JOBS.name}{{state="waiting"}}) > 0) and (sum(increase({n.FLEET_ROUNDS.name}[15m])) == 0)',
            "5m",
            "critical",
            "Jobs wait, and the fleet's policy has decided nothing for a quarter of an hour.",
        ),
        Alert(
            "CotenantFleetFault",
            f"{n.FLEET_FAULTS.name} > 0",
            "2m",
            "warning",
            "Something of the fleet is wrong (store, policy or nodes): cotenant fleet status says what.",
        ),
        Alert(
            "CotenantJobsFail",
            f'sum(increase({n.FLEET_ENDED.name}{{state="failed"}}[30m])) > 5',
            "0m",
            "warning",
            "More than five jobs of the fleet failed for good within half an hour.",
        ),
    ]
