"""A Grafana dashboard and Prometheus alert rules over the live metrics.

Expressions name metrics by their objects, so that none can refer to one that does not exist. Two metrics are joined by
`instance` too (Prometheus gives it to every target): tenants, services and nodes of one name may exist on several.
"""

from __future__ import annotations

from typing import Any

from cotenant.observability import metrics as names
from cotenant.observability import monitoring_fleet, monitoring_server
from cotenant.observability.panels import Alert, Panel, quantile, rate


def rows() -> list[tuple[str, list[Panel]]]:
    """The dashboard: titled rows of panels."""
    n = names
    return [
        (
            "GPUs",
            [
                Panel(
                    "GPU time by tenant",
                    "percentunit",
                    ((f"sum by (tenant) ({n.TENANT_SHARE.name})", "{{tenant}}"),),
                    "GPU time each tenant got over the agent's window; 1 is one whole GPU.",
                ),
                Panel(
                    "Got against granted",
                    "percentunit",
                    ((_got_beyond(), "{{instance}} {{tenant}}"),),
                    "Below zero while a tenant wants the GPU: it does not get what it was promised.",
                ),
                Panel(
                    "Memory by tenant",
                    "bytes",
                    ((f"sum by (tenant) ({n.TENANT_MEMORY.name})", "{{tenant}}"),),
                ),
                Panel(
                    "Promised and charged",
                    "percentunit",
                    (
                        (n.GPU_PROMISED.name, "time promised {{gpu}}"),
                        (f"{n.GPU_CHARGED.name} / {n.GPU_MEMORY.name}", "memory charged {{gpu}}"),
                    ),
                ),
            ],
        ),
        (
            "Turns",
            [
                Panel(
                    "Wait for a turn, p50 and p99",
                    "s",
                    (
                        (quantile(0.5, n.TURN_WAIT, "gpu"), "p50 {{gpu}}"),
                        (quantile(0.99, n.TURN_WAIT, "gpu"), "p99 {{gpu}}"),
                    ),
                ),
                Panel("Length of turns, p50", "s", ((quantile(0.5, n.TURN_SECONDS, "gpu"), "{{gpu}}"),)),
                Panel(
                    "Time beyond the end of turns", "percentunit", ((rate(n.TENANT_OVERRUN, "tenant"), "{{tenant}}"),)
                ),
                Panel("Launches", "ops", ((rate(n.TENANT_LAUNCHES, "tenant"), "{{tenant}}"),)),
                Panel("Launches wait", "percentunit", ((rate(n.TENANT_LAUNCH_WAIT, "tenant"), "{{tenant}}"),)),
            ],
        ),
        ("Services", monitoring_server.panels()),
        ("Fleet", monitoring_fleet.panels()),
    ]


def _got_beyond() -> str:
    """Share that tenants got on each GPU, less what they were promised there."""
    return f"{names.TENANT_SHARE.name} - on (instance, tenant) group_left () {names.TENANT_REQUEST.name}"


def alerts() -> list[Alert]:
    """The rules, worst first."""
    n = names
    return [
        Alert(
            "CotenantAgentDown",
            f"absent({n.AGENT_START.name})",
            "2m",
            "critical",
            "No agent is scraped: shares are not enforced by a running agent.",
        ),
        Alert(
            "CotenantShareNotKept",
            f"({n.TENANT_SHARE.name} < on (instance, tenant) group_left () ({n.TENANT_REQUEST.name} - 0.05))"
            f" and on (instance, tenant, gpu) (rate({n.TENANT_WAIT.name}[5m]) > 0.5)",
            "5m",
            "warning",
            "{{ $labels.tenant }} waits more than half of the time and gets 5 points less than it was promised.",
        ),
        Alert(
            "CotenantTurnsOverrun",
            f"sum by (tenant) (rate({n.TENANT_OVERRUN.name}[5m])) > 0.05",
            "5m",
            "warning",
            "{{ $labels.tenant }} runs on after its turns for more than 5 % of the time: its kernels outlast turns.",
        ),
        Alert(
            "CotenantMemoryNearlyFull",
            f"{n.GPU_CHARGED.name} / {n.GPU_MEMORY.name} > 0.97",
            "5m",
            "warning",
            "Nearly all memory of GPU {{ $labels.gpu }} is charged.",
        ),
        Alert(
            "CotenantConfigurationFault",
            f"{n.AGENT_CONFIG_FAULT.name} == 1",
            "1m",
            "warning",
            "The agent's configuration file cannot be used; the last good one holds.",
        ),
        Alert(
            "CotenantTenantWarned",
            f"increase({n.TENANT_WARNINGS.name}[10m]) > 0",
            "0m",
            "info",
            "The agent warned about {{ $labels.tenant }}: see cotenant top.",
        ),
        *monitoring_server.alerts(),
        *monitoring_fleet.alerts(),
    ]


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model (schema 39), to import as a file; it asks for the Prometheus source on import."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in rows():
        panels.append({"type": "row", "title": title, "collapsed": False, "id": len(panels) + 1,
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})  # fmt: skip
        y += 1
        for index, panel in enumerate(row):
            place = {"h": 8, "w": 12, "x": 12 * (index % 2), "y": y + 8 * (index // 2)}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += 8 * ((len(row) + 1) // 2)
    return {
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "title": "Cotenant",
        "uid": "cotenant",
        "tags": ["gpu", "cotenant"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": panels,
        "templating": {"list": []},
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    targets = [
        {"refId": chr(65 + index), "expr": expr, "legendFormat": legend, "datasource": source}
        for index, (expr, legend) in enumerate(panel.lines)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": source,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def rules() -> dict[str, Any]:
    """Prometheus's rule file, as data for YAML."""
    return {
        "groups": [
            {
                "name": "cotenant",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.hold,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary},
                    }
                    for alert in alerts()
                ],
            }
        ]
    }
