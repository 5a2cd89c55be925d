"""The dashboard and the rules refer only to metrics that exist, and Prometheus's own tool accepts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cotenant.observability.metrics import Metric, every

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
RULES = DEPLOY / "alerts.yaml"


def series() -> dict[str, Metric]:
    """Names that can be asked for: a histogram is three."""
    found = {}
    for metric in every():
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.name + end: metric for end in ends}
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "dashboard.json").read_text())
    return found


def expressions() -> list[str]:
    targets = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    return targets + [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_metric_that_is_asked_for_exists() -> None:
    known = series()
    asked = {name for expr in expressions() for name in re.findall(r"\bcotenant_[a-z0-9_]+", expr)}
    assert asked
    assert asked <= known.keys()


def test_every_alert_is_explained() -> None:
    page = (DEPLOY.parents[1] / "docs" / "howto" / "monitoring.md").read_text()
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    assert set(re.findall(r"`(Cotenant\w+)`", page)) == alerts


def test_counters_are_asked_for_as_rates_and_gauges_are_not() -> None:
    for expr in expressions():
        for function, name in re.findall(r"\b(rate|increase)\((cotenant_[a-z0-9_]+)(?:\{[^}]*\})?\[", expr):
            assert series()[name].kind in ("counter", "histogram"), (function, name)
        bare = re.sub(r"(rate|increase)\(cotenant_[a-z0-9_]+(\{[^}]*\})?\[", "", expr)
        for name in re.findall(r"\bcotenant_[a-z0-9_]+", bare):
            assert series()[name].kind == "gauge", name


def test_labels_exist() -> None:
    for expr in expressions():
        labels = {label for metric in series().values() if metric.name in expr for label in metric.labels} | {
            "le",
            "instance",
        }
        for group in re.findall(r"(?:by|on) \(([a-z, ]*)\)", expr):
            assert {label.strip() for label in group.split(",")} <= labels, expr


def test_labels_of_selectors_legends_and_messages_exist() -> None:
    """Each is a label of the series that its expression asks for, and left by the expression's aggregation."""
    texts = [
        (target["expr"], target.get("legendFormat", ""))
        for panel in dashboard()["panels"] for target in panel.get("targets", [])
    ]  # fmt: skip
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        texts += [(rule["expr"], " ".join(rule.get("annotations", {}).values())) for rule in group["rules"]]
    for expr, text in texts:
        names = re.findall(r"\bcotenant_[a-z0-9_]+", expr)
        for name, selector in re.findall(r"\b(cotenant_[a-z0-9_]+)\{([^}]*)\}", expr):
            asked = set(re.findall(r"([a-z_]+)\s*(?:=|!=|=~|!~)", selector))
            assert asked <= {*series()[name].labels, "instance"}, expr
        kept = {x.strip() for group in re.findall(r"by \(([a-z_, ]*)\)", expr) for x in group.split(",")}
        left = kept or {label for name in names for label in series()[name].labels} | {"instance"}
        shown = re.findall(r"\{\{ *(?:\$labels\.)?([a-z_]+) *\}\}", text)
        assert set(shown) <= left, (expr, text)


@pytest.mark.parametrize("part", ["tenant", "gpu", "server", "model", "fleet"])
def test_each_part_of_the_system_has_panels(part: str) -> None:
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    assert any(f"cotenant_{part}_" in expr for expr in asked)


def test_the_dashboard_is_one_grid() -> None:
    taken: set[tuple[int, int]] = set()
    model = dashboard()
    for panel in model["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in model["panels"]]
    assert len(ids) == len(set(ids))
    (source,) = model["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    asked = {panel["datasource"]["uid"] for panel in model["panels"] if panel["type"] != "row"}
    assert asked == {f"${{{source['name']}}}"}, "every panel asks the source that the page's variable names"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_tenants_of_one_name_on_two_nodes_are_told_apart(tmp_path: Path) -> None:
    """Tenant `a` was promised 50 % on both nodes and wants all it can get: on node 1 it gets 20 %, on node 2 50 %.

    By Prometheus's own engine: one alert, for node 1, and the differences on the panel are -0.3 and 0.
    """
    labels = [f'instance="node{n}",tenant="a"' for n in (1, 2)]
    series_ = []
    for each, got, short in zip(labels, ("0.2", "0.5"), ("0+60x20", "0x20"), strict=True):
        series_ += [
            {"series": f"cotenant_tenant_request_ratio{{{each}}}", "values": "0.5x20"},
            {"series": f'cotenant_tenant_share_ratio{{{each},gpu="g"}}', "values": f"{got}x20"},
            {"series": f'cotenant_tenant_share_short_seconds{{{each},gpu="g"}}', "values": short},
            {"series": f"cotenant_agent_start_time_seconds{{{each[:17]}}}", "values": "1x20"},
        ]
    panel = next(p for p in dashboard()["panels"] if p["title"] == "Got against granted")
    fired = {"severity": "warning", "instance": "node1", "tenant": "a", "gpu": "g"}
    summary = "a has had less than its request for 5 minutes while it wanted the GPU: see cotenant ps."
    test = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": series_,
                "alert_rule_test": [
                    {
                        "eval_time": "15m",
                        "alertname": "CotenantShareNotKept",
                        "exp_alerts": [{"exp_labels": fired, "exp_annotations": {"summary": summary}}],
                    }
                ],
                "promql_expr_test": [
                    {
                        "expr": panel["targets"][0]["expr"],
                        "eval_time": "15m",
                        "exp_samples": [
                            {"labels": '{instance="node1",tenant="a",gpu="g"}', "value": -0.3},
                            {"labels": '{instance="node2",tenant="a",gpu="g"}', "value": 0},
                        ],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
