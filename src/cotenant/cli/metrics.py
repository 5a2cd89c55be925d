"""`cotenant metrics`: what the live metrics are, and what monitors them."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Live metrics: the list, a dashboard, alert rules.")


@app.command("list")
def list_metrics(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Every live metric with its kind, its labels and what it says."""
    import json
    from dataclasses import asdict

    from cotenant.observability.metrics import every

    if as_json:
        print(json.dumps({"metrics": [asdict(metric) for metric in every()]}))
        return
    width = max(len(metric.name) for metric in every())
    for metric in every():
        labels = f" by {', '.join(metric.labels)}" if metric.labels else ""
        print(f"{metric.name:{width}}  {metric.kind:9}  {metric.help}{labels}")


@app.command()
def grafana() -> None:
    """A Grafana dashboard as JSON, to import as a file."""
    import json

    from cotenant.observability.monitoring import dashboard

    print(json.dumps(dashboard(), indent=2))


@app.command()
def alerts() -> None:
    """Alert rules for Prometheus, as a YAML rule file."""
    import yaml

    from cotenant.observability.monitoring import rules

    print(yaml.safe_dump(rules(), sort_keys=False, width=120), end="")
