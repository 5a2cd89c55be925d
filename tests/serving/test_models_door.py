"""The door of language models over real sockets and processes: OpenAI's forms, the life of programs, who is evicted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from models_door import PATIENCE_S, STANDIN, Door, chat, door, events, model, until

from cotenant.core.errors import InputError
from cotenant.serving.config.models import parse_models
from cotenant.serving.config.services import parse_services
from cotenant.serving.llm.openai import Renamed
from cotenant.serving.server import Options, build


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A door with a model under its own name, one under another name, and one that is never asked."""
    path = tmp_path_factory.mktemp("door")
    with door(path, model("a"), model("b", called="/models/b"), model("idle"), model("kept", keep=1)) as running:
        yield running


def test_the_list_of_models(one: Door) -> None:
    status, headers, content = one.ask(None, "/v1/models")
    assert (status, content["object"]) == (200, "list")
    assert [row["id"] for row in content["data"]] == ["a", "b", "idle", "kept"]
    assert {row["object"] for row in content["data"]} == {"model"}
    assert uuid.UUID(headers["x-request-id"]).version == 4
    assert one.ask(None, "/v1/models/a")[2]["id"] == "a"
    assert one.ask(None, "/v1/models/c")[0] == 404
    assert one.ask({}, "/api/chat")[0] == 404


@pytest.mark.parametrize(
    ("body", "status", "kind", "code", "message"),
    [
        (chat("x"), 404, "invalid_request_error", "model_not_found", "The model 'x' does not exist; the models are: a"),
        (b"{", 400, "invalid_request_error", "invalid_json", "the body is not JSON: unexpected end of data, in line 1"),
        (b"", 400, "invalid_request_error", "invalid_json", "the body is not JSON: it is empty"),
        (b'{"model": "\xff"}', 400, "invalid_request_error", "invalid_json", "the body is not JSON: byte 11 is"),
        (b"[]", 400, "invalid_request_error", "invalid_json", "the body is not a JSON object"),
        ({"prompt": "x"}, 400, "invalid_request_error", "missing_model", "the body must name a model"),
        ({"model": 5}, 400, "invalid_request_error", "missing_model", "the body must name a model"),
    ],
)
def test_errors_are_in_openais_form(one: Door, body: Any, status: int, kind: str, code: str, message: str) -> None:
    got, headers, content = one.ask(body, headers={"x-request-id": "mine-1"})
    assert got == status
    assert (content["error"]["type"], content["error"]["code"]) == (kind, code)
    assert content["error"]["message"].startswith(message)
    assert headers["x-request-id"] == "mine-1"


def test_answers_come_from_the_model_that_was_named(one: Door) -> None:
    for path, body in (
        ("/v1/chat/completions", chat("a", "one")),
        ("/v1/completions", {"model": "a", "prompt": "one"}),
        ("/v1/embeddings", {"model": "a", "input": "one"}),
    ):
        status, headers, content = one.ask(body, path, {"x-request-id": "r7"})
        assert (status, content["model"], content["text"]) == (200, "a", "a one")
        assert headers["x-request-id"] == "r7"
        assert headers["x-program"] == "stand-in"
        assert float(headers["cotenant-queued-ms"]) >= 0.0
    # the program names the model /models/b, which the client must never see
    assert one.chat("b", "two")[2]["model"] == "b"
    text = one.chat("b", "three", stream=True, max_tokens=2)[2]
    assert [event if event == "[DONE]" else event["model"] for event in events(text)] == ["b", "b", "[DONE]"]
    assert one.row("idle")["state"] == "cold"
    assert one.until("kept", lambda row: row["state"] == "resident")["outcomes"] == {}


def test_a_stream_is_handed_on_as_it_comes_and_its_connection_is_kept(one: Door) -> None:
    with contextlib.closing(one.connect()) as connection:
        for _ in range(2):
            connection.request("POST", "/v1/completions", json.dumps({"model": "a", "prompt": "s", "stream": True}))
            got = connection.getresponse()
            assert got.getheader("content-type") == "text/event-stream"
            parts = events(got.read().decode())
            assert [part["text"] for part in parts[:-1]] == ["s 0", "s 1", "s 2"]
            assert parts[-1] == "[DONE]"
            assert connection.sock is not None
        # the first part arrives while the program still waits
        connection.request("POST", "/v1/chat/completions", json.dumps(chat("a", "hold", stream=True)))
        assert b"hold 0" in connection.getresponse().readline()
    until(lambda: one.said("a"), lambda text: "client gone" in text)
    assert one.until("a", lambda row: row["open"] == 0)["outcomes"]["cancelled"] == 1


