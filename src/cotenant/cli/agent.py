"""`cotenant agent`: own this node's GPUs and share them among tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.cli.log_options import LogFormat, LogLevel

app = typer.Typer(add_completion=False)

Text = str | None


@app.command()
def agent(
    gpus: Annotated[Text, typer.Option(metavar="soft|all|UUID,...", help="GPUs to own; soft: software GPU.")] = None,
    config: Annotated[Text, typer.Option(metavar="FILE.yaml|gemini:FILE", help="Settings, tenants; watched.")] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the sockets and the state file.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Append every turn, one JSON line each.")] = None,
    quota: Annotated[Text, typer.Option(metavar="TIME", help="Turn length while nothing is known (250ms).")] = None,
    min_quota: Annotated[Text, typer.Option(metavar="TIME", help="Shortest turn (100ms).")] = None,
    max_quota: Annotated[Text, typer.Option(metavar="TIME", help="Longest turn (1s).")] = None,
    window: Annotated[Text, typer.Option(metavar="TIME", help="Window of request and limit (10s).")] = None,
    discipline: Annotated[Text, typer.Option(metavar="NAME", help="Who is next (request-limit).")] = None,
    fail: Annotated[Text, typer.Option(metavar="open|closed", help="Tenants without an agent: go on, or wait.")] = None,
    socket_mode: Annotated[str, typer.Option(metavar="OCTAL", help="Permissions of the sockets.")] = "600",
    tenant_socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Tenants' socket, for containers: apart, open to every user.")
    ] = None,
    swap_memory: Annotated[
        Text, typer.Option(metavar="SIZE", help="Host memory that tenants' contents may move to (half of the free).")
    ] = None,
    most_moving: Annotated[
        Text, typer.Option(metavar="PERCENT", help="Of the time, at most so much goes to moving memory (5%).")
    ] = None,
    copy_period_bytes: Annotated[
        Text, typer.Option(metavar="SIZE", help="Copies of all tenants take turns, a round moves this much (64MiB).")
    ] = None,
    copy_chunk_bytes: Annotated[
        Text, typer.Option(metavar="SIZE", help="Pieces that copies are cut into (8MiB).")
    ] = None,
    http: Annotated[
        Text, typer.Option(metavar="HOST:PORT", help="Live page and /metrics, e.g. :9400 (loopback).")
    ] = None,
    http_token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token its readers show.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End processes that use these GPUs past the agent, other users' too.")
    ] = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Own this node's GPUs: hand out turns and memory to the tenants that `cotenant run` starts. Runs until stopped."""
    import asyncio

    from cotenant.agent.__main__ import serve
    from cotenant.agent.config.files import FAIL_MODES
    from cotenant.agent.config.swap import parse_moving
    from cotenant.agent.daemon import AgentOptions
    from cotenant.core import logs
    from cotenant.core.errors import InputError
    from cotenant.core.folders import own_agent_folder
    from cotenant.core.units import parse_bytes

    logs.configure(log_format, log_level)
    if fail is not None and fail not in FAIL_MODES:
        raise InputError(f"{fail!r} is not open or closed", field="--fail")
    try:
        mode = int(socket_mode, 8)
    except ValueError:
        raise InputError(f"{socket_mode!r} is not an octal mode such as 660", field="--socket-mode") from None
    overrides: dict[str, Any] = {"fail": fail, "gpus": tuple(gpus.split(",")) if gpus else None}
    settings = _quota(config, discipline, quota=quota, min_quota=min_quota, max_quota=max_quota, window=window)
    if settings is not None:
        overrides["quota"] = settings
    overrides["swap_memory_bytes"] = parse_bytes(swap_memory, "--swap-memory") if swap_memory else None
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
    """The first line of that file; InputError with `field` where it cannot be used."""
    from cotenant.core.errors import InputError

    if path is None:
        return None
    try:
        token = path.read_text().strip().partition("\n")[0]
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=str(path), field=field) from None
    except UnicodeDecodeError:
        raise InputError("is not a text", file=str(path), field=field) from None
    if len(token) < 16:
        raise InputError("a token has at least 16 characters", file=str(path), field=field)
    return token


def _copies(config: Text, period: Text, chunk: Text) -> Any:
    """CopySettings of the config file with the command line's sizes over them; None when none were given."""
    from cotenant.agent.config.copies import with_options
    from cotenant.agent.config.files import AgentConfig
    from cotenant.agent.config.schema import load

    return with_options((load(config) if config else AgentConfig()).copies, period=period, chunk=chunk)


def _quota(config: Text, discipline: Text, **times: Text) -> Any:
    """QuotaSettings of the config file with the command line's values over them; None when none were given."""
    from cotenant.agent.config.files import AgentConfig, quota_settings
    from cotenant.agent.config.schema import load
    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_seconds

    given = {
        f"{name}_ns": round(parse_seconds(value, f"--{name.replace('_', '-')}") * 1e9)
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
