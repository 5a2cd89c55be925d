"""Serves a timed engine over HTTP on a port."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from cotenant.core.errors import WorkError
from cotenant.core.extras import needs
from cotenant.profiles.llm.profile import LlmProfile
from cotenant.timed_llm.app import App
from cotenant.timed_llm.engine import Clock, Cuda, Device

# a callback for the moment when the server listens; its arguments are the port and a function that ends the server
Ready = Callable[[int, Callable[[], None]], None]


def run(
    profile: LlmProfile, host: str, port: int, device: str = "clock", memory_bytes: int = 0, load_s: float = 0.0,
    ready: Ready = lambda port, stop: None,
) -> None:  # fmt: skip
    """Wait for `load_s` seconds, like an engine that loads its model, then serve until SIGTERM, or until the function
    that `ready` received is called. WorkError if the device fails."""
    began = time.monotonic()
    made: Device = Cuda(memory_bytes) if device == "cuda" else Clock()
    time.sleep(max(0.0, load_s - (time.monotonic() - began)))
    error = asyncio.run(serve(profile, made, host, port, ready))
    if error is not None:
        raise WorkError(error)


async def serve(profile: LlmProfile, device: Device, host: str, port: int, ready: Ready) -> str | None:
    """Serve the model's engine on a port until it is stopped. Returns the device's error if it failed, else None."""
    with needs("serve"):
        import uvicorn

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise WorkError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    server: uvicorn.Server

    def stop() -> None:
        server.should_exit = True

    app = App(profile, device, stop)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2, server_header=False
    )  # fmt: skip
    server = uvicorn.Server(config)
    ready(listener.getsockname()[1], stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        app.close()
    return app.engine.error
