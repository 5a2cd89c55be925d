"""The server of language models: creates all parts, starts them one after another, and stops them in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.core.background import spawn
from cotenant.core.temporary import temporary_folder
from cotenant.observability.feed import Feed, Row
from cotenant.observability.http import is_loopback, parse_address
from cotenant.serving.config.models import ModelsConfig, check_kept
from cotenant.serving.config.server import read_tokens, tls_context
from cotenant.serving.gateway import doors
from cotenant.serving.gateway.http1 import Exchange, HttpFront
from cotenant.serving.gateway.pages import Decisions, Pages
from cotenant.serving.gateway.tokens import Tokens
from cotenant.serving.llm.agent_watch import AgentWatch
from cotenant.serving.llm.dispatch import Dispatch
from cotenant.serving.llm.hosts import AgentHost
from cotenant.serving.llm.keeper import Keeper
from cotenant.serving.llm.live import exposition, rows, status
from cotenant.serving.llm.openai import error_body
from cotenant.serving.llm.origins import Origins
from cotenant.serving.llm.plain_host import Host, PlainHost
from cotenant.serving.llm.routes import ModelRoutes
from cotenant.serving.wiring import http_limits

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelOptions:
    """Settings from the command line. `http`: address to use instead of `listen.http` in models.yaml; `agent`: folder
    of a running agent; `logs`: folder for the programs' output (None: a temporary one).
    """

    http: str | None = None
    agent: Path | None = None
    logs: Path | None = None


class ModelServer:
    """The HTTP server for language models and their processes. Call `start`, then `stop`, on one event loop.
    `services`: the server for the services in models.yaml, if it has any; that server opens no HTTP port.
    """

    def __init__(self, config: ModelsConfig, options: ModelOptions, services: Any = None) -> None:
        self.config, self.options, self.services = config, options, services
        listen = config.raw.listen
        self._address = parse_address(options.http or str(listen.http), "http")
        self.tokens = Tokens(read_tokens(listen, config.file))
        self.tls = tls_context(listen, "http/1.1", config.file)
        self._limits = http_limits(listen)
        self.decisions = Decisions()
        self.http_url = self.grpc_address = ""
        self._closing = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started_s = time.monotonic()
        self.dispatch: Dispatch
        self.front: HttpFront
        self.host: Host
        self.watch: AgentWatch | None = None

    def _tell(self, text: str, level: int = logging.INFO) -> None:
        self.decisions.add(text)
        LOG.log(level, "%s", text)

    async def start(self) -> None:
        """Bind the address, find the GPUs, start the models that are never evicted (`keep: 1` in models.yaml), and
        listen.
        """
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: LOG.error("a background task failed: %s", context.get("exception") or context["message"])
        )
        try:
            await self._start()
        except BaseException:
            await self._closing.aclose()
            raise

    async def _start(self) -> None:
        closing = self._closing
        taken = doors.take({"http": self._address})
        closing.callback(doors.let_go, taken)
        logs = self.options.logs
        if logs is None:
            logs = closing.enter_context(temporary_folder("serve"))
        else:
            logs.mkdir(parents=True, exist_ok=True)
        keeper = Keeper()
        closing.callback(keeper.close)
        self.host = self._make_host(keeper)
        closing.push_async_callback(self.host.close)
        with self.config.source.located() if self.config.source is not None else contextlib.nullcontext():
            await self.host.start()
            check_kept(self.config.models, [gpu.memory_bytes for gpu in self.host.gpus])
        if self.services is not None:
            await self.services.start()
            closing.push_async_callback(self.services.stop, 0.0)
            self.grpc_address = self.services.grpc_address
        self.dispatch = Dispatch(self.config, self.host, keeper, logs, self._tell)
        closing.push_async_callback(self.dispatch.close)
        pages = Pages(Feed(self._rows), lambda: self.http_url)
        closing.push_async_callback(pages.close)
        routes = ModelRoutes(
            self.dispatch, self.tokens, pages, self._metrics, self.status, self._later,
            None if self.services is None else self.services.routes.handle, Origins(self.config.raw.listen.origins),
        )  # fmt: skip
        self.front = HttpFront(routes.handle, self._limits, self._failed, error_body)
        closing.callback(self.front.abort)
        spawn(self._tasks, self._seconds())
        if self.host.agent is not None:
            self.watch = AgentWatch(self.host.agent, self._tell, self.dispatch.agent_lost, self.dispatch.refuse)
            spawn(self._tasks, self.watch.run())
        self.dispatch.turn()
        await self._listen(taken["http"])

    def _make_host(self, keeper: Keeper) -> Host:
        gpus = self.config.raw.gpus
        if self.config.on_cpu:
            assert gpus.memory is not None
            return PlainHost(gpus.memory)
        return AgentHost(gpus, self.config.models, self.options.agent, keeper, self.config.raw.host_memory)

    async def _listen(self, sockets: list[socket.socket]) -> None:
        place, listeners = await doors.listen(sockets, self._address[0], self.front.protocol, self.tls)
        for listener in listeners:
            self._closing.callback(listener.close)
        if not is_loopback(self._address[0]) and not self.tokens.any:
            self._tell(f"{place} {doors.UNGUARDED}", logging.WARNING)
        self.http_url = f"{'https' if self.tls else 'http'}://{place}"

    # ---- while it runs ----

    async def _seconds(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.front.sweep()
            self.dispatch.look()

    async def _rows(self) -> AsyncIterator[Row]:
        async for row in rows(self.dispatch, self.host.gpus, self.http_url, self.decisions, self._agent_fault()):
            yield row
        for pid, text in () if self.watch is None else self.watch.others.items():
            yield "warnings", f"agent {pid}", {"source": "models", "about": "another agent", "text": text}
        if self.services is not None:
            async for row in self.services.routes.rows():
                yield row

    def _metrics(self) -> str:
        more = "" if self.services is None else self.services.routes.metrics()
        return exposition(self.dispatch, len(self.front.connections)) + more

    def _agent_fault(self) -> str:
        return "" if self.watch is None else self.watch.fault

    def status(self) -> dict[str, Any]:
        """The answer of GET /cotenant/status."""
        found = status(self.dispatch, self.host.gpus, self._started_s)
        found["agent"] = None if self.host.agent is None else str(self.host.agent)
        found["agent_fault"] = self._agent_fault()
        return found if self.services is None else found | {"services": self.services.status()}

    def _later(self, x: Exchange, work: Coroutine[Any, Any, bytes]) -> None:
        async def run() -> None:
            x.respond(200, await work)

        spawn(self._tasks, run())

    def _failed(self, error: BaseException) -> None:
        LOG.error("unexpected exception in a request", exc_info=error)

    # ---- the end ----

    async def stop(self, drain_s: float | None = None) -> None:
        """Accept no new requests, wait for present ones (at most `drain_s`), stop the programs, and close the sockets
        last.
        """
        self.front.drain()
        await self.dispatch.drain(self.config.raw.listen.drain if drain_s is None else drain_s)
        for task in list(self._tasks):
            task.cancel()
        await self._closing.aclose()

    def hurry(self) -> None:
        """Stop waiting for the requests that are running, so that `stop` proceeds at once."""
        self.dispatch.cut()
