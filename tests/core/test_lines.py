"""JSON lines: the client, the server's limits, and the loop of a helper process."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from heard import heard
from waiting import WITHIN_S

from cotenant.core.errors import InputError, LostServerError, WorkError
from cotenant.core.line_server import Lines, LineServer
from cotenant.core.lines import INPUT_ERRORS, LineClient, encode, failure, order_of

MOST = 100_000


class Counting:
    """A server that echoes, with the callers it has admitted and lost."""

    def __init__(self) -> None:
        self.admitted, self.gone, self.waiting = 0, 0, 0
        self.held = asyncio.Event()

    async def admit(self, connection: socket.socket, lines: Lines) -> int:
        if self.admitted == 3:
            raise WorkError("three are enough")
        self.admitted += 1
        return self.admitted

    async def answer(self, caller: int, line: bytes) -> bytes:
        try:
            order = order_of(line)
            if order["op"] == "wait":
                self.waiting += 1
                await self.held.wait()
            if order["op"] == "wrong":
                raise InputError("is wrong", field="a.b", file="f.yaml")
            if order["op"] in INPUT_ERRORS:
                raise INPUT_ERRORS[order["op"]](f"of the kind {order['op']}")
            if order["op"] == "work":
                raise WorkError("the disk is full")
            if order["op"] == "fault":
                raise KeyError("x")
            return encode(order | {"caller": caller})
        except Exception as error:
            return encode(failure(error, "echo"))

    def left(self, caller: int) -> None:
        self.gone += 1


def client(path: Path) -> LineClient:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(str(path))
    return LineClient(connection, "echo", str(path))


def serving(path: Path, work: Callable[[Counting, LineServer[int]], Awaitable[None]], **limits: Any) -> Counting:
    """Run `work` beside a server on `path`."""

    async def both() -> Counting:
        echo = Counting()
        server = LineServer(echo.admit, echo.answer, echo.left, most_bytes=MOST, **limits)
        await server.listen(path, 0o600)
        assert path.stat().st_mode & 0o777 == 0o600
        try:
            await asyncio.wait_for(work(echo, server), WITHIN_S)
        finally:
            server.close()
            server.hang_up()
            await server.ended()
        return echo

    return asyncio.run(both())


def raw(path: Path, sent: bytes) -> list[dict[str, Any]]:
    """What the server says to bytes, until it hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return [json.loads(line) for line in connection.makefile("rb")]


def test_orders_are_answered_and_failures_are_raised_where_they_were_caused(tmp_path: Path) -> None:
    async def work(echo: Counting, server: LineServer[int]) -> None:
        def call() -> None:
            with client(tmp_path / "s") as one:
                assert one.call("echo", text="ä") == {"op": "echo", "text": "ä", "caller": 1}
                with pytest.raises(InputError) as wrong:
                    one.call("wrong")
                assert (wrong.value.message, wrong.value.field, wrong.value.file) == ("is wrong", "a.b", "f.yaml")
                for kind, error in INPUT_ERRORS.items():
                    with pytest.raises(error, match=f"^of the kind {kind}$") as told:
                        one.call(kind)
                    assert type(told.value) is error
                with pytest.raises(WorkError, match=r"^the disk is full$"):
                    one.call("work")
                with pytest.raises(WorkError, match=r"^the echo failed on this order: 'x'$"):
                    one.call("fault")
                assert one.call("echo")["caller"] == 1

        await asyncio.to_thread(call)

    with heard() as logged:
        echo = serving(tmp_path / "s", work)
    assert logged == ["unexpected error in an order: KeyError('x')"]
    assert (echo.admitted, echo.gone) == (1, 1)


@pytest.mark.parametrize("sent", [b"nonsense\n", b"[]\n", b'{"op": 1}\n', b"\xff\xfe\n", b"{" * 5000 + b"\n", b"{"])
def test_what_is_no_order_is_an_input_error(tmp_path: Path, sent: bytes) -> None:
    async def work(echo: Counting, server: LineServer[int]) -> None:
        (answer,) = await asyncio.to_thread(raw, tmp_path / "s", sent)
        assert answer["kind"] == "input"

    serving(tmp_path / "s", work)


