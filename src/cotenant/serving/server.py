"""The inference server: constructs all parts (such as planner, workers and endpoints), starts and stops them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.core.serving import ServingPlan
from cotenant.core.temporary import temporary_folder
from cotenant.observability.http import is_loopback, parse_address
from cotenant.policy.serving.dispatch import warm
from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER
from cotenant.serving.config.planning import Problem, build_problem
from cotenant.serving.config.server import ServingConfig, read_serving, read_tokens, tls_context
from cotenant.serving.config.services import Deployment, parse_services, read_services, with_scheme
from cotenant.serving.dispatch.admission import Admission
from cotenant.serving.dispatch.apps import Applications
from cotenant.serving.dispatch.pool import TICK_S, Pool
from cotenant.serving.dispatch.requestlog import GPU_COLUMNS, REQUEST_COLUMNS, CsvLog
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.gateway import doors
from cotenant.serving.gateway.http1 import HttpFront
from cotenant.serving.gateway.management import Api
from cotenant.serving.gateway.requests import Gateway
from cotenant.serving.gateway.routes import Routes
from cotenant.serving.gateway.tokens import Tokens
from cotenant.serving.planning.crew import Crew
from cotenant.serving.planning.replanner import Replanner
from cotenant.serving.protocol.shared_memory import Regions
from cotenant.serving.wiring import http_limits, is_compiled, local_factory, raise_file_limit
from cotenant.serving.worker import WorkerFactory
from cotenant.serving.workers.quick import measured
from cotenant.serving.workers.quick import wanted as quick_wanted
from cotenant.serving.workers.repository import stamp

LOG = logging.getLogger(__name__)



@dataclass(frozen=True)
class Options:
    """Settings of a server that are not in its services file, but come from the command line. `http` and `grpc` are
    addresses HOST:PORT; None disables the endpoint.
    """

    http: str | None = "127.0.0.1:8000"
    grpc: str | None = None
    plan: ServingPlan | None = None
    planner: str = DEFAULT_PLANNER
    log: Path | None = None
    gpus_log: Path | None = None
    colocation: str | None = None
    agent: Path | None = None

    @property
    def addresses(self) -> dict[str, doors.Address | None]:
        """Host and port of each endpoint. If an address is invalid, raises InputError that names its option."""
        given = {"http": self.http, "grpc": self.grpc}
        return {name: None if text is None else parse_address(text, name) for name, text in given.items()}


class Server:
    """One gateway with its workers. Call `start`, then `stop`, on one event loop."""

    def __init__(
        self, config: ServingConfig, problem: Problem, options: Options, factory: WorkerFactory | None = None
    ) -> None:
        self.config, self.problem, self.options = config, problem, options
        entry = config.entry
        self.tokens = Tokens(read_tokens(entry.listen, config.deployment.file))
        self.tls = tls_context(entry.listen, "http/1.1", config.deployment.file)
        self.tls_grpc = tls_context(entry.listen, "h2", config.deployment.file)
        self._addresses = options.addresses
        log = None if options.log is None else CsvLog(options.log, REQUEST_COLUMNS)
        self.gpus_log = None if options.gpus_log is None else CsvLog(options.gpus_log, GPU_COLUMNS)
        slos = {s.name: s.slo_ms for s in problem.services} | {app.name: app.slo_ms for app, _ in problem.applications}
        self.stats = Stats(slos, log)
        self.pool = Pool(problem.services, problem.profiles, self.stats, self._lost, entry.hold)
        self.factory = factory or local_factory(config, problem, options.agent)
        self.crew = Crew(config, problem.profiles, self.pool, self.stats, self.factory, self._tell)
        self.replanner = Replanner(
            config, problem, self.pool, self.crew, self.stats, self.factory, options.planner, self._tell
        )
        self.replanner.fixed = options.plan
        self.crew.want_plan = self.replanner.wanted.set
        admission = Admission(self.pool, self.stats, self.crew.why_not, config.concurrency)
        applications = Applications(admission, problem.applications, config.wiring)
        self.gateway = Gateway(admission, applications, entry.listen.max_in_flight)
        near = all(at is None or is_loopback(at[0]) for at in self._addresses.values())
        regions = Regions(allowed=near or self.tokens.any)
        self.api = Api(self.gateway, self.crew, self.replanner, self.stats, self.tokens, entry.listen.max_body, regions)
        self.routes = Routes(self.api, self._connections, lambda: self.http_url)
        self.front = HttpFront(self.routes.handle, http_limits(entry.listen), self._failed)
        self.http_url = self.grpc_address = ""
        self._taken: dict[str, list[socket.socket]] = {}
        self._listeners: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc: Any = None

    def _tell(self, text: str, level: int = logging.INFO) -> None:
        self.api.decisions.add(text)
        LOG.log(level, text)

    def _connections(self) -> dict[str, tuple[int, int]]:
        """Open and refused connections, by endpoint."""
        fronts = {"http": self.front} | ({} if self._grpc is None else {"grpc": self._grpc})
        return {name: (len(front.connections), front.refused) for name, front in fronts.items()}

    def _lost(self, let: Any, why: str) -> None:
        self.crew.lost(let, why)

    def _failed(self, error: BaseException) -> None:
        LOG.error("unexpected exception in a request", exc_info=error)

    async def start(self) -> None:
        """Bind the addresses, find the models, make the first plan and start its workers, then listen. Raises
        InputError if no model is found, WorkError if an address cannot be bound or no service can be served.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: LOG.error("a background task failed: %s", context.get("exception") or context["message"])
        )
        raise_file_limit()
        self._taken = doors.take(self._addresses)
        if not is_compiled(plans=self.options.plan is None):
            LOG.info("compiling the planner and the dispatcher for this machine, once (half a minute)")
        warm()
        try:
            for name in self.crew.models:
                self.crew.resolve(name)
            if all(model.found is None for model in self.crew.models.values()):
                raise InputError(next(iter(self.crew.models.values())).why, file=self.config.deployment.file)
            for name, model in self.crew.models.items():
                if model.found is None:
                    self._tell(f"{name} cannot be served: {model.why}")
            with self.config.deployment.located():
                await self.replanner.first()
            ready = [name for name in self.crew.models if not self.crew.why_not(name)]
            if not ready:
                first = next(iter(self.crew.models))
                raise WorkError(f"no service can be served; {first}: {self.crew.why_not(first)}")
            await self._listen()
        except BaseException:
            await self._close(0.0)
            raise
        self._tasks = [loop.create_task(x) for x in (self._ticks(), self._seconds(), self.replanner.run())]
        if self.config.entry.poll_models > 0:
            self._tasks.append(loop.create_task(self._poll()))

    async def _listen(self) -> None:
        for name, sockets in self._taken.items():
            host, _ = self._addresses[name] or ("", 0)
            protocol, tls = (self.front.protocol, self.tls) if name == "http" else (self._grpc_front(), self.tls_grpc)
            place, listeners = await doors.listen(sockets, host, protocol, tls)
            self._listeners += listeners
            if not is_loopback(host) and not self.tokens.any:
                self._tell(f"{place} {doors.UNGUARDED}")
            if name == "http":
                self.http_url = f"{'https' if self.tls else 'http'}://{place}"
            else:
                self.grpc_address = place

    def _grpc_front(self) -> Callable[[], asyncio.Protocol]:
        from cotenant.serving.gateway.grpc_api import GrpcApi
        from cotenant.serving.gateway.http2 import Http2Front

        handlers = GrpcApi(self.api).handlers()
        self._grpc = Http2Front(handlers, http_limits(self.config.entry.listen), self._failed, self.api.guard)
        protocol: Callable[[], asyncio.Protocol] = self._grpc.protocol
        return protocol

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.pool.tick()

    async def _seconds(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.front.sweep()
            if self._grpc is not None:
                self._grpc.sweep()
            self._log_gpus()
            if self.stats.log is not None:
                self.stats.log.flush()

    def _log_gpus(self) -> None:
        if self.gpus_log is None:
            return
        plan = self.pool.plan
        allocated = sum(let.percent for let in plan.gpulets) / 100
        row = f"{plan.gpus_used},{self.replanner.held},{len(plan.gpulets)},{allocated:.4g}\n"
        self.gpus_log.add(f"{self.pool.now_ms() / 1e3:.3f},{row}")
        self.gpus_log.flush()

    async def _poll(self) -> None:
        entries = self.config.models
        seen = {name: stamp(entry.path) for name, entry in entries.items()}
        while True:
            await asyncio.sleep(self.config.entry.poll_models)
            for name, entry in entries.items():
                now = stamp(entry.path)
                if now == seen[name]:
                    continue
                seen[name] = now
                try:
                    await self.api.load(name, {})
                    LOG.info("%s has new files: loaded", name)
                except Exception as error:
                    LOG.warning("%s has new files, but: %s", name, error)

    async def stop(self, drain_s: float | None = None) -> None:
        """Stop listening, wait up to `drain_s` seconds until the requests in flight are answered, stop the workers, and
        close the remaining connections. If `drain_s` is None, the time limit is that of the services file.
        """
        limit = self.config.entry.listen.drain if drain_s is None else drain_s
        self.gateway.draining = True
        for listener in self._listeners:
            listener.close()
        self.front.drain()
        if self._grpc is not None:
            self._grpc.drain()
        try:
            await asyncio.wait_for(self._idle(), limit)
        except TimeoutError:
            self.pool.abandon("the server is shutting down")
        await self._close(2.0 if limit > 0 else 0.2)

    def hurry(self) -> None:
        """Stop waiting for the requests in flight: they fail, and all workers are killed."""
        self.crew.closing = True
        self.pool.abandon("the server is shutting down")
        for let in (*self.pool.lets, *self.pool.leaving):
            if let.worker is not None:
                let.worker.kill()

    async def _idle(self) -> None:
        while self.gateway.open:
            await asyncio.sleep(0.005)

    async def _close(self, grace_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replanner.process.close()
        await self.crew.close(grace_s)
        await self.routes.pages.close()
        doors.let_go(self._taken)
        self.front.abort()
        if self._grpc is not None:
            self._grpc.abort()
        self._log_gpus()
        for log in (self.stats.log, self.gpus_log):
            if log is not None:
                log.close()

    def status(self) -> dict[str, Any]:
        """The answer of GET /cotenant/status."""
        return self.api.status()


def build(
    services: str | Path | Mapping[str, Any] | Deployment, options: Options, *, profile: str | Path | None = None,
    gpus: int | None = None, factory: WorkerFactory | None = None,
) -> Server:  # fmt: skip
    """Create a server for a services file (or its content). The server is not started."""
    if isinstance(services, Deployment):
        deployment = services
    else:
        deployment = parse_services(services) if isinstance(services, Mapping) else read_services(services)
    deployment = with_scheme(deployment, options.colocation)
    config = read_serving(deployment)
    failed: dict[str, str] = {}
    if gpus is None and quick_wanted(config, profile):
        # the addresses are bound first, because measuring takes seconds and an address in use should be reported at
        # once
        doors.let_go(doors.take(options.addresses))
        with temporary_folder("serve") as folder:
            found = folder / "profile.json"
            content, failed = measured(config)
            found.write_text(json.dumps(content))
            problem = build_problem(deployment, found, gpus, live=True)
    else:
        problem = build_problem(deployment, profile, gpus, live=True)
    if options.plan is not None:
        _check_plan(options.plan, problem)
    server = Server(config, problem, options, factory)
    server.crew.unmeasured = {s.name: failed[s.model] for s in problem.services if s.model in failed}
    return server


def _check_plan(plan: ServingPlan, problem: Problem) -> None:
    known = {s.name for s in problem.services}
    for let in plan.gpulets:
        for seat in let.seats:
            if seat.service not in known:
                raise InputError(f"serves {seat.service!r}, which is not in the services file", field="plan")
        problem.gpus.profile_of(min(let.gpu, len(problem.gpus) - 1)).partition(let.partition)
        if let.gpu >= len(problem.gpus):
            what = f"uses GPU {let.gpu}, but the services file has {len(problem.gpus)}"
            raise InputError(what, field="plan")


def new_loop() -> asyncio.AbstractEventLoop:
    """The fastest installed event loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
