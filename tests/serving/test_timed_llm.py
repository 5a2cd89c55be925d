"""The timed engine: OpenAI's API as clients expect it, answers that name model and prompt, steps that batch."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import struct
import subprocess
import threading
from dataclasses import replace

import pytest
from command import command
from timed_llm import NO_TIME, Instant, answer_text, ask, running, stream
from waiting import wait_for

from cotenant.profiles.llm.profile import LlmProfile
from cotenant.workloads.llm.text import digest, fault_of, prompt_text

PROFILE = LlmProfile("chat", NO_TIME, kv_tokens=400, step_tokens=128, max_context=300)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say hello to me"}]
ASKED = "be brief\nsay hello to me"


def test_an_answer_names_its_model_and_its_prompt_in_every_token() -> None:
    with running(PROFILE, Instant()) as port:
        status, whole = ask(port, CHAT, {"model": "chat", "messages": HELLO, "max_tokens": 3})
        assert status == 200
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": answer_text("chat", ASKED, 3)}
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
        name = digest(ASKED)
        assert answer_text("chat", ASKED, 3) == f"chat/{name}:0 chat/{name}:1 chat/{name}:2"
        _, text = ask(port, COMPLETION, {"model": "chat", "prompt": [5, 6, 7], "max_tokens": 2})
        assert text["choices"][0]["text"] == answer_text("chat", "5 6 7", 2)
        assert text["usage"]["prompt_tokens"] == 3
        _, open_end = ask(port, CHAT, {"model": "chat", "messages": HELLO})
        assert (open_end["usage"]["completion_tokens"], open_end["choices"][0]["finish_reason"]) == (32, "stop")


def test_a_stream_is_the_same_answer_in_events() -> None:
    with running(PROFILE, Instant()) as port:
        body = {"model": "chat", "messages": HELLO, "max_tokens": 4, "stream_options": {"include_usage": True}}
        events = stream(port, CHAT, body)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {e["object"] for e in events} == {"chat.completion.chunk"}
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
        assert text == answer_text("chat", ASKED, 4)
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 5 + ["length"]
        assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 4)
        plain = stream(port, COMPLETION, {"model": "chat", "prompt": "a b", "max_tokens": 2})
        assert "".join(e["choices"][0]["text"] for e in plain) == answer_text("chat", "a b", 2)
        assert all("usage" not in e for e in plain)


def test_models_health_and_embeddings() -> None:
    with running(PROFILE, Instant()) as port:
        assert ask(port, "/health") == (200, None)
        assert [m["id"] for m in ask(port, "/v1/models")[1]["data"]] == ["chat"]
        _, one = ask(port, "/v1/embeddings", {"model": "chat", "input": "a b c"})
        _, two = ask(port, "/v1/embeddings", {"model": "chat", "input": ["a b c", "d"], "encoding_format": "base64"})
        vector = one["data"][0]["embedding"]
        assert len(vector) == 64
        assert max(map(abs, vector)) <= 1
        packed = struct.unpack("<64f", base64.b64decode(two["data"][0]["embedding"]))
        assert packed == pytest.approx(vector)
        assert two["data"][1]["embedding"] != two["data"][0]["embedding"]
        assert two["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, {"model": "other", "messages": HELLO}, 404, "model_not_found"),
        (CHAT, {"messages": HELLO}, 400, None),
        (CHAT, {"model": "chat", "messages": []}, 400, None),
        (CHAT, {"model": "chat", "messages": HELLO, "max_tokens": 0}, 400, None),
        (CHAT, {"model": "chat", "messages": HELLO, "max_tokens": "7"}, 400, None),
        (CHAT, {"model": "chat", "messages": HELLO, "stream": "yes"}, 400, None),
        (CHAT, {"model": "chat", "messages": HELLO, "n": 2}, 400, None),
        (COMPLETION, {"model": "chat", "prompt": ""}, 400, None),
        (COMPLETION, {"model": "chat", "prompt": "a", "max_tokens": 300}, 400, "context_length_exceeded"),
        ("/v1/embeddings", {"model": "chat", "input": []}, 400, None),
        ("/v1/audio", {"model": "chat"}, 404, None),
    ],
)
def test_refusals_have_the_api_s_form(path: str, body: dict[str, object], status: int, code: str | None) -> None:
    with running(PROFILE, Instant()) as port:
        found, content = ask(port, path, body)
        assert (found, content["error"]["code"]) == (status, code)
        assert content["error"]["message"]


def test_requests_that_wait_together_share_steps() -> None:
    device = Instant(hold=1)
    texts = ("a", "b b", "c c c")
    answers: dict[str, str] = {}

    def one(port: int, text: str) -> None:
        content = ask(port, COMPLETION, {"model": "chat", "prompt": text, "max_tokens": 3})[1]
        answers[text] = content["choices"][0]["text"]

    with running(PROFILE, device) as port:
        threads = [threading.Thread(target=one, args=(port, text)) for text in texts]
        threads[0].start()
        assert device.held.wait(60)
        for thread in threads[1:]:
            thread.start()
        wait_for(lambda: ask(port, "/load")[1] == {"server_load": 3})
        device.go.set()
        for thread in threads:
            thread.join(60)
    assert answers == {text: answer_text("chat", text, 3) for text in texts}
    assert [(s.tokens, s.sequences) for s in device.steps] == [(1, 0), (5, 1), (0, 3), (0, 2)]


TOO_MANY = 20_000  # these steps take no time; the server must notice long before the last one that the client has gone


def test_a_client_that_hangs_up_leaves_the_batch() -> None:
    device = Instant(hold=3)
    with running(replace(PROFILE, kv_tokens=2 * TOO_MANY, max_context=2 * TOO_MANY), device) as port:
        made = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": "chat", "prompt": "a", "max_tokens": TOO_MANY, "stream": True}
        made.request("POST", COMPLETION, json.dumps(body))
        assert device.held.wait(60)
        made.close()
        wait_for(lambda: ask(port, "/load")[1] == {"server_load": 1})
        device.go.set()
        wait_for(lambda: ask(port, "/load")[1] == {"server_load": 0})
    assert len(device.steps) < TOO_MANY


def test_a_fault_names_the_first_wrong_token() -> None:
    text = answer_text("chat", "a b", 3)
    assert fault_of("chat", "a b", text) is None
    assert fault_of("chat", "a b", text[: len(answer_text("chat", "a b", 2))]) is None
    other = answer_text("chat", "a b", 1) + " " + answer_text("code", "a b", 2).split()[1]
    assert (fault_of("chat", "a b", other) or "").startswith("token 1 is 'code/")
    assert len(prompt_text(50, "x").split()) == 50
    assert prompt_text(50, "x") != prompt_text(50, "y")


def test_the_command_says_where_it_listens_and_ends_by_sigterm() -> None:
    asked = command("timed-llm", "--model", "m", "--port", "0", "--speed", "100")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.rpartition(":")[2].removesuffix("/v1\n"))
        assert ask(port, COMPLETION, {"model": "m", "prompt": "a", "max_tokens": 5})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