def test_a_line_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path) -> None:
    fits = encode({"op": "echo", "text": ""})
    fits = fits.replace(b'""', b'"' + b"y" * (MOST - len(fits)) + b'"')
    assert len(fits) == MOST

    async def work(echo: Counting, server: LineServer[int]) -> None:
        answers = await asyncio.to_thread(raw, tmp_path / "s", fits + fits)
        assert [len(answer["text"]) for answer in answers] == [fits.count(b"y")] * 2
        answers = await asyncio.to_thread(raw, tmp_path / "s", fits.replace(b"y", b"yy", 1))
        assert answers[-1]["error"] == f"an order may have at most {MOST} bytes"

    serving(tmp_path / "s", work)


def test_who_is_refused_learns_why_and_does_not_count(tmp_path: Path) -> None:
    async def work(echo: Counting, server: LineServer[int]) -> None:
        def call() -> None:
            held = [client(tmp_path / "s") for _ in range(3)]
            assert [one.call("echo")["caller"] for one in held] == [1, 2, 3]
            with pytest.raises(WorkError, match=r"^three are enough$"), client(tmp_path / "s") as fourth:
                fourth.call("echo")
            for one in held:
                one.close()

        await asyncio.to_thread(call)

    assert serving(tmp_path / "s", work).gone == 3


def test_a_silent_caller_is_hung_up_on(tmp_path: Path) -> None:
    async def work(echo: Counting, server: LineServer[int]) -> None:
        assert await asyncio.to_thread(lambda: client(tmp_path / "s")._file.readline()) == b""

    assert serving(tmp_path / "s", work, idle_s=0.05).gone == 1


def test_closing_ends_the_idle_at_once_and_the_answered_after_their_answer(tmp_path: Path) -> None:
    async def work(echo: Counting, server: LineServer[int]) -> None:
        idle = await asyncio.to_thread(lambda: client(tmp_path / "s"))
        waiting = asyncio.create_task(asyncio.to_thread(lambda: client(tmp_path / "s").call("wait")))
        while not echo.waiting:  # before that, the second one is idle, too
            await asyncio.sleep(0.001)
        server.close()
        assert await asyncio.to_thread(idle._file.readline) == b""
        echo.held.set()
        assert (await waiting)["op"] == "wait"
        await server.ended()

    assert serving(tmp_path / "s", work).gone == 2


def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with LineClient(ours, "fleet", "/there") as one:
        ours.settimeout(0.01)
        with pytest.raises(LostServerError, match="the fleet at /there does not answer: timed out"):
            one.call("x")
    ours, theirs = socket.socketpair()
    with LineClient(ours, "fleet", "/there") as one:
        theirs.close()
        with pytest.raises(LostServerError, match="the fleet at /there"):
            one.call("x")


def test_a_helper_keeps_its_streams_to_itself() -> None:
    """What is printed meanwhile is no answer, and a process that the helper leaves behind does not hold its socket."""
    program = (
        "import subprocess, sys\n"
        "from cotenant.core.lines import serve_pipe\n"
        "def start():\n"
        "    print('made')\n"
        "    left = subprocess.Popen(['sleep', '60'])\n"
        "    return lambda order: (print('noise'), {'got': order['op'], 'pid': left.pid})[1]\n"
        "serve_pipe(start)\n"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        helper = subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    ours.settimeout(WITHIN_S)
    with LineClient(ours, "helper", "here") as one:
        answer = one.call("first")
        assert answer["got"] == "first"
        assert one.call("second")["got"] == "second"
        helper.kill()
        with pytest.raises(WorkError, match="the helper at here"):
            one.call("third")
    subprocess.run(["kill", str(answer["pid"])], check=True)
    assert helper.communicate()[1] == b"made\nnoise\nnoise\n"


def test_a_refusal_is_read_also_by_a_client_that_asks_late() -> None:
    """A server that refuses a connection waits for a request for one second, then says why and closes."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"error": "user 7 already has 100 connections", "kind": "work"}\n')
    theirs.close()
    with LineClient(ours, "agent", "here") as late:
        with pytest.raises(WorkError, match="already has 100 connections"):
            late.call("status")
        with pytest.raises(LostServerError, match="the agent at here does not answer: Broken pipe"):
            late.call("status")


def test_half_of_an_answer_is_one_sentence() -> None:
    """The server was killed while it wrote."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"held": [{"name": "a"')
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(LostServerError, match="without an answer"):
        LineClient(ours, "agent", "here").call("held")
    theirs.close()
