"""The fleet's door: JSON lines over a unix socket, or over loopback with a token. One thread per connection."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.agent.processes import peer_of
from cotenant.core.errors import InputError, WorkError
from cotenant.fleet.controller import answers
from cotenant.fleet.controller.controller import Controller
from cotenant.fleet.jobs import spec_from_dict

SOCKET_FILE = "fleet.sock"
TOKEN_FILE = "token"
PORT_FILE = "port"
MAX_LINE = 32 << 20  # ten thousand jobs at once
MOST_CALLERS = 256
IDLE_S = 3600.0
TOKEN_S = 10.0


class _Handler(socketserver.StreamRequestHandler):
    """One connection: orders in, answers out, until it is closed."""

    server: _Listener

    def handle(self) -> None:
        door, slots = self.server.door, self.server.slots
        if not slots.acquire(blocking=False):
            self._say({"error": f"{MOST_CALLERS} connections are open already", "kind": "work"})
            return
        try:
            self.connection.settimeout(IDLE_S)
            if not self._known():
                self._say({"error": "the token is wrong or missing", "kind": "input", "field": "token"})
                return
            while line := self.rfile.readline(MAX_LINE):
                if not line.endswith(b"\n"):
                    self._say({"error": f"an order is at most {MAX_LINE >> 20} MiB long", "kind": "input"})
                    return
                self._say(door.answer(line))
        except OSError:
            return
        finally:
            slots.release()

    def _known(self) -> bool:
        """Who may give orders: this user and root over the unix socket, who has the token over loopback."""
        if self.server.address_family == socket.AF_UNIX:
            return peer_of(self.connection).uid in (0, os.geteuid())
        # a stranger has so long in all, however he drips: his connection is one of few
        late = threading.Timer(TOKEN_S, _hang_up, (self.connection,))
        late.daemon = True
        late.start()
        try:
            given = self.rfile.readline(4096).strip()
        finally:
            late.cancel()
        return hmac.compare_digest(given, self.server.door.token.encode())

    def _say(self, answer: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Listener(socketserver.ThreadingMixIn, socketserver.BaseServer):
    door: Door
    slots: threading.BoundedSemaphore  # each listener its own: strangers on the port do not lock the owner out
    address_family: socket.AddressFamily


class _Unix(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    door: Door
    slots: threading.BoundedSemaphore


class _Loopback(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    door: Door
    slots: threading.BoundedSemaphore


class Door:
    """Listens for a controller. `port`: a TCP port on 127.0.0.1 as well (0: any free one), None: the socket alone."""

    def __init__(self, controller: Controller, *, port: int | None = None) -> None:
        self.controller = controller
        self.folder = controller.options.folder
        self.token = secrets.token_urlsafe(32)
        self.port: int | None = None
        self._listeners: list[socketserver.BaseServer] = []
        path = self.folder / SOCKET_FILE
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._listen(_Unix(str(path), _Handler))
        except OSError as error:
            raise WorkError(f"{path}: cannot listen: {error.strerror or error}") from None
        finally:
            os.umask(before)
        if port is not None:
            self._open_port(port)

    def _open_port(self, port: int) -> None:
        try:
            listener = _Loopback(("127.0.0.1", port), _Handler)
        except OSError as error:
            self.close()
            raise WorkError(f"127.0.0.1:{port}: cannot listen: {error.strerror or error}") from None
        self.port = int(listener.server_address[1])
        for name, text in ((TOKEN_FILE, self.token), (PORT_FILE, str(self.port))):
            descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text + "\n")
        self._listen(listener)

    def _listen(self, listener: Any) -> None:
        listener.door, listener.slots = self, threading.BoundedSemaphore(MOST_CALLERS)
        self._listeners.append(listener)
        threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            listener.shutdown()
            listener.server_close()
        for name in (SOCKET_FILE, TOKEN_FILE, PORT_FILE):
            (self.folder / name).unlink(missing_ok=True)

    # -- orders ----------------------------------------------------------------------------------------------------

    def answer(self, line: bytes) -> dict[str, Any]:
        """Carry out one order; whatever is wrong with it is the answer."""
        try:
            order = json.loads(line)
            if not isinstance(order, dict) or not isinstance(order.get("op"), str):
                raise InputError("an order is a JSON object with an op")
            operation: Callable[[dict[str, Any]], dict[str, Any]] | None = getattr(self, f"_op_{order['op']}", None)
            if operation is None:
                raise InputError(f"unknown op {order['op'][:40]!r}")
            return operation(order)
        except (ValueError, RecursionError):
            return {"error": "not a JSON object", "kind": "input"}
        except InputError as error:
            return {"error": error.message, "field": error.field, "file": error.file, "kind": "input"}
        except WorkError as error:
            return {"error": str(error), "kind": "work"}
        except Exception as error:  # a fault of ours must not close the door
            self.controller.options.log(f"the order {line[:80]!r} failed: {error!r}")
            return {"error": f"the controller failed on this order: {error}", "kind": "work"}

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
            raise InputError("must be a time in fleet seconds for each job", field="arrivals_s")
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
        """Many at once, in one transition: each has a state, or an error of its own."""
        found: list[dict[str, Any]] = []
        for job in dict.fromkeys(ids):
            try:
                found.append({"id": job, "state": self.controller.cancel(job, flush=False)})
            except InputError as error:
                found.append({"id": job, "error": error.message, "field": error.field})
        self.controller.book.flush()
        return found

    def _op_explain(self, order: dict[str, Any]) -> dict[str, Any]:
        return self.controller.call(lambda: answers.story(self.controller, str(order.get("id"))))

    def _op_log(self, order: dict[str, Any]) -> dict[str, Any]:
        job, attempt, rank = str(order.get("id")), order.get("attempt"), order.get("rank", 0)
        offset = order.get("offset", 0)
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (rank, offset))
        if not whole or not (attempt is None or isinstance(attempt, int)) or rank < 0:
            raise InputError("attempt, rank and offset must be whole numbers", field="rank")
        place = self.controller.call(lambda: answers.log_place(self.controller, job, attempt, rank))
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
                raise InputError("must be a time of 0 s to a day", field="within")
            self.controller.call(lambda: self.controller.drain(float(within_s)))
        return {"ok": True, "pid": os.getpid()}


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # gone already
        connection.shutdown(socket.SHUT_RD)


def _whole_characters(raw: bytes) -> int:
    """Length of `raw` without a character of UTF-8 that is cut off at its end."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character says how long that is
            length = {0b110: 2, 0b1110: 3, 0b1111: 4}.get(byte >> 5 if byte < 0xE0 else byte >> 4, 1)
            return len(raw) - back if length > back else len(raw)
    return len(raw)


def socket_path(folder: Path) -> Path:
    """Where the fleet in a folder listens."""
    return folder / SOCKET_FILE
