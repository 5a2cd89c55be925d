"""`cotenant agent`: the daemon that owns this node's GPUs and shares them among tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.cli.shared_options import LogFormat, LogLevel
from cotenant.core.errors import InputError
from cotenant.core.units import parse_memory_or_zero, parse_time

app = typer.Typer(add_completion=False)

Text = str | None


@app.command()
def agent(
    gpus: Annotated[
        Text, typer.Option(metavar="soft|all|UUID,...", help="GPUs to own: all, UUIDs, or soft for the software GPU.")
    ] = None,
    config: Annotated[
        Text,
        typer.Option(
            metavar="FILE.yaml|gemini:FILE", help="Settings and declared tenants; read again when the file changes."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of the agent's sockets and of its state file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append a JSON line for each turn that ends.")
    ] = None,
    quota: Annotated[
        Text, typer.Option(metavar="TIME", help="Length of a tenant's turns before its kernels were measured (100ms).")
    ] = None,
    min_quota: Annotated[Text, typer.Option(metavar="TIME", help="Shortest turn (20ms).")] = None,
    max_quota: Annotated[Text, typer.Option(metavar="TIME", help="Longest turn (100ms).")] = None,
    window: Annotated[
        Text, typer.Option(metavar="TIME", help="Sliding window over which request and limit are measured (10s).")
    ] = None,
    discipline: Annotated[
        Text, typer.Option(metavar="NAME", help="Rule that chooses the next tenant (request-limit).")
    ] = None,
    fail: Annotated[
        Text,
        typer.Option(
            metavar="open|closed",
            help="What tenants do when the agent dies: run without limits (open) or wait until it is back (closed).",
        ),
    ] = None,
    socket_mode: Annotated[str, typer.Option(metavar="OCTAL", help="Permissions of the agent's sockets.")] = "600",
    tenant_socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A separate socket for tenants in containers, writable by every user."),
    ] = None,
    swap_memory: Annotated[
        Text,
        typer.Option(
            metavar="SIZE",
            help="Host memory to which tenants' GPU memory may be swapped (default: half of what is free).",
        ),
    ] = None,
    most_moving: Annotated[
        Text,
        typer.Option(metavar="PERCENT", help="Largest part of the time that may be spent on swapping GPU memory (5%)."),
    ] = None,
    copy_period_bytes: Annotated[
        Text,
        typer.Option(
            metavar="SIZE", help="Bytes that the copies of all tenants together move in one scheduling round (64MiB)."
        ),
    ] = None,
    copy_chunk_bytes: Annotated[
        Text, typer.Option(metavar="SIZE", help="Size of the chunks into which copies are split (8MiB).")
    ] = None,
    http: Annotated[
        Text,
        typer.Option(metavar="HOST:PORT", help="Serve the live page and /metrics here; :9400 listens on loopback."),
    ] = None,
    http_token: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the bearer token that readers of --http must present."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Kill processes that use these GPUs without being tenants, other users' included."
        ),
    ] = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Own this node's GPUs: give turns and memory to the tenants that `cotenant run` starts. Runs until stopped."""
    import asyncio

    from cotenant.agent.__main__ import serve
    from cotenant.agent.config.files import FAIL_MODES
    from cotenant.agent.config.swap import parse_moving
    from cotenant.agent.daemon import AgentOptions
    from cotenant.core import logs
    from cotenant.core.folders import own_agent_folder

    logs.configure(log_format, log_level)
    if fail is not None and fail not in FAIL_MODES:
        raise InputError(f"must be open or closed, not {fail!r}", field="--fail")
    try:
        mode = int(socket_mode, 8)
    except ValueError:
        raise InputError(f"{socket_mode!r} is not an octal mode such as 660", field="--socket-mode") from None
    overrides: dict[str, Any] = {"fail": fail, "gpus": tuple(gpus.split(",")) if gpus else None}
    settings = _quota(config, discipline, quota=quota, min_quota=min_quota, max_quota=max_quota, window=window)
    if settings is not None:
        overrides["quota"] = settings
    overrides["swap_memory_bytes"] = parse_memory_or_zero(swap_memory, "--swap-memory") if swap_memory else None
    overrides["most_moving"] = parse_moving(most_moving, "--most-moving") if most_moving else None
    overrides["copies"] = _copies(config, copy_period_bytes, copy_chunk_bytes)
    folder = folder or own_agent_folder()
    options = AgentOptions(
        folder,
        config,
        trace,
        mode,
        overrides,
        tenant_socket=tenant_socket,
        http=http,
        http_token=read_token(http_token, "--http-token"),
        strict=strict,
    )
    asyncio.run(serve(options))


def read_token(path: Path | None, field: str) -> str | None:
    """Return the first line of the token file; None if no file is named. Raises InputError, with `field`, if the file
    is unusable."""
    from cotenant.core.textfile import read_text

    if path is None:
        return None
    token = read_text(path, field).strip().partition("\n")[0]
    if len(token) < 16:
        raise InputError("a token needs at least 16 characters", file=str(path), field=field)
    return token


def _copies(config: Text, period: Text, chunk: Text) -> Any:
    """Return the CopySettings of the config file, overridden by --copy-period-bytes and --copy-chunk-bytes; None if
    neither option is given.
    """
    from cotenant.agent.config.copies import with_options
    from cotenant.agent.config.files import AgentConfig
    from cotenant.agent.config.schema import load

    return with_options((load(config) if config else AgentConfig()).copies, period=period, chunk=chunk)


def _quota(config: Text, discipline: Text, **times: Text) -> Any:
    """Return the QuotaSettings of the config file, overridden by --discipline and by the options of `times` (--quota,
    --min-quota, --max-quota, --window); None if none of these options is given.
    """
    from cotenant.agent.config.files import AgentConfig, quota_settings
    from cotenant.agent.config.schema import load

    given = {
        f"{name}_ns": round(parse_time(value, f"--{name.replace('_', '-')}") * 1e9)
        for name, value in times.items()
        if value is not None
    }
    if not given and discipline is None:
        return None
    base = (load(config) if config else AgentConfig()).quota
    kept = ("idle_credit_ns", "alone_ns", "grace_ns", "stuck_ns", "exclusive_ns", "window_ns")
    values = {name: getattr(base, name) for name in kept} | given
    try:
        return quota_settings(discipline or base.discipline, values)
    except InputError as error:
        raise InputError(error.message, field="--discipline" if "discipline" in error.message else "--quota") from None
