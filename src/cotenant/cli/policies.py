"""`cotenant policies`: list every policy with a description."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


def policy_lists() -> dict[str, dict[str, str]]:
    """Return kind of policy -> name -> description, from the registries that the code uses."""
    from cotenant.policy.colocation import SCHEMES
    from cotenant.policy.elastic.registry import ELASTIC
    from cotenant.policy.jobs.allotment import ALLOTMENTS
    from cotenant.policy.jobs.ordering import ORDERINGS
    from cotenant.policy.jobs.placement import PLACEMENTS
    from cotenant.policy.mig.decide import POLICIES
    from cotenant.policy.serving.packing.specs import PLANNERS
    from cotenant.policy.shares import DISCIPLINES

    return {
        "ordering": {name: ordering.summary for name, ordering in ORDERINGS.items()},
        "allotment": {name: entry[1] for name, entry in ALLOTMENTS.items()},
        "placement": {name: entry[1] for name, entry in PLACEMENTS.items()},
        "policy": {**POLICIES, **{name: entry.summary for name, entry in ELASTIC.items()}},
        "planner": {name: planner.help for name, planner in PLANNERS.items()},
        "discipline": {entry.name: entry.summary for entry in DISCIPLINES},
        "colocation": {scheme.name: scheme.summary for scheme in SCHEMES},
    }


@app.command()
def policies(json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List every policy with a description."""
    lists = policy_lists()
    if json_:
        import orjson

        sys.stdout.write(orjson.dumps(lists).decode() + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for kind, entries in lists.items():
        table = Table(title=f"--{kind}", title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, summary in entries.items():
            table.add_row(name, summary)
        console.print(table)
        console.print()