def test_metrics_page_and_top_show_each_model(one: Door) -> None:
    one.chat("a", "x", stream=True)
    text = one.ask(None, "/metrics")[2]
    assert 'cotenant_model_state{model="idle",state="cold"} 1' in text
    assert 'cotenant_model_switches_total{model="a",kind="start"} 1' in text
    assert re.search(r'cotenant_model_first_token_seconds_count\{model="a"\} [1-9]', text)
    state = one.ask(None, "/state.json")[2]
    assert {row["key"]: row["state"] for row in state["models"]}["idle"] == "cold"
    from rich.console import Console

    from cotenant.cli.top_server import screen

    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(one.ask(None, "/cotenant/status")[2], "here"))
    assert re.search(r"idle +cold", console.export_text())


def test_a_name_is_replaced_wherever_pieces_cut_it() -> None:
    text = b'data: {"id":1,"model":"/m/x","c":"\\"model\\":\\"/m/x\\" model"}\n\ndata: {"model": "/m/x"}\n\n'
    wanted = b'data: {"id":1,"model":"x","c":"\\"model\\":\\"/m/x\\" model"}\n\ndata: {"model": "x"}\n\n'
    for first in range(len(text)):
        for size in (1, 7, len(text)):
            renamed = Renamed("/m/x", "x")
            cuts = [text[:first], *(text[i : i + size] for i in range(first, len(text), size))]
            assert b"".join(renamed.take(part) for part in cuts) + renamed.end() == wanted


def test_two_models_take_turns_on_room_for_one_and_streams_are_not_cut(tmp_path: Path) -> None:
    with door(tmp_path, model("a", 6), model("b", 6)) as it:
        with contextlib.closing(it.connect()) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(chat("a", "hold", stream=True)))
            held = connection.getresponse()
            assert b"hold 0" in held.readline()
            answers: list[Any] = []
            other = threading.Thread(target=lambda: answers.append(it.chat("b", "now")))
            other.start()
            it.until("b", lambda row: row["waiting"] == 1)
            assert it.row("a")["state"] in ("resident", "draining")
            assert not answers
        other.join(PATIENCE_S)
        assert answers[0][2]["text"] == "b now"
        assert it.row("a")["switches"] == {"start": 1, "stop": 1}
        assert it.chat("a", "again")[2]["text"] == "a again"
        assert it.row("b")["switches"] == {"start": 1, "stop": 1}


def test_transformers_serve_has_no_list_and_one_name(tmp_path: Path) -> None:
    """On a machine without a cache of models its list is an error, after which it closes the connection."""
    engine = tmp_path / "transformers"
    python = f"{sys.executable} -I -S {STANDIN}"
    engine.write_text(f'#!/bin/sh\nmodel=$2; shift 2\nexec {python} --no-list --model "$model" "$@"\n')
    engine.chmod(0o755)
    row = {"name": "a", "memory": "1GiB", "command": f"{engine} serve /models/a --port {{port}}"}
    with door(tmp_path, row) as it:
        content = it.chat("a", "hello")[2]
        assert (content["model"], content["text"]) == ("a", "/models/a hello")


def test_a_full_queue_is_told_with_when_to_come_again(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    with door(tmp_path, model("a", options=f"--until {loaded}", max_queue=1)) as it:
        answers: list[Any] = []
        first = threading.Thread(target=lambda: answers.append(it.chat("a", "first")))
        first.start()
        it.until("a", lambda row: row["waiting"] == 1)
        status, headers, content = it.chat("a", "second")
        assert (status, content["error"]["type"]) == (429, "rate_limit_error")
        assert content["error"]["message"] == "1 requests are already waiting for a"
        assert int(headers["retry-after"]) >= 1
        loaded.touch()
        first.join(PATIENCE_S)
        assert answers[0][0] == 200


def test_a_program_that_cannot_start_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = {"name": "gone", "memory": "1GiB", "command": "/nowhere/engine {port}"}
    with door(tmp_path, model("a", options="--fail 'no weights here'"), broken) as it:
        status, headers, content = it.chat("a")
        assert (status, content["error"]["code"]) == (503, "model_unavailable")
        told = "a is not available: its program could not be started: the program ended with code 1: no weights here"
        assert content["error"]["message"] == told
        assert int(headers["retry-after"]) >= 1
        told = "gone is not available: its program could not be started: /nowhere/engine:"
        assert it.chat("gone")[2]["error"]["message"] == f"{told} no such file or directory"
        assert it.row("a")["fault"].endswith("no weights here")
    warned = {record.message.partition(":")[0] for record in caplog.records if record.levelname == "WARNING"}
    assert warned == {"a", "gone"}


def test_requests_that_the_end_of_the_server_cuts_off_are_told_so(tmp_path: Path) -> None:
    told = {"message": "the server is shutting down", "type": "server_error", "param": None, "code": "shutting_down"}
    with contextlib.ExitStack() as closing:
        with door(tmp_path, model("a")) as it:
            got = []
            for body in (chat("a", "hold", stream=True), chat("a", f"until {tmp_path / 'never'}")):
                connection = closing.enter_context(contextlib.closing(it.connect()))
                connection.request("POST", "/v1/chat/completions", json.dumps(body))
                if body.get("stream"):
                    got.append(connection.getresponse())
                    assert b"hold 0" in got[0].readline()
            it.until("a", lambda row: row["open"] == 2)
        assert events(got[0].read().decode().lstrip())[-1]["error"] == told
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]) == (503, told)


