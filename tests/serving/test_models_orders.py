"""Models that are moved to host memory and back: whose host memory is given up, and orders to an agent that is away."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models_door import PATIENCE_S, Door, door, model

from cotenant.core.errors import InputError, LostServerError, NoHostMemoryError, NothingToDoError, WorkError
from cotenant.serving.llm.plain_host import PlainHost
from cotenant.serving.llm.server import ModelServer


class Held(PlainHost):
    """A host that moves programs. An eviction of `a` waits until `go` is set. Orders raise `errors`, one after another.
    """

    moves = True

    def __init__(self, *errors: Exception) -> None:
        super().__init__(8 << 30)
        self.errors = list(errors)
        self.go, self.asked = threading.Event(), threading.Event()
        self.said: list[str] = []

    async def spawn(self, entry: Any, *given: Any) -> Any:
        self.said.append(f"{entry.name} started")
        return await super().spawn(entry, *given)

    async def evict(self, name: str) -> None:
        if name == "a":
            self.asked.set()
            assert await asyncio.to_thread(self.go.wait, PATIENCE_S)
        self.said.append(f"{name} out")
        if self.errors:
            raise self.errors.pop(0)

    async def bring(self, name: str) -> None:
        self.said.append(f"{name} in")
        if self.errors:
            raise self.errors.pop(0)


def two(tmp_path: Path, host: Held, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server of two models with room for one, on this host."""
    monkeypatch.setattr(ModelServer, "_make_host", lambda self, keeper: host)
    return door(tmp_path, model("a", 6), model("b", 6))


