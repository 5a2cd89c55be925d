"""The models endpoint in a thread, in front of stand-ins without a GPU, and a client that returns raw answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from waiting import wait_for

from cotenant.serving.config.models import parse_models
from cotenant.serving.llm.server import ModelOptions, ModelServer
from cotenant.serving.server import new_loop

STANDIN = Path(__file__).with_name("llm_standin.py")
PATIENCE_S = 240.0  # seconds; long, because a busy machine may compile the planner meanwhile


def program(name: str, options: str = "") -> str:
    """Command line of a stand-in."""
    return f"{sys.executable} -I -S {STANDIN} --port {{port}} --model {name} {options}"


def model(name: str, gib: int = 1, options: str = "", called: str = "", **more: Any) -> dict[str, Any]:
    """An entry of models.yaml."""
    return {"name": name, "memory": f"{gib}GiB", "command": program(called or name, options)} | more


class Door:
    """A running server, and methods that send it requests."""

    def __init__(self, server: ModelServer, loop: asyncio.AbstractEventLoop, logs: Path) -> None:
        self.server, self.loop, self.logs = server, loop, logs
        self.port = int(server.http_url.rsplit(":", 1)[1])
        self.answer_within_s = PATIENCE_S

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.answer_within_s)

    def ask(
        self, body: Any, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and content of the answer to a POST, or to a GET if the body is None."""
        with contextlib.closing(self.connect()) as connection:
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers or {})
            got = connection.getresponse()
            text = got.read()
            found = {name.lower(): value for name, value in got.getheaders()}
            return got.status, found, json.loads(text) if "json" in found.get("content-type", "") else text.decode()

    def chat(self, name: str, prompt: str = "hello", **more: Any) -> tuple[int, dict[str, str], Any]:
        """Request one short chat answer."""
        return self.ask(chat(name, prompt, **more))

    def row(self, name: str) -> dict[str, Any]:
        """The model's row of the status."""
        rows = self.ask(None, "/cotenant/status")[2]["models"]
        found: dict[str, Any] = next(row for row in rows if row["name"] == name)
        return found

    def until(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a state of a model."""
        return until(lambda: self.row(name), wanted)

    def said(self, name: str) -> str:
        """Output of the programs of a model."""
        return (self.logs / f"{name}.log").read_text()


def events(text: str) -> list[Any]:
    """The events of a stream, the last one as it is."""
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


def chat(name: str, prompt: str = "hello", **more: Any) -> dict[str, Any]:
    """A request."""
    return {"model": name, "messages": [{"role": "user", "content": prompt}]} | more


def until(look: Callable[[], Any], wanted: Callable[[Any], bool]) -> Any:
    """Wait until the result of `look` satisfies `wanted`; returns the result."""
    found: list[Any] = []

    def is_so() -> bool:
        found[:] = [look()]
        return wanted(found[0])

    wait_for(is_so)
    return found[0]


@contextlib.contextmanager
def door(
    tmp_path: Path, *models: dict[str, Any], memory: str = "8GiB", services: Any = None, **more: Any
) -> Iterator[Door]:
    """Run a server for these models, without a GPU."""
    content = {
        "gpus": {"count": 1, "model": "cpu", "memory": memory}, "models": list(models),
        "listen": {"http": "127.0.0.1:0"}, "load_timeout": "200s",
    }  # fmt: skip
    logs = tmp_path / "logs"
    server = ModelServer(parse_models(content | more), ModelOptions(logs=logs), services)
    loop = new_loop()
    started, finish = threading.Event(), asyncio.Event()
    faults: list[BaseException] = []

    async def life() -> None:
        try:
            await server.start()
        except BaseException as error:
            faults.append(error)
            return
        finally:
            started.set()
        await finish.wait()
        await server.stop(0.0)

    thread = threading.Thread(target=loop.run_until_complete, args=(life(),), daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    if faults:
        raise faults[0]
    try:
        yield Door(server, loop, logs)
    finally:
        loop.call_soon_threadsafe(finish.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        loop.close()
