"""`cotenant fleet`: start, stop and inspect this user's training runtime."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli import fleet_replay
from cotenant.cli.shared_options import LogFormat, LogLevel
from cotenant.core.folders import fleet_folder
from cotenant.core.units import counted, parse_seconds

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Run training jobs under a policy: up, down, status."
)
Text = str | None
NODES, POLICY, TIME = "Nodes", "Policy (see cotenant policies)", "Rounds and leases"

Where = Annotated[
    Path | None, typer.Option("--fleet", metavar="DIR", help="Folder of the fleet (default: $COTENANT_FLEET).")
]
_node, _policy, _time = (partial(typer.Option, rich_help_panel=panel) for panel in (NODES, POLICY, TIME))


@app.command()
def up(
    address: Annotated[
        Text, _node("--address", metavar="RAY", help="Existing Ray cluster to join; auto finds one.")
    ] = None,
    executor: Annotated[
        str, _node("--executor", metavar="auto|ray|local", help="auto: Ray if it is installed, else local processes.")
    ] = "auto",
    nodes: Annotated[
        int | None, _node("--nodes", help="Number of pretended nodes on this machine; their GPUs are only counted.")
    ] = None,
    gpus_per_node: Annotated[int, _node("--gpus-per-node", help="GPUs of a pretended node.")] = 2,
    cpus_per_node: Annotated[
        float | None, _node("--cpus-per-node", help="Cores of a pretended node (default: 3 per GPU).")
    ] = None,
    memory_per_node: Annotated[
        Text, _node("--memory-per-node", help="Memory of a pretended node (default: 62.5 GB per GPU).")
    ] = None,
    gpu: Annotated[str, _node("--gpu", help="GPU model of pretended nodes.")] = "A100-40GB",
    cluster: Annotated[Text, _node("--cluster", help="Pretended nodes as a cluster: 4x2, FILE.yaml.")] = None,
    agent: Annotated[
        list[str] | None,
        _node("--agent", metavar="DIR", help="Folder of an agent: its GPUs become a node. Repeatable."),
    ] = None,
    policy: Annotated[
        Text,
        _policy(
            "--policy",
            help="miso, or an elastic policy such as sia; replaces --ordering, --allotment and --placement.",
        ),
    ] = None,
    ordering: Annotated[str, _policy("--ordering", help="fifo, srtf, las, ...")] = "fifo",
    allotment: Annotated[str, _policy("--allotment", help="proportional, greedy, tune, optimal.")] = "tune",
    placement: Annotated[str, _policy("--placement", help="first-fit, consolidate, spread.")] = "first-fit",
    sticky: Annotated[bool, _policy("--sticky/--no-sticky", help="Running jobs keep their GPUs.")] = True,
    profiles: Annotated[
        Text,
        _policy(
            "--profiles",
            help="Profile file (default: the built-in profiles). An elastic policy needs a file of elastic profiles.",
        ),
    ] = None,
    default_profile: Annotated[
        Text, _policy("--default-profile", help="Profile for models without one of their own.")
    ] = None,
    lease: Annotated[str, _time("--lease", help="Length of a scheduling round.")] = "60s",
    keep: Annotated[str, _time("--keep", help="How long jobs continue without a controller.")] = "120s",
    grace: Annotated[
        str, _time("--grace", help="How long a preempted job may take to save its state and end.")
    ] = "30s",
    early: Annotated[bool, _time("--early/--no-early", help="Also assign free GPUs between rounds.")] = True,
    store: Annotated[
        Text,
        typer.Option("--store", metavar="URL", help="Keep jobs in PostgreSQL; wait while another controller leads."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help="Also listen on this port of 127.0.0.1, with a token; 0 chooses a free port."),
    ] = None,
    http: Annotated[
        Text,
        typer.Option(
            "--http", metavar="HOST:PORT", help="Serve the live page and /metrics here; :9401 listens on loopback."
        ),
    ] = None,
    http_token: Annotated[
        Path | None,
        typer.Option(
            "--http-token", metavar="FILE", help="File with the bearer token that readers of --http must present."
        ),
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Run in the foreground.")] = False,
    folder: Where = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Start the controller with an existing or a new Ray cluster, or with local processes. Jobs of an earlier
    controller continue.
    """
    from cotenant.cli.fleet_up import start

    given = {name: value for name, value in locals().items() if name not in ("start",)}
    start(given)


@app.command()
def down(
    within: Annotated[str, typer.Option("--within", help="Time for jobs to save their state and end.")] = "30s",
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Stop only the controller; jobs continue until their leases end.")
    ] = False,
    folder: Where = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Checkpoint and stop all jobs, then stop the controller. The jobs continue when the fleet is started again."""
    from cotenant.cli.fleet_up import wait_for_end
    from cotenant.fleet.client import FleetClient

    within_s = parse_seconds(within, "within")
    where = folder or fleet_folder()
    with FleetClient(where) as client:
        jobs = client.call("status")["jobs"]
        pid = client.call("down", within_s=None if keep_jobs else within_s)["pid"]
    ended = wait_for_end(pid, within_s + 30.0)
    left = jobs["queued"] + jobs["running"]
    if json_:
        print(json.dumps({"ended": ended, "open_jobs": left}))
    else:
        more = f"; {counted(left, 'job')} will continue when it is started again" if left else ""
        print(f"the fleet is down{more}")
    raise typer.Exit(0 if ended else 1)


@app.command()
def status(
    folder: Where = None, json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Show the controller, its nodes and the number of running and waiting jobs."""
    from cotenant.fleet.client import FleetClient

    with FleetClient(folder or fleet_folder()) as client:
        answer = client.call("status")
    if json_:
        print(json.dumps(answer))
        return
    from cotenant.cli.fleet_view import print_status

    print_status(answer)


@app.command()
def record(
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    folder: Where = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the fleet's history as the record of a run, for explain, compare and reports."""
    from cotenant.fleet.controller.recording import record_of

    found = record_of(folder or fleet_folder(), out)
    if json_:
        print(json.dumps({"record": str(out), "jobs": found.jobs.height, "events": len(found.events)}))
    else:
        print(f"{counted(found.jobs.height, 'job')} in {out}; see cotenant explain {out}")


app.command()(fleet_replay.replay)
