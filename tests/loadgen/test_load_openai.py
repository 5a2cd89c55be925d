"""The load generator against a timed engine and against servers that do what they should not."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from command import cotenant
from timed_llm import NO_TIME, Instant, answer_text, running

from cotenant.core.metrics.tokens import Target as Promise
from cotenant.core.metrics.tokens import TokenTimes
from cotenant.loadgen.loop import Loop
from cotenant.loadgen.model_list import ask_models
from cotenant.loadgen.openai import OpenAiResult, OpenAiTest, grouped, run_openai
from cotenant.loadgen.target import parse_target
from cotenant.profiles.llm.profile import LlmProfile
from cotenant.report.llm import build_page, page_data
from cotenant.workloads.llm.text import digest, prompt_of
from cotenant.workloads.llm.trace import make_trace

PROFILE = LlmProfile("chat", NO_TIME)


def load(port: int, count: int = 6, endpoint: str = "chat", **more: object) -> OpenAiResult:
    trace = make_trace("test", np.arange(count) * 0.01, [0] * count, [12] * count, range(1, count + 1), ("chat",))
    target = parse_target(f"http://127.0.0.1:{port}/v1")
    # type: ignore[arg-type]
    return run_openai(OpenAiTest(target, trace, (Promise("chat", 60_000, 60_000),), endpoint, check=True, **more))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_tokens_are_counted_and_answers_checked(endpoint: str) -> None:
    with running(PROFILE, Instant()) as port:
        found = load(port, endpoint=endpoint)
        assert ask_models(parse_target(f"http://127.0.0.1:{port}")) == ["chat"]
    assert found.times.output.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.times.prompt.tolist() == [12] * 6
    assert (found.wrong, found.reasons) == (0, {})
    row = found.summary()["models"]["chat"]
    assert (row["answered"], row["attainment"], row["failed"], row["refused"]) == (6, 1.0, 0, 0)
    assert (found.times.first_s <= found.times.last_s).all()
    assert np.isnan(found.times.tpot_ms[0])
    assert page_data(found)["models"][0]["ttft"]["promise"] == 60_000


@contextmanager
def canned(answer: Callable[[int, dict[str, object]], tuple[int, bytes]], get: int = 404) -> Iterator[int]:
    """A server that gives request number n (from 0) what `answer` says, then closes the connection. `get`: the status
    of its answers to GET."""
    numbers = iter(range(1000))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, raw = answer(next(numbers), body)
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            self.send_response(get)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chunks(model: str, prompt: str, tokens: int, end: bytes = b"data: [DONE]\n\n") -> bytes:
    words = answer_text(model, prompt, tokens)
    event = {"choices": [{"index": 0, "delta": {"content": words}, "finish_reason": None}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    return b"".join(b"data: %b\n\n" % json.dumps(x).encode() for x in (event, usage)) + end


def test_what_is_no_answer_fails_with_its_reason() -> None:
    def answer(number: int, body: dict[str, object]) -> tuple[int, bytes]:
        prompt, tokens = prompt_of(body), int(str(body["max_tokens"]))
        error = b'{"error": {"message": "the queue is full"}}'
        return [
            (200, chunks("chat", prompt, tokens)),
            (200, chunks("code", prompt, tokens)),
            (200, chunks("chat", "another prompt", tokens)),
            (200, chunks("chat", prompt, tokens, end=b"")),
            (429, error),
            (200, b"data: " + error + b"\n\n"),
            (200, b"data: {broken\n\n"),
        ][number]

    with canned(answer) as port:
        found = load(port, 7, connections=1)
    assert found.outcome.tolist() == [1, 0, 0, 0, 4, 0, 0]
    assert found.ends == ["ok", "wrong", "wrong", "broken", "refused", "broken", "broken"]
    assert found.times.output.tolist() == [1, 2, 3, 1, 0, 0, 0], "tokens that came, not those that were requested"
    assert [row["outcome"] for row in csv.DictReader(found.times.csv(["chat"], found.ends).splitlines())] == found.ends
    reasons = list(found.reasons)
    assert found.wrong == 2
    assert any("token 0 is 'code/" in r for r in reasons)
    assert any(f"'chat/{digest('another prompt')}:0'" in r for r in reasons)
    assert "status 429: the queue is full" in reasons
    assert sum("closed the connection" in r or "broke off" in r for r in reasons) >= 1
    row = found.summary()["models"]["chat"]
    assert (row["answered"], row["refused"], row["failed"]) == (1, 1, 5)
    assert row["attainment"] == pytest.approx(1 / 7)
    assert row["ends"] == {"ok": 1, "wrong": 2, "broken": 3, "refused": 1}
    curve = page_data(found)["models"][0]["ttft"]
    assert curve["y"][-1] == pytest.approx(1 / 7, abs=1e-4), "the curve ends at answered / requests"
    page = build_page(found)
    assert "<td>60000 / 60000</td>" in page
    assert "status 429: the queue is full" in page
    assert grouped(found.reasons)[f"{reasons[0]} (the first of them)"] == 2


def test_tokens_of_an_answer_without_their_number_are_those_of_the_limit_or_its_events() -> None:
    """Answers of 1 to 4 tokens in one event each. The second is cut by max_tokens, the third ends by itself, and the
    number of tokens comes with the fourth only."""

    def answer(number: int, body: dict[str, object]) -> tuple[int, bytes]:
        whole = chunks("chat", prompt_of(body), int(str(body["max_tokens"])))
        text, usage, done = whole.split(b"\n\n")[:3]
        end = {1: b"length"}.get(number, b"stop")
        text = text.replace(b'"finish_reason": null', b'"finish_reason": "%b"' % end)
        return 200, b"\n\n".join([text, usage, done] if number == 3 else [text, done]) + b"\n\n"

    with canned(answer) as port:
        found = load(port, 4, connections=1)
    assert found.reasons == {}
    assert found.times.output.tolist() == [1, 2, 1, 4]
    assert (found.uncounted, found.summary()["uncounted"]) == (2, 2)
    with canned(answer) as port:
        words = ("--model", "chat", "--rate", 20, "--arrivals", "constant", "--output", 5, "--duration", "100ms")
        done = cotenant("load", "--openai", f"http://127.0.0.1:{port}", *words)
    assert "note: 1 answer came without a number of tokens, so events were counted, which may have several" in done.err


def test_wrong_answers_are_one_reason() -> None:
    given = {"status 429: x": 1, "a wrong answer: token 0": 2, "a wrong answer: token 1": 3}
    assert grouped(given) == {"a wrong answer: token 0 (the first of them)": 5, "status 429: x": 1}
    assert grouped({"a wrong answer: token 0": 2}) == {"a wrong answer: token 0": 2}


def test_a_run_that_is_stopped_has_the_results_so_far() -> None:
    trace = make_trace("test", [0.0, 0.0, 3600.0], [0, 0, 0], [12] * 3, [2] * 3, ("chat",))
    with running(PROFILE, Instant()) as port:
        test = OpenAiTest(parse_target(f"http://127.0.0.1:{port}"), trace, (Promise("chat"),))

        def tell(loop: Loop) -> None:
            if loop.done == 2:
                loop.stop()

        found = run_openai(test, tell)
    assert (found.ends, found.times.output.tolist()) == (["ok", "ok"], [2, 2])
    assert found.duration_s < 3600
    assert found.summary()["models"]["chat"]["attainment"] is None, "there is no SLO"


def test_an_interrupt_reports_what_was_answered(tmp_path: Path) -> None:
    csv_file = tmp_path / "out.csv"
    asked = threading.Event()

    def answer(number: int, body: dict[str, object]) -> tuple[int, bytes]:
        asked.set()
        return 200, chunks("chat", prompt_of(body), 2)

    with canned(answer) as port:
        command = [sys.executable, "-m", "cotenant", "load", "--openai", f"http://127.0.0.1:{port}", "--model", "chat",
                   "--arrivals", "closed:1", "--duration", "1h", "--output", "2", "--csv", csv_file]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert asked.wait(120)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "chat" in out
    assert "interrupted: waiting" in err
    assert csv_file.read_text().splitlines()[1].endswith(",ok")


def test_a_server_with_tokens_asks_for_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("wrong\n")
    with canned(lambda number, body: (200, b""), get=401) as port:
        url = f"http://127.0.0.1:{port}"
        nothing = cotenant("load", "--openai", url, "--rate", "1")
        wrong = cotenant("load", "--openai", url, "--rate", "1", "--model", "chat", "--token", token)
    assert (nothing.code, "asks for a token: give --token FILE" in nothing.err) == (1, True)
    assert (wrong.code, "refuses this token" in wrong.err) == (1, True)


def test_load_without_an_address_names_both_kinds() -> None:
    done = cotenant("load", "--rate", "1")
    assert (done.code, "--url" in done.err, "--openai" in done.err) == (2, True, True)


def test_clients_send_one_request_after_the_other() -> None:
    trace = make_trace("test", np.zeros(2), [0, 0], [12, 7], [3, 5], ("chat",))
    with running(PROFILE, Instant()) as port:
        target = parse_target(f"http://127.0.0.1:{port}")
        found = run_openai(OpenAiTest(target, trace, (Promise("chat"),), check=True, clients=3, duration_s=0.3))
    sent, count = found.times.due_s, len(found.outcome)
    assert (found.wrong, found.reasons, count >= 3) == (0, {}, True)
    assert (sent[:3] == 0).all()  # three requests start at once, and each other one when an earlier one has ended
    assert sorted(found.times.output[:2].tolist()) == [3, 5]
    assert abs(int((found.times.output == 3).sum()) - count / 2) <= 0.5  # the lengths in the trace are used in turn
    ends = np.sort(found.times.last_s)
    assert (sent[3:] >= ends[: count - 3] - 1e-6).all()
    assert found.test.trace.summary()["requests"] == count


def test_a_model_that_the_server_does_not_list_is_refused_before_the_load() -> None:
    with running(PROFILE, Instant()) as port:
        url = f"http://127.0.0.1:{port}/v1"
        done = cotenant("load", "--openai", url, "--model", "chat", "--model", "nope", "--rate", "1")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"cotenant: --model: {url} has no model 'nope'; it has chat\n"


def test_a_server_without_a_list_of_models_gets_the_load() -> None:
    def answer(number: int, body: dict[str, object]) -> tuple[int, bytes]:
        return 200, chunks("nope", prompt_of(body), int(str(body["max_tokens"])))

    with canned(answer) as port:
        asked = ("load", "--openai", f"http://127.0.0.1:{port}", "--model", "nope", "--rate", "20", "--json")
        done = cotenant(*asked, "--arrivals", "constant", "--duration", "100ms", "--prompt", "9", "--output", "3")
    assert done.code == 0, done.err
    assert json.loads(done.out)["models"]["nope"]["answered"] == 2


def fake(load_of: Callable[[OpenAiTest], float], most: float) -> Callable[..., OpenAiResult]:
    """In place of run_openai: first tokens come after 10 ms up to a load of `most`, after 10 s above it."""

    def run(test: OpenAiTest, *more: object) -> OpenAiResult:
        count = len(test.trace)
        late = 10.0 if load_of(test) > most else 0.01
        due, ok = test.trace.times_s, np.ones(count, np.uint8)
        times = TokenTimes(test.trace.model, due, due + late, due + late + 1, test.trace.prompt, test.trace.output)
        return OpenAiResult(test, times, ok, due, {}, test.duration_s, 0, ["ok"] * len(ok))

    return run


@pytest.mark.parametrize(
    ("asked", "load_of", "most", "key"),
    [
        (("--arrivals", "closed:8"), lambda test: test.clients, 11, "in_flight"),
        (("--rate", "50", "--arrivals", "constant"), lambda test: len(test.trace) / test.duration_s, 90, "rate_rps"),
    ],
)
def test_the_largest_load_is_found(
    asked: tuple[str, ...],
    load_of: Callable[[OpenAiTest], float],
    most: float,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cotenant.loadgen.openai.run_openai", fake(load_of, most))
    with running(PROFILE, Instant()) as port:
        command = ("load", "--openai", f"http://127.0.0.1:{port}", "--model", "chat", *asked, "--duration", "20s")
        done = cotenant(*command, "--find-max", "--probe", "10s", "--ttft", "500", "--json")
        assert "no SLO to meet" in cotenant(*command, "--find-max").err
    assert done.code == 0, done.err
    content = json.loads(done.out)
    assert most / 1.051 <= content[key] <= most
    assert (content["confirmed"], content["open_ended"], content["run"]["total"]["attainment"]) == (True, False, 1.0)
    assert "missed" in done.err


def test_what_no_load_keeps() -> None:
    with running(PROFILE, Instant()) as port:
        url = f"http://127.0.0.1:{port}"
        search = ("load", "--openai", url, "--find-max", "--ttft", "1e-6", "--probe", "100ms", "--output", "2")
        done = cotenant(*search, "--arrivals", "closed:2")
        assert (done.code, "no load down to x0.5" in done.err) == (1, True)
        assert "1 in flight" in done.err
        rate = cotenant(*search, "--arrivals", "closed:2", "--rate", "1")
    assert "rate: a closed loop has no rate; leave --rate out" in rate.err


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    html, rows = tmp_path / "page.html", tmp_path / "out.csv"
    with running(PROFILE, Instant()) as port:
        asked = ("load", "--openai", f"http://127.0.0.1:{port}", "--rate", "50", "--duration", "200ms", "--prompt", "5",
                 "--output", "3", "--arrivals", "constant", "--seed", "4")  # fmt: skip
        done = cotenant(*asked, "--check", "--ttft", "60000", "--json", "--html", html, "--csv", rows)
        assert done.code == 0, done.err
        wrong = cotenant(*asked, "--tpot", "x=5")
    content = json.loads(done.out)
    assert (content["models"]["chat"]["requests"], content["total"]["attainment"], content["seed"]) == (10, 1.0, 4)
    assert len(rows.read_text().splitlines()) == 11
    assert "Language models under load" in html.read_text()
    assert "tpot: 'x=5' is not MS, or NAME=MS with a name of chat" in wrong.err
    nobody = cotenant("load", "--openai", "http://127.0.0.1:1", "--rate", "1")
    assert (nobody.code, "cannot reach" in nobody.err) == (1, True)
