"""`cotenant metrics`: the list of live metrics."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def metrics(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """List every live metric with its type, labels and meaning."""
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
