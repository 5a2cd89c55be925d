"""The webhook's HTTPS server, whose certificates can change at run time; one ASGI function without a framework."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.kube.admission import certificates
from cotenant.kube.admission.review import MAX_BODY_BYTES, Answer, WebhookSettings, answer, refuse
from cotenant.kube.metrics import WebhookMetrics

LOG = logging.getLogger(__name__)

LOOK_S = 1.0  # interval between checks of the certificate files

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True)
class Listening:
    """Where the webhook listens. `client_ca`: CA that must have signed callers' certificates; None: no check."""

    host: str = "127.0.0.1"
    port: int = 8443
    metrics_port: int | None = None
    client_ca: Path | None = None


class WebhookApp:
    """The webhook as an ASGI application: POST /mutate, GET /healthz, /readyz and /metrics."""

    def __init__(self, settings: WebhookSettings, token_file: Path | None = None) -> None:
        self.settings = settings
        self.metrics = WebhookMetrics()
        self._token_file = token_file

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        found = await self._answer(scope, receive)
        headers = [(b"content-type", found.content_type.encode()), (b"content-length", str(len(found.body)).encode())]
        await send({"type": "http.response.start", "status": found.status, "headers": headers})
        await send({"type": "http.response.body", "body": found.body})

    async def _answer(self, scope: Message, receive: Receive) -> Answer:
        path, method = scope["path"], scope["method"]
        if path in ("/healthz", "/readyz"):
            return Answer(200, b"ok\n", "", "text/plain")
        if path == "/metrics":
            return Answer(200, self.metrics.text().encode(), "", self.metrics.content_type)
        if path != "/mutate":
            return refuse(404, f"there is nothing at {path:.80}; send reviews to /mutate")
        if method != "POST":
            return refuse(405, f"reviews are sent with POST, not {method}")
        began = time.perf_counter()
        found = self._unwelcome(scope) or await self._review(scope, receive)
        self.metrics.review(found.outcome, time.perf_counter() - began)
        return found

    async def _review(self, scope: Message, receive: Receive) -> Answer:
        body = await read_body(scope, receive)
        if body is None:
            return refuse(413, f"the review is larger than {MAX_BODY_BYTES >> 20} MiB")
        return answer(body, self.settings)

    def _unwelcome(self, scope: Message) -> Answer | None:
        """An error for a caller without the required token. The token file is read each time, since it may be
        replaced.
        """
        if self._token_file is None:
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        try:
            wanted = b"Bearer " + self._token_file.read_bytes().strip()
        except OSError:
            return refuse(500, "the webhook's token file cannot be read")
        return None if hmac.compare_digest(given, wanted) else refuse(401, "the token of this caller is not valid")


async def read_body(scope: Message, receive: Receive) -> bytes | None:
    """Read the body of a request; None if it is larger than a review may be."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not declared.isdigit() or int(declared) > MAX_BODY_BYTES:
        return None
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


# -- certificates that change ------------------------------------------------------------------------------------------


class LiveContext:
    """A TLS context whose certificate can be replaced. New connections use the new certificate; existing connections
    continue."""

    def __init__(self, client_ca: Path | None = None) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if client_ca is not None:
            try:
                self.context.load_verify_locations(str(client_ca))
            except (OSError, ssl.SSLError):
                raise InputError("not a CA certificate in PEM form", file=client_ca) from None
            self.context.verify_mode = ssl.CERT_REQUIRED

    def use(self, certificate: bytes, key: bytes, file: str) -> None:
        """Use a certificate and its key (PEM) for new connections. On InputError the old ones stay in use."""
        certificates.check_pair(certificate, key, file)
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, name) for name in ("tls.crt", "tls.key")]
            for path, text in zip(paths, (certificate, key), strict=True):
                with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file_:
                    file_.write(text)
            self.context.load_cert_chain(*paths)


@dataclass
class FilePair:
    """A certificate and key in files, such as a mounted Secret. `refresh` returns whether the files have changed."""

    certificate: Path
    key: Path
    _seen: tuple[bytes, bytes] = field(default=(b"", b""))

    def read(self) -> tuple[bytes, bytes]:
        """Read the certificate and the key. Raises InputError that names the file if one of the files cannot be read.
        """
        texts = []
        for path in (self.certificate, self.key):
            try:
                texts.append(path.read_bytes())
            except OSError as error:
                raise InputError(f"cannot be read: {(error.strerror or str(error)).lower()}", file=path) from None
        return texts[0], texts[1]

    def refresh(self, context: LiveContext) -> bool:
        """Use the certificate and key in the files if the files have changed. On InputError the old ones stay in use.
        """
        texts = self.read()
        if texts == self._seen:
            return False
        context.use(*texts, str(self.certificate))
        self._seen = texts
        return True


Refresh = Callable[[LiveContext], bool]


async def keep_fresh(refresh: Refresh, context: LiveContext, every_s: float) -> None:
    """Check for new certificates for ever. An error is logged once, and the present certificates stay in use."""
    said = ""
    while True:
        await asyncio.sleep(every_s)
        try:
            if await asyncio.to_thread(refresh, context):
                LOG.info("new certificates are in use")
            said = ""
        # OSError can mean a full disk, for example, so the next attempt may succeed
        except (InputError, WorkError, OSError, ValueError) as error:
            if str(error) != said:
                LOG.warning("the certificates were not replaced: %s", error)
            said = str(error)


async def serve(
    app: WebhookApp,
    listening: Listening,
    refresh: Refresh,
    every_s: float = LOOK_S,
    *,
    ready: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until SIGTERM. `refresh` is called once before, then every `every_s`. Raises InputError, WorkError."""
    import uvicorn

    context = LiveContext(listening.client_ca)
    await asyncio.to_thread(refresh, context)
    config = uvicorn.Config(
        app,
        host=listening.host,
        port=listening.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        server_header=False,
        ssl_context_factory=lambda *_: context.context,
    )
    server = uvicorn.Server(config)
    sockets = [_bind(config)]
    tasks = [asyncio.create_task(keep_fresh(refresh, context, every_s))]
    if listening.metrics_port is not None:
        app.metrics.listen(listening.host, listening.metrics_port)
    ready(sockets[0].getsockname()[1])
    try:
        await server.serve(sockets=sockets)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _bind(config: Any) -> Any:
    """Bind the webhook's listening socket. Raises WorkError if that fails, whereas uvicorn would end the process."""
    import socket

    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # with this protocol number the event loop sets TCP_NODELAY, without which header and body are sent with a delay
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(config.backlog)
    except OSError as error:
        listener.close()
        raise WorkError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}") from None
    return listener
