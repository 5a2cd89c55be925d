"""Panels and alerts of servers, for monitoring.py."""

from __future__ import annotations

from cotenant.observability import metrics as names
from cotenant.observability.panels import Alert, Panel, quantile, rate


def panels() -> list[Panel]:
    """Graphs of services and GPUs of servers."""
    n = names
    lost = f'{n.SERVER_REQUESTS.name}{{outcome!~"ok|late"}}[$__rate_interval]'
    in_time = f'sum by (service) (rate({n.SERVER_REQUESTS.name}{{outcome="ok"}}[$__rate_interval]))'
    p99 = quantile(0.99, n.SERVER_SECONDS, "instance, service")
    return [
        Panel(
            "Requests by service",
            "reqps",
            ((rate(n.SERVER_RECEIVED, "service"), "{{service}}"),),
        ),
        Panel(
            "In time",
            "percentunit",
            ((f"{in_time} / {rate(n.SERVER_REQUESTS, 'service')}", "{{service}}"),),
            "Answers within the SLO of all requests that ended; drops and failures count against it.",
        ),
        Panel(
            "p99 of answers over the SLO",
            "percentunit",
            ((f"{p99} / on (instance, service) {n.SERVER_SLO.name}", "{{instance}} {{service}}"),),
        ),
        Panel(
            "Dropped, refused, failed",
            "reqps",
            ((f"sum by (service, outcome) (rate({lost}))", "{{service}} {{outcome}}"),),
        ),
        Panel(
            "Asked of what the plan can take",
            "percentunit",
            ((f"{n.SERVER_RATE.name} / {n.SERVER_CAPACITY.name}", "{{service}}"),),
        ),
        Panel("Gpulets at work", "percentunit", ((rate(n.SERVER_BUSY, "gpu, gpulet"), "{{gpu}} {{gpulet}}"),)),
        Panel(
            "GPUs",
            "short",
            ((n.SERVER_GPUS_USED.name, "in use"), (n.SERVER_GPUS_HELD.name, "held")),
        ),
        Panel("Queues", "short", ((n.SERVER_WAITING.name, "{{service}}"),)),
    ]


def alerts() -> list[Alert]:
    """Rules of servers, worst first."""
    n = names
    return [
        Alert(
            "CotenantServiceNotReady",
            f"{n.SERVER_READY.name} == 0",
            "2m",
            "critical",
            "{{ $labels.service }} cannot answer: see cotenant top --url.",
        ),
        Alert(
            "CotenantServiceLate",
            f'sum by (service) (rate({n.SERVER_REQUESTS.name}{{outcome="ok"}}[5m]))'
            f" / sum by (service) (rate({n.SERVER_REQUESTS.name}[5m])) < 0.99",
            "5m",
            "warning",
            "Less than 99 % of the requests to {{ $labels.service }} were answered within its SLO.",
        ),
        Alert(
            "CotenantWorkersDie",
            f"increase({n.SERVER_DEATHS.name}[10m]) > 2",
            "0m",
            "warning",
            "Workers of a server ended unasked more than twice in ten minutes.",
        ),
    ]
