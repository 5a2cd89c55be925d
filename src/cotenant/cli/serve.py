"""`cotenant serve`: serve inference requests for many models on shared GPUs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.shared_options import LogFormat, LogLevel
from cotenant.core.errors import InputError

if TYPE_CHECKING:
    from cotenant.serving.llm.server import ModelServer
    from cotenant.serving.server import Server

LOG = logging.getLogger(__name__)
app = typer.Typer(add_completion=False)


@app.command()
def serve(
    services: Annotated[str, typer.Argument(help="Services file, or a models file of language models.")],
    http: Annotated[str | None, typer.Option(metavar="HOST:PORT|none", help="Address of the HTTP endpoint.")] = None,
    grpc: Annotated[str | None, typer.Option(metavar="HOST:PORT|none", help="Address of the gRPC endpoint.")] = None,
    plan: Annotated[str | None, typer.Option(help="Plan (JSON) to use; the server does not replan.")] = None,
    planner: Annotated[
        str | None, typer.Option(help="Planner: temporal, greedy, gpulet, gpulet-interference, exact.")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Profile: a JSON file or a folder.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs, instead of the file's.")] = None,
    log: Annotated[Path | None, typer.Option(help="Write one CSV row per request.")] = None,
    gpus_log: Annotated[Path | None, typer.Option(help="Write the number of GPUs in use over time as CSV.")] = None,
    colocation: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME|none",
            help="Scheme for best-effort work on the same GPUs: tidal, orion, mps-plus, temporal, static.",
        ),
    ] = None,
    agent_dir: Annotated[
        Path | None, typer.Option("--dir", help="Folder of a running agent, for --colocation and for language models.")
    ] = None,
    program_logs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the output of language models' programs, one file each."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="RAY", help="Run the workers on this Ray cluster: auto, or HOST:PORT.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line when the server accepts requests.")
    ] = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM: for the services of SERVICES.yaml by the Open Inference Protocol v2, for
    the language models of MODELS.yaml by OpenAI's API. Listens on loopback by default.

    Services are planned again every period: the number of GPUs may grow or shrink, and models move without dropping a
    request. Language models start at their first request and make way for others when they are idle."""
    from cotenant.core import logs
    from cotenant.core.yamlfile import read_yaml
    from cotenant.serving.config.models import is_models_file

    if is_models_file(read_yaml(services).content):
        logs.configure(log_format, log_level)
        unused = {
            "--plan": plan, "--planner": planner, "--profile": profile, "--gpus": gpus, "--log": log,
            "--gpus-log": gpus_log, "--colocation": colocation, "--address": address,
        }  # fmt: skip
        raise typer.Exit(_run(_models(services, http, grpc, agent_dir, program_logs, unused), as_json))
    from cotenant.cli.plan import read_plan
    from cotenant.core.files import check_writable
    from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER, find_planner

    logs.configure(log_format, log_level)
    check_writable(log, gpus_log)
    name = find_planner(planner or DEFAULT_PLANNER).name
    fixed = None if plan is None else read_plan(plan)
    from cotenant.serving.server import Options, build

    doors = _doors(services, http, grpc)
    if doors == (None, None):
        raise InputError("the server needs an endpoint: give --http or --grpc", field="http")
    from cotenant.serving.config.services import read_services, with_scheme

    if address is not None and with_scheme(read_services(services), colocation).colocation is not None:
        raise InputError("co-location needs workers on this machine, not on a Ray cluster", field="--colocation")
    options = Options(*doors, fixed, name, log, gpus_log, colocation, agent_dir)
    factory = None
    if address is not None:
        from cotenant.serving.workers.on_ray import connect

        factory = connect(address, services, profile)
    server = build(services, options, profile=profile, gpus=gpus, factory=factory)
    raise typer.Exit(_run(server, as_json))


def _models(
    path: str, http: str | None, grpc: str | None, agent: Path | None, logs: Path | None, unused: Mapping[str, object]
) -> ModelServer:
    """Create the server of the language models of a models file. This server also serves the file's services."""
    from cotenant.serving.config.models import read_models
    from cotenant.serving.llm.server import ModelOptions, ModelServer

    config = read_models(path)
    for option, given in unused.items():
        if given is not None:
            raise InputError("applies only to services files, not to a file of language models", field=option)
    if http == "none":
        raise InputError("language models are served over HTTP only", field="--http")
    services = None
    if config.services is not None:
        from cotenant.serving.config.services import parse_services
        from cotenant.serving.server import Options, build

        address = grpc if grpc is not None else config.raw.listen.grpc
        services = build(parse_services(config.services, path), Options(http=None, grpc=_address(address)))
    return ModelServer(config, ModelOptions(http, agent, logs), services)


def _address(text: str | None) -> str | None:
    return None if text in (None, "", "none") else text


def _doors(services: str, http: str | None, grpc: str | None) -> tuple[str | None, str | None]:
    """Return the addresses to listen on, from the options, or from `listen` in the file if no option names one."""
    from cotenant.serving.config.server import read_serving
    from cotenant.serving.config.services import read_services

    listen = read_serving(read_services(services)).entry.listen
    given = (http if http is not None else listen.http, grpc if grpc is not None else listen.grpc)
    return _address(given[0]), _address(given[1])


def _run(server: Server | ModelServer, as_json: bool) -> int:
    """Start the server, serve until a signal arrives, then stop gracefully. A second signal stops at once."""
    import asyncio
    import signal

    from cotenant.serving.server import new_loop

    loop = new_loop()
    asyncio.set_event_loop(loop)
    finish, at_once = asyncio.Event(), asyncio.Event()

    def told() -> None:
        if finish.is_set():
            at_once.set()
        finish.set()

    async def life() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told)
        starting = loop.create_task(server.start())
        waiting = loop.create_task(finish.wait())
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        if starting.exception() is not None:
            waiting.cancel()
        await starting
        _ready(server, as_json)
        await waiting
        LOG.info("finishing the requests in flight (signal again to stop at once)")
        stopping = loop.create_task(server.stop())
        hurry = loop.create_task(at_once.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            server.hurry()
        await stopping
        hurry.cancel()

    try:
        loop.run_until_complete(life())
    finally:
        loop.close()
    return 0


def _ready(server: Server | ModelServer, as_json: bool) -> None:
    """Print the addresses of the server and what it serves."""
    import json
    import os

    from cotenant.core.units import format_ms

    facts: dict[str, Any] = {
        "http": server.http_url or None, "grpc": server.grpc_address or None, "pid": os.getpid()
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts), flush=True)
        return
    status = server.status()
    if "models" in status:
        print(f"http  {server.http_url}/v1")
        if status["agent"] is not None:
            print(f"agent {status['agent']}  (cotenant ps --dir {status['agent']})")
        for model in status["models"]:
            print(f"  {model['name']}: {model['state']}")
        print("", end="", flush=True)
        return
    for name in ("http", "grpc"):
        if facts[name]:
            print(f"{name:5} {facts[name]}")
    print(f"{status['gpus_in_use']} of {status['gpus']} GPUs, {len(status['gpulets'])} gpulets, {status['planner']}")
    for service in status["services"]:
        if service["application"]:
            print(f"  {service['name']}: application with an SLO of {format_ms(service['slo_ms'])} ms")
        elif service["not_ready"]:
            print(f"  {service['name']}: NOT READY: {service['not_ready']}")
        else:
            what = f"{service['capacity_rps']:.0f} requests/s within {format_ms(service['slo_ms'])} ms"
            print(f"  {service['name']}: {what}")
    print("", end="", flush=True)