def test_a_program_that_hangs_makes_room_for_others(tmp_path: Path) -> None:
    with door(tmp_path, model("a", 6), model("b", 6), answer_timeout="1s") as it:
        answers: list[Any] = []
        bodies = (chat("a", f"until {tmp_path / 'never'}"), chat("a", "hold", stream=True), chat("b"))
        threads = [threading.Thread(target=lambda body=body: answers.append(it.ask(body))) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        found = {status: content for status, _, content in answers if isinstance(content, dict)}
        told = "the program of a has sent nothing of this answer for 1 s"
        assert (found[504]["error"]["message"], found[200]["text"]) == (told, "b hello")
        (streamed,) = [content for _, _, content in answers if isinstance(content, str)]
        assert events(streamed)[-1]["error"]["message"] == told


def test_a_program_that_is_never_ready_says_what_it_answers(tmp_path: Path) -> None:
    deaf = {"name": "deaf", "memory": "1GiB", "command": "/bin/sh -c 'sleep 600; exit {port}'"}
    with door(tmp_path, model("a", options="--status 503"), deaf, load_timeout="2s") as it:
        begun = "is not available: its program could not be started: the program was not ready within 2 s"
        told = [it.chat(name)[2]["error"]["message"] for name in ("a", "deaf")]
        assert told[0] == f"a {begun}: it answers GET /v1/models with status 503"
        assert re.fullmatch(rf"deaf {begun}: nothing answers on port \d+", told[1])
    with door(tmp_path, model("key", options="--status 401")) as it:
        told = [it.chat("key")[2]["error"]["message"]]
        assert told[0].endswith("could not be started: the program demands a key (status 401): start it without one")


def test_a_program_that_dies(tmp_path: Path) -> None:
    """Nothing was streamed: tried once more, by a new program. Something was: one sentence, and the stream ends."""
    with door(tmp_path, model("a")) as it:
        assert it.chat("a", f"die-once {tmp_path / 'mark'}")[0] == 200
        assert it.row("a")["retries"] == 1
        assert it.row("a")["deaths"] == 1
        text = it.chat("a", "die-late", stream=True, max_tokens=5)[2]
        last = events(text)[-1]
        assert events(text)[0]["text"] == "die-late 0"
        assert last["error"]["code"] == "program_failed"
        told = "the program of a did not finish this answer: the program ended with code 4: asked die-late"
        assert last["error"]["message"] == told
        assert it.chat("a")[0] == 200
        # the request may be what kills the program, so there is no third attempt
        status, _, content = it.chat("a", "die")
        assert status == 502
        told = "the program of a did not finish this answer: the program ended with code 3: asked die"
        assert content["error"]["message"] == told


def test_kill_9_in_the_middle_of_many_requests(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with door(tmp_path, model("a")) as it:
        assert it.chat("a")[0] == 200
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(it.chat("a", f"until {killed}"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: it.said("a").count(f"asked until {killed}"), lambda count: count == 8)
        os.kill(it.row("a")["pid"], signal.SIGKILL)
        it.until("a", lambda row: row["deaths"] == 1)
        killed.touch()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [(status, content["text"]) for status, _, content in answers] == [(200, f"a until {killed}")] * 8
        assert it.row("a")["deaths"] == 1
        assert it.row("a")["retries"] == 8


def test_a_client_that_reads_slowly_holds_its_program_and_nobody_else(tmp_path: Path) -> None:
    with door(tmp_path, model("a")) as it:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", it.port))
        body = json.dumps(chat("a", "x" * 1000, stream=True, max_tokens=20_000)).encode()
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        it.until("a", lambda row: row["open"] == 1)
        assert it.chat("a", "quick")[0] == 200

        def largest() -> int:
            """Bytes in the largest write buffer of a connection, as the server's own thread sees it."""

            async def look() -> int:
                return max(c.transport.get_write_buffer_size() for c in it.server.front.connections)

            return asyncio.run_coroutine_threadsafe(look(), it.loop).result(PATIENCE_S)

        # the answer has 20 MB, of which the server holds at most one buffer
        assert until(largest, lambda size: size > 0) < 1 << 20
        slow.close()
        it.until("a", lambda row: row["open"] == 0)


def test_tokens_and_kept_models_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a-token-of-mine\n")
    listen = {"http": "127.0.0.1:0", "tokens": str(tmp_path / "tokens")}
    with door(tmp_path, model("a"), listen=listen) as it:
        status, headers, content = it.chat("a")
        assert (status, content["error"]["type"]) == (401, "authentication_error")
        assert headers["www-authenticate"] == "Bearer"
        assert it.ask(chat("a"), headers={"authorization": "Bearer a-token-of-mine"})[0] == 200
        assert it.ask(chat("a"), headers={"x-api-key": "a-token-of-mine"})[0] == 200
        assert it.ask(chat("a"), headers={"x-api-key": "a-token"})[0] == 401
        assert it.ask(None, "/health")[0] == 200
    with (
        pytest.raises(InputError, match="the models to keep do not fit together: there is no room for b"),
        door(tmp_path, model("a", 5, keep=1), model("b", 5, keep=1)),
    ):
        pass


def test_http_1_0_clients_get_streams_that_end_with_the_connection(one: Door) -> None:
    with socket.create_connection(("127.0.0.1", one.port), timeout=PATIENCE_S) as old:
        body = json.dumps(chat("a", "old", stream=True)).encode()
        old.sendall(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        got = b"".join(iter(lambda: old.recv(65536), b""))
    head, _, text = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert [part if part == "[DONE]" else part["text"] for part in events(text.decode())] == [
        "old 0", "old 1", "old 2", "[DONE]",
    ]  # fmt: skip


def test_a_server_that_is_killed_leaves_no_program_and_the_next_removes_its_folder(tmp_path: Path) -> None:
    path, temporary = tmp_path / "models.yaml", tmp_path / "tmp"
    temporary.mkdir()
    models = [model("a", keep=1), model("b", keep=1)]
    path.write_text(json.dumps({"gpus": {"model": "cpu", "memory": "8GiB"}, "models": models}))
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", str(path), "--http", "127.0.0.1:0", "--json"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["http"].rpartition(":")[2])

        def states() -> list[Any]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/cotenant/status", timeout=PATIENCE_S) as got:
                return [(row["state"], row["pid"]) for row in json.load(got)["models"]]
        rows = until(states, lambda rows: {state for state, _ in rows} == {"resident"})
        server.kill()
    for _, pid in rows:
        until(lambda pid=pid: Path(f"/proc/{pid}").exists(), lambda there: not there)
    assert len(list(temporary.iterdir())) == 1
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.send_signal(signal.SIGTERM)
    assert not list(temporary.iterdir())


def test_what_is_wrong_with_the_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models:\n- {name: a, command: serve, memory: 1GiB}\n")
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    told = "line 2, field models[0].command: must contain {port}, for the port on which the program listens"
    assert done.stderr == f"cotenant: {path}, {told}\n"
    path.write_text("models:\n- {name: a, command: 'serve {port}', memory: 1GiB}\n")
    done = subprocess.run([*command, "--gpus", "2"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "--gpus: applies only to services files" in done.stderr


@pytest.mark.slow
def test_services_of_the_same_file_answer_on_the_same_door(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    content = {
        "gpus": {"count": 1, "model": "RTX2080Ti", "memory": "8GiB"}, "backend": "timed",
        "models": [model("a")], "services": [{"name": "resnet50", "rate_rps": 10, "slo_ms": 108}],
        "listen": {"http": "127.0.0.1:0", "grpc": "none"},
    }  # fmt: skip
    config = parse_models(content, path)
    assert config.services is not None
    services = build(parse_services(config.services, path), Options(http=None))
    with door(tmp_path, model("a"), services=services) as it:
        tensor = {"name": "INPUT", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
        assert it.ask({"inputs": [tensor]}, "/v2/models/resnet50/infer")[2]["model_name"] == "resnet50"
        assert it.chat("a")[2]["model"] == "a"
        assert it.ask(None, "/v2/health/ready")[0] == 200
        assert "cotenant_server_received_total" in it.ask(None, "/metrics")[2]
