"""`cotenant run`: start a program as a tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.agent.mechanisms.base import Use
from cotenant.agent.mechanisms.registry import AUTO, names

app = typer.Typer(add_completion=False)

Text = str | None
MECHANISMS = "|".join(names(Use.TENANT))


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The program and its arguments.")],
    name: Annotated[Text, typer.Option(help="Name of the tenant (default: program name and a number).")] = None,
    request: Annotated[Text, typer.Option(metavar="30%", help="Guaranteed share of GPU time.")] = None,
    limit: Annotated[Text, typer.Option(metavar="60%", help="Largest share of GPU time.")] = None,
    memory: Annotated[
        Text, typer.Option(metavar="8GiB", help="Limit on the GPU memory of all the tenant's processes together.")
    ] = None,
    enforce_memory: Annotated[
        Text,
        typer.Option(
            metavar="kernel|driver|shim", help="What must enforce the memory limit; otherwise the program is refused."
        ),
    ] = None,
    gpus: Annotated[Text, typer.Option(metavar="N|UUID,...", help="Number of GPUs, or their UUIDs.")] = None,
    oversubscribe: Annotated[
        str,
        typer.Option(
            metavar="swap|managed|park",
            help="How this tenant's memory moves to the host when the GPU has too little for all tenants.",
        ),
    ] = "none",
    empty_cache: Annotated[
        str,
        typer.Option(
            metavar="turn|iteration", help="When PyTorch's cached memory is released instead of being swapped."
        ),
    ] = "off",
    mechanism: Annotated[str, typer.Option(metavar=MECHANISMS, help="Mechanism that enforces the share.")] = AUTO,
    priority: Annotated[
        int, typer.Option(help="For discipline priority: a tenant with a larger value goes first.")
    ] = 0,
    weight: Annotated[
        float, typer.Option(help="Weight, for discipline weighted-round-robin, or under mps from driver 620 on.")
    ] = 0.0,
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Yield to latency-sensitive tenants of this GPU.")
    ] = False,
    in_flight_us: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Best-effort: limit on GPU work in flight (default: the scheme's)."),
    ] = None,
    work_class: Annotated[
        Text, typer.Option(metavar="unknown|memory|compute", help="Resource that limits this tenant's kernels (orion).")
    ] = None,
    kernel_profile: Annotated[
        Text, typer.Option(metavar="FILE", help="Kernel profile written by `profile kernels` (scheme orion).")
    ] = None,
    copy_weight: Annotated[
        float | None, typer.Option(metavar="N", help="Weight on the PCIe link, where copies are scheduled.")
    ] = None,
    latency_sensitive: Annotated[
        bool,
        typer.Option(
            "--latency-sensitive", help="Best-effort tenants wait while this one has GPU work; its copies go first."
        ),
    ] = False,
    timeout: Annotated[Text, typer.Option(metavar="10m", help="Stop the program after this time.")] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Run inside the existing tenant --name, sharing its budget.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")] = None,
) -> None:
    """Run a CUDA program as a tenant of this node's agent: with a share, a memory limit and turns. Exits with the
    program's exit code.
    """
    import os

    from cotenant.agent.config.colocation import check_work, known_kernels
    from cotenant.agent.config.files import TenantSpec, check_name, check_spec
    from cotenant.agent.tenants.launcher import Launch
    from cotenant.agent.tenants.launcher import run as launch
    from cotenant.core.errors import InputError
    from cotenant.core.folders import agent_folder
    from cotenant.core.strength import Strength, strength_named
    from cotenant.core.units import parse_fraction, parse_memory, parse_seconds

    which = tuple(gpus.split(",")) if gpus and not _is_count(gpus) else ()
    check_work(work_class or "unknown", 0, 0, field="--work-class")
    if kernel_profile is not None and not (best_effort or latency_sensitive):
        raise InputError(
            "applies only to --best-effort or --latency-sensitive tenants: add one of them", field="--kernel-profile"
        )
    if in_flight_us and not best_effort:
        raise InputError("only best-effort tenants have an in-flight limit: add --best-effort", field="--in-flight-us")
    known = known_kernels(
        kernel_profile, work_class, latency_sensitive=latency_sensitive, folder=Path(), field="--kernel-profile"
    )
    spec = TenantSpec(
        name=name or f"{os.path.basename(command[0])[:40]}-{os.getpid()}",
        request=parse_fraction(request, "--request") if request else 0.0,
        limit=parse_fraction(limit, "--limit") if limit else 1.0,
        memory_bytes=parse_memory(memory, "--memory") if memory else None,
        enforce_memory=strength_named(enforce_memory, field="--enforce-memory") if enforce_memory else Strength.NOTHING,
        priority=priority,
        weight=weight,
        gpus=which,
        gpu_count=int(gpus) if gpus and _is_count(gpus) else max(1, len(which)),
        mechanism=mechanism,
        best_effort=best_effort,
        work_class=known["work_class"],
        kernels=known.get("kernels", ""),
        in_flight_us=in_flight_us or 0,
        copy_weight=copy_weight,
        oversubscribe=oversubscribe,
        latency_sensitive=latency_sensitive,
    )
    if name:
        check_name(name, field="--name")
    if join and not name:
        raise InputError("needs --name with the name of the tenant to join", field="--join")
    if join and (request or limit or memory or enforce_memory):
        raise InputError("uses the tenant's budget: leave out --request, --limit and --memory", field="--join")
    check_spec(spec)  # reports invalid values before the agent is asked
    timeout_s = parse_seconds(timeout, "--timeout") if timeout else None
    if timeout_s == 0:
        raise InputError("must be above 0; leave it out for no time limit", field="--timeout")
    if empty_cache not in ("off", "turn", "iteration"):
        raise InputError(f"{empty_cache!r} is not turn, iteration or off", field="--empty-cache")
    launched = Launch(
        folder or agent_folder(), spec, command, limit is not None, join, timeout_s, empty_cache=empty_cache
    )
    raise typer.Exit(launch(launched))


def _is_count(text: str) -> bool:
    return text.isdigit() and 1 <= int(text) <= 16
