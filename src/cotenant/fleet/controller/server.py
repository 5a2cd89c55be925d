"""The fleet's listener: JSON lines over a unix socket, or over loopback with a token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from cotenant.agent.processes import peer_of
from cotenant.core.errors import InputError, WorkError
from cotenant.core.line_server import Lines, LineServer
from cotenant.core.lines import encode, failure, order_of
from cotenant.fleet.controller import answers
from cotenant.fleet.controller.controller import Controller
from cotenant.fleet.jobs import spec_from_dict

SOCKET_FILE = "fleet.sock"
TOKEN_FILE = "token"
PORT_FILE = "port"
MAX_LINE = 32 << 20  # longest line that is accepted; a list of ten thousand jobs fits
MOST_CALLERS = 256
IDLE_S = 3600.0
TOKEN_S, MAX_TOKEN = 10.0, 4096
LAST_ANSWERS_S = 1.0

T = TypeVar("T")
Known = Callable[[socket.socket, Lines], Awaitable[bool]]


class Listener:
    """Accepts client connections for the controller on a unix socket and, with `port`, on 127.0.0.1 (0: any free
    port).
    """

    def __init__(self, controller: Controller, *, port: int | None = None) -> None:
        self.controller = controller
        self.folder = controller.options.folder
        self.token = secrets.token_urlsafe(32)
        self.port: int | None = None
        self._inode = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fleet listener", daemon=True).start()
        self._servers: list[LineServer[Any]] = []
        try:
            if port is not None:
                self.port = self._do(self._listen(self._bearer, lambda server: server.listen_loopback(port)))
                self._write_port()
            # this socket is opened last: a program that waits for it may then read the port and the token from their
            # files
            self._do(self._listen(self._owner, lambda server: server.listen(self.folder / SOCKET_FILE, 0o600)))
            self._inode = (self.folder / SOCKET_FILE).stat().st_ino
        except WorkError:
            self.close()
            raise

    def _write_port(self) -> None:
        for name, text in ((TOKEN_FILE, self.token), (PORT_FILE, str(self.port))):
            descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text + "\n")

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self, known: Known, opened: Callable[[LineServer[Any]], Awaitable[T]]) -> T:
        # each listener has a limit of its own, so that clients of the port cannot lock out the owner's socket
        slots = asyncio.Semaphore(MOST_CALLERS)

        async def admit(connection: socket.socket, lines: Lines) -> None:
            if slots.locked():
                raise WorkError(f"there are already {MOST_CALLERS} open connections")
            await slots.acquire()
            try:
                if not await known(connection, lines):
                    raise InputError("the token is wrong or missing", field="token")
            except BaseException:
                slots.release()
                raise

        server = LineServer(admit, self._answer, lambda _: slots.release(), most_bytes=MAX_LINE, idle_s=IDLE_S)
        self._servers.append(server)
        return await opened(server)

    async def _owner(self, connection: socket.socket, lines: Lines) -> bool:
        return peer_of(connection).uid in (0, os.geteuid())

    async def _bearer(self, connection: socket.socket, lines: Lines) -> bool:
        """Check the token in the first line, which the caller must send within a fixed time."""
        try:
            given = await asyncio.wait_for(lines.next(MAX_TOKEN), TOKEN_S)
        except TimeoutError:
            return False
        return hmac.compare_digest(given.strip(), self.token.encode())

    async def _answer(self, _: object, line: bytes) -> bytes:
        """Answer in a separate thread that waits for the controller's thread. It is a daemon thread, so that the
        process can end meanwhile.
        """
        done: asyncio.Future[bytes] = self._loop.create_future()

        def carry_out() -> None:
            answer = self.answer(line)
            self._loop.call_soon_threadsafe(done.set_result, answer)

        threading.Thread(target=carry_out, name="fleet order", daemon=True).start()
        return await done

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        await asyncio.gather(*(server.ended() for server in self._servers))
        self._loop.call_soon(self._loop.stop)

    def close(self) -> None:
        """Stop listening for clients. Answers in progress are still sent."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(LAST_ANSWERS_S)
        with contextlib.suppress(OSError):
            if (self.folder / SOCKET_FILE).stat().st_ino != self._inode:
                return  # the socket belongs to a controller that took over in the meantime
        for name in (SOCKET_FILE, TOKEN_FILE, PORT_FILE):
            (self.folder / name).unlink(missing_ok=True)

    # -- orders ----------------------------------------------------------------------------------------------------

    def answer(self, line: bytes) -> bytes:
        """Execute one order of a client; an error becomes the answer to the client."""
        try:
            order = order_of(line)
            operation: Callable[[dict[str, Any]], dict[str, Any]] | None = getattr(self, f"_op_{order['op']}", None)
            if operation is None:
                raise InputError(f"unknown op {order['op'][:40]!r}")
            return encode(operation(order))
        except Exception as error:
            return encode(failure(error, "controller"))

    def _op_submit(self, order: dict[str, Any]) -> dict[str, Any]:
        jobs = order.get("jobs")
        if not isinstance(jobs, list) or not jobs or not all(isinstance(job, dict) for job in jobs):
            raise InputError("must be a list of jobs", field="jobs")
        specs = [spec_from_dict(job) for job in jobs]
        arrivals = order.get("arrivals_s")
        if arrivals is not None and (
            not isinstance(arrivals, list) or len(arrivals) != len(jobs)
            or not all(isinstance(t, int | float) and 0 <= t < 1e10 for t in arrivals)
        ):  # fmt: skip
            raise InputError(
                "must be one number per job: its arrival in seconds of the fleet's clock",
                field="arrivals_s",
            )
        return {"ids": self.controller.call(lambda: self.controller.submit(specs, arrivals))}

    def _op_queue(self, order: dict[str, Any]) -> dict[str, Any]:
        everything = bool(order.get("all"))
        return {"jobs": self.controller.call(lambda: answers.queue(self.controller, everything=everything))}

    def _op_status(self, order: dict[str, Any]) -> dict[str, Any]:
        return self.controller.call(lambda: answers.status(self.controller)) | {"pid": os.getpid(), "port": self.port}

    def _op_cancel(self, order: dict[str, Any]) -> dict[str, Any]:
        if "ids" in order:
            if not isinstance(order["ids"], list):
                raise InputError("must be a list of ids", field="ids")
            return {"jobs": self.controller.call(lambda: self._cancel_all([str(job) for job in order["ids"]]))}
        job = str(order.get("id"))
        return {"id": job, "state": self.controller.call(lambda: self.controller.cancel(job))}

    def _cancel_all(self, ids: list[str]) -> list[dict[str, Any]]:
        """Cancel many jobs in one transition: each result has a state or an error."""
        found: list[dict[str, Any]] = []
        for job in dict.fromkeys(ids):
            try:
                found.append({"id": job, "state": self.controller.cancel(job, flush=False)})
            except InputError as error:
                found.append({"id": job, "error": error.message, "field": error.field})
        self.controller.table.flush()
        return found

    def _op_explain(self, order: dict[str, Any]) -> dict[str, Any]:
        return self.controller.call(lambda: answers.story(self.controller, str(order.get("id"))))

    def _op_log(self, order: dict[str, Any]) -> dict[str, Any]:
        job, attempt, rank = str(order.get("id")), order.get("attempt"), order.get("rank", 0)
        offset = order.get("offset", 0)
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (rank, offset))
        if not whole or not (attempt is None or isinstance(attempt, int)) or rank < 0:
            raise InputError("attempt, rank and offset must be whole numbers", field="rank")
        place = self.controller.call(lambda: answers.log_place(self.controller, self.folder, job, attempt, rank))
        text, end = self.controller.executor.read_log(place["node"], place["path"], offset)
        whole_bytes = _whole_characters(text)
        return {key: place[key] for key in ("attempt", "open", "attempt_open")} | {
            "text": text[:whole_bytes].decode("utf-8", errors="replace"),
            "next": end - len(text) + whole_bytes,
        }

    def _op_begin(self, order: dict[str, Any]) -> dict[str, Any]:
        self.controller.call(self.controller.begin)
        return {"ok": True}

    def _op_down(self, order: dict[str, Any]) -> dict[str, Any]:
        within_s = order.get("within_s")
        if within_s is None:
            self.controller.stop()
        else:
            if isinstance(within_s, bool) or not isinstance(within_s, int | float) or not 0 <= within_s <= 86400:
                raise InputError("must be a time of 0 s to one day", field="within")
            self.controller.call(lambda: self.controller.drain(float(within_s)))
        return {"ok": True, "pid": os.getpid()}


def _whole_characters(raw: bytes) -> int:
    """Return how many bytes of `raw` remain if an incomplete UTF-8 character at the end is left out."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0xC0 != 0x80:  # in UTF-8, the first byte of a character gives the length of the character
            length = {0b110: 2, 0b1110: 3, 0b1111: 4}.get(byte >> 5 if byte < 0xE0 else byte >> 4, 1)
            return len(raw) - back if length > back else len(raw)
    return len(raw)
