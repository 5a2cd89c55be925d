"""The program of one model: starting, readiness, monitoring, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cotenant.core.errors import WorkError
from cotenant.serving.config.models import PORT, ModelEntry
from cotenant.serving.llm.keeper import Keeper, kill_group
from cotenant.serving.llm.plain_host import Host, last_line
from cotenant.serving.llm.upstream import Link, Upstream

ASK_EVERY_S = 0.05
ASK_SELDOM_S = 0.5
ANSWER_WITHIN_S = 5.0
GRACE_S = 10.0
# HTTP statuses with which a program that has no list of models answers a GET of /v1/models; 500 comes from
# `transformers serve` on a machine without a cache of models
NO_LIST = (404, 405, 500, 501)
KEY_NEEDED = (401, 403)


class Program:
    """One run of a model's program. `ended` is set when it has ended for any reason."""

    def __init__(self, model: ModelEntry, process: asyncio.subprocess.Process, port: Port, keeper: Keeper, log: Path):
        self.model, self.process, self.log = model, process, log
        self.upstream = Upstream(port.number)
        self._port = port
        self.served_as = model.known_name or model.name
        # whether it accepts requests that ask for the number of a stream's tokens; None: not known yet
        self.reports_tokens: bool | None = None
        self.ended = asyncio.Event()
        self._seen = f"nothing answers on port {port.number}"  # what is known of a program that is not ready
        self._keeper = keeper
        keeper.begin(process.pid)
        self.watch = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        await self.process.wait()
        self._keeper.ended(self.process.pid)  # processes that the program left running are killed, too
        self._port.close()
        self.ended.set()
        self.upstream.close()

    @property
    def why_ended(self) -> str:
        """How the program ended, with the last line of its output."""
        code = self.process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"the program was ended by {signal.Signals(-code).name}"
        said = last_line(self.log)
        return f"the program ended with code {code}" + (f": {said}" if said else "")

    async def ready(self, within_s: float) -> None:
        """Wait until the program answers. Raises WorkError if it ends before, or does not answer in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._ready()
        except TimeoutError:
            raise WorkError(f"the program was not ready within {within_s:g} s: {self._seen}") from None

    async def _ready(self) -> None:
        every_s = ASK_EVERY_S
        while True:
            if self.ended.is_set():
                raise WorkError(self.why_ended)
            status, content = await self._get(b"/v1/models")
            if status == 200:
                self._named(content)
                return
            if status in KEY_NEEDED:
                raise WorkError(f"the program demands a key (status {status}): start it without one")
            if status:
                self._seen = f"it answers GET /v1/models with status {status}"
            if status in NO_LIST and (await self._get(b"/health"))[0] == 200:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), every_s)
            every_s = min(ASK_SELDOM_S, every_s * 1.2)

    def _named(self, content: bytes) -> None:
        """Find the name that the program uses for the model: the public name if the program's list has it, else the
        first name of the list."""
        if self.model.known_name is not None:
            return
        try:
            names = [row["id"] for row in json.loads(content)["data"]]
        except (ValueError, TypeError, KeyError):
            return
        if names and self.model.name not in names and isinstance(names[0], str):
            self.served_as = names[0]

    async def _get(self, path: bytes) -> tuple[int, bytes]:
        """Status and body of the program's answer; status 0 if there is no answer. The request has a connection of its
        own, since some programs close theirs after an error."""
        answer = _Answer()
        host = self.upstream.host
        links: list[Link] = []

        def begun(link: Link) -> bool:
            links.append(link)
            return not answer.done.done()

        self.upstream.ask(b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (path, host), answer, begun, fresh=True)
        try:
            return await asyncio.wait_for(answer.done, ANSWER_WITHIN_S)
        except TimeoutError:
            for link in links:
                link.abandon()
            return 0, b""

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop the program: SIGTERM, and SIGKILL after `grace_s`."""
        if self.process.returncode is None:
            kill_group(self.process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.ended.wait(), grace_s)
            except TimeoutError:
                kill_group(self.process.pid)
        await self.watch


class _Answer:
    """A Receiver that collects one short answer of the program; `done` gets its status and its whole body."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status, self._parts = 0, [b""]

    def got_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def got_body(self, data: bytes) -> None:
        self._parts.append(data)

    def got_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._parts)))

    def got_fault(self, why: str) -> None:
        if not self.done.done():
            self.done.set_result((0, b""))


class Port:
    """A free port of 127.0.0.1, which no other server of language models on this machine gives to a program before
    `close`. A program may listen long after its start; one port for two programs would let one answer for the other.
    """

    def __init__(self) -> None:
        while True:
            self.number = free_port()
            # an abstract name, which exists once in a network namespace, as the port does, and ends with this process
            self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._name.bind(f"\0cotenant-model-port-{self.number}")
                return
            except OSError:
                self._name.close()

    def close(self) -> None:
        """Let other programs have the port."""
        self._name.close()


async def launch(model: ModelEntry, gpu: int, host: Host, keeper: Keeper, logs: Path) -> Program:
    """Start the program of a model on a free port."""
    port = Port()
    command = [word.replace(PORT, str(port.number)) for word in shlex.split(model.command)]
    log = logs / f"{quote(model.name, safe='')}.log"
    try:
        process: Any = await host.spawn(model, gpu, command, log)
    except BaseException:
        port.close()
        raise
    return Program(model, process, port, keeper, log)


def free_port() -> int:
    """A port that no socket of this machine uses now."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port: int = door.getsockname()[1]
        return port