def asking(it: Door, name: str) -> tuple[threading.Thread, list[Any]]:
    """Request an answer in a thread; returns it and the list that gets the answer."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(it.chat(name)))
    thread.start()
    return thread, answers


def test_a_program_starts_after_the_order_about_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the order could evict the new program, which has the same name."""
    host = Held()
    with two(tmp_path, host, monkeypatch) as it:
        assert it.chat("a")[0] == 200
        pid = it.row("a")["pid"]
        first, _ = asking(it, "b")
        assert host.asked.wait(PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        it.until("b", lambda row: row["state"] == "resident")
        again, _ = asking(it, "a")
        it.until("a", lambda row: row["state"] == "starting")
        host.go.set()
        for each in (first, again):
            each.join(PATIENCE_S)
        assert host.said == ["a started", "b started", "b out", "a out", "a started"]


def test_an_order_is_repeated_while_the_agent_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not stopped, and the order may have been carried out before the answer was lost."""
    host = Held(LostServerError("lost"), LostServerError("lost"), NothingToDoError("it is parked already"))
    host.go.set()
    with two(tmp_path, host, monkeypatch) as it:
        assert [it.chat(name)[0] for name in "ab"] == [200, 200]
        assert it.row("a")["switches"] == {"start": 1, "evict": 1}
        host.errors = [LostServerError("lost") for _ in range(4)]
        assert it.chat("a")[0] == 200
        assert it.row("a")["switches"] == {"start": 1, "evict": 1, "bring": 1}
        assert it.row("a")["deaths"] == 0


class Moving(PlainHost):
    """A host that moves programs without an agent, in host memory for `most`."""

    moves = True

    def __init__(self, memory_bytes: int, most: int = 2) -> None:
        super().__init__(memory_bytes)
        self.most = most
        self.moved: list[str] = []
        self.programs: list[Any] = []
        self.refuse = ""
        self.keep = set[str]()
        self.exchange_error: Exception | None = None

    async def spawn(self, *given: Any) -> Any:
        self.programs = [each for each in self.programs if each.returncode is None]
        if len(self.programs) == self.most:
            raise NoHostMemoryError("no host memory")
        self.programs.append(await super().spawn(*given))
        return self.programs[-1]

    async def released(self, name: str) -> None:
        self.moved.append(f"{name} gone")

    async def evict(self, name: str) -> None:
        if name == self.refuse:
            raise WorkError("it has memory that does not move")
        self.moved.append(f"{name} out")

    async def bring(self, name: str) -> None:
        self.moved.append(f"{name} in")

    async def exchange(self, name: str, leave: Sequence[str]) -> dict[str, float]:
        self.moved.append(f"{name} in, {' '.join(leave)} out")
        if self.exchange_error is not None:
            raise self.exchange_error
        return {other: 0.25 for other in leave if other not in self.keep}


def test_programs_move_and_the_one_used_longest_ago_gives_its_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Moving(8 << 30)
    monkeypatch.setattr(ModelServer, "_make_host", lambda self, keeper: host)
    with door(tmp_path, model("a", 6), model("b", 6), model("c", 6)) as it:
        for name in ("a", "b", "a", "c"):
            assert it.chat(name)[2]["text"] == f"{name} hello"
        assert host.moved == ["a out", "a in, b out", "a out", "b gone"]
        assert [it.row(name)["state"] for name in "abc"] == ["evicted", "cold", "resident"]
        assert it.row("a")["switches"] == {"start": 1, "evict": 2, "bring": 1}
        assert it.row("b")["switches"] == {"start": 1, "evict": 1, "stop": 1}
        assert it.row("b")["switch_s"]["evict"] == 0.25
        # a model that cannot be moved out is stopped instead
        host.refuse, host.keep = "c", {"c"}
        assert it.chat("a")[0] == 200
        assert it.row("c")["switches"] == {"start": 1, "stop": 1}


@pytest.mark.parametrize("error", [None, WorkError("there is no space"), InputError("no such tenant")])
def test_what_fails_of_an_exchange_is_done_in_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """All of it, or the eviction of one of two models."""
    host = Moving(8 << 30, 3)
    monkeypatch.setattr(ModelServer, "_make_host", lambda self, keeper: host)
    with door(tmp_path, model("a", 6), model("b", 3), model("c", 3)) as it:
        assert [it.chat(name)[0] for name in ("a", "b", "c")] == [200] * 3
        host.exchange_error, host.keep = error, {"c"}
        assert it.chat("a")[2]["text"] == "a hello"
        wanted = ["c out"] if error is None else ["b out", "c out", "a in"]
        assert (host.moved[0], host.moved[2:]) == ("a out", wanted)
        assert sorted(host.moved[1].replace(",", "").split()) == sorted(["a", "in", "b", "c", "out"])
        assert [it.row(name)["state"] for name in "abc"] == ["resident", "evicted", "evicted"]
        assert it.row("a")["switches"] == {"start": 1, "evict": 1, "bring": 1}
        assert [it.row(name)["switches"] for name in "bc"] == [{"start": 1, "evict": 1}] * 2


@pytest.mark.parametrize("killed", ["a", "b"])
def test_a_program_of_an_exchange_ends_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """The requests for both are answered, and no order about the exchange reaches their next programs."""
    began, go = threading.Event(), threading.Event()

    class Slow(Moving):
        async def exchange(self, name: str, leave: Sequence[str]) -> dict[str, float]:
            began.set()
            assert await asyncio.to_thread(go.wait, PATIENCE_S)
            raise WorkError("it ended")

        async def spawn(self, entry: Any, *given: Any) -> Any:
            self.moved.append(f"{entry.name} started")
            return await super().spawn(entry, *given)

    host = Slow(8 << 30)
    monkeypatch.setattr(ModelServer, "_make_host", lambda self, keeper: host)
    with door(tmp_path, model("a", 6), model("b", 6)) as it:
        assert [it.chat(name)[0] for name in "ab"] == [200, 200]
        pid = it.row(killed)["pid"]
        thread, answers = asking(it, "a")
        assert began.wait(PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        it.until(killed, lambda row: row["deaths"] == 1)
        go.set()
        thread.join(PATIENCE_S)
        assert answers[0][0] == 200
        assert it.chat("b")[0] == 200
        started = host.moved.index(f"{killed} started", 3)
        assert all(not moved.startswith(f"{killed} ") for moved in host.moved[3:started])


def test_idle_models_on_the_gpu_give_their_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has room for all, so no model is ever evicted. One that has too little for another stays."""
    monkeypatch.setattr(ModelServer, "_make_host", lambda self, keeper: Moving(40 << 30, 1))
    with door(tmp_path, model("a", 6), model("b", 6), model("c", 8), model("d", **{"class": "best-effort"})) as it:
        assert [it.chat(name)[0] for name in ("a", "b", "a", "c", "d")] == [200, 200, 200, 503, 503]
        assert [it.row(name)["state"] for name in "abcd"] == ["resident", "cold", "cold", "cold"]
        assert it.row("a")["switches"] == {"start": 2, "stop": 1}
