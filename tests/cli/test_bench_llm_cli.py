"""`cotenant bench llm --url`: the simulator against an engine that somebody else runs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import base_install
import pytest
from command import command, cotenant
from timed_llm import running

from cotenant.core.partial import Partial
from cotenant.profiles.llm.files import add_row
from cotenant.profiles.llm.profile import LlmProfile, Step, StepTimes
from cotenant.timed_llm.engine import Clock

TIMES = StepTimes(2e-3, 1e-5, 0, 2e-3, 1e-4, 1e-7)
REAL = LlmProfile("chat", TIMES, kv_tokens=4000, max_sequences=4, max_context=300)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    add_row(tmp_path / "real.json", REAL)
    asked = command("timed-llm", "--model", "chat", "--port", "0", "--profile", tmp_path / "real.json")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)


def test_a_given_engine_is_compared_with_its_profile(engine: str, tmp_path: Path) -> None:
    profile = tmp_path / "llm.json"
    asked = ("profile", "llm", engine, "--model", "chat", "--rounds", 2, "--max-sequences", 4, "--out", profile)
    first, second, *_ = cotenant(*asked).err.splitlines()
    rounds = "one to warm up, which does not count, and 2 that count"
    assert first == f"chat: 27 measurements, 9 in each of 3 rounds: {rounds}"
    assert re.fullmatch(r"chat: the warm-up round has ended, about [\d.]+ m?s left", second)
    row = json.loads(profile.read_text())["models"]["chat"]
    assert {point.get("sequences") for point in row["measured"]["points"]} == {None, 1, 2, 4}
    done = cotenant(
        "bench", "llm", "--url", engine, "--model", "chat", "--profile", profile, "--endpoint", "chat",
        "--rates", "20,40", "--prompt", "50-400", "--output", "2-8", "--duration", "1s", "--json",
    )  # fmt: skip
    found = json.loads(done.out)
    assert (found["url"], found["worst_residual"]) == (engine, row["measured"]["worst_residual"])
    assert found["profile_ms"]["per_token"] == pytest.approx(row["prefill_ms"]["per_token"])
    assert [x["load"] for x in found["rows"]] == ["20/s", "40/s"]
    for each in found["rows"]:
        assert min(each["requests"], each["left_out"]) > 0
        assert set(each["live_over_simulated"]) == {"ttft_ms", "tpot_ms"}
    assert math.isfinite(found["worst_deviation"])


class Holding(Clock):
    """A clock that stands still as soon as a file has another content than `seen`, until `go` is set."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, b""
        self.held, self.go = threading.Event(), threading.Event()

    def run(self, step: Step, began_s: float, seconds: float) -> float:
        content = self.path.read_bytes() if self.path.exists() else b""
        if content != self.seen and not self.go.is_set():
            self.seen = content
            self.held.set()
            assert self.go.wait(60)
            self.go.clear()
            began_s = time.monotonic()
        return super().run(step, began_s, seconds)


def test_a_killed_measurement_continues_with_the_same_command(tmp_path: Path) -> None:
    out, kept = tmp_path / "llm.json", tmp_path / "llm.json.partial"
    add_row(out, LlmProfile("other", TIMES))
    before, device = out.read_text(), Holding(kept)
    with running(REAL, device) as port:
        asked = ["profile", "llm", f"http://127.0.0.1:{port}", "--model", "chat", "--max-sequences", "4"]
        asked += ["--rounds", "2", "--out", str(out)]
        for number in (signal.SIGKILL, signal.SIGINT):
            # a shell that runs tests in the background ignores SIGINT, also for its children
            heed = ["env", "--default-signal=INT"]
            with subprocess.Popen([*heed, *command(*asked)], stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                assert device.held.wait(60)
                process.send_signal(number)
                err = process.stderr.read()
            assert err.startswith("chat: continues with ") == (number == signal.SIGINT)
            assert out.read_text() == before
            rows = json.loads(kept.read_text())["rows"]
            assert sum(map(len, rows.values())) == 1 + (number == signal.SIGINT)
            device.held.clear()
            if number == signal.SIGINT:
                device.path = tmp_path / "none"
                device.seen = b""
            device.go.set()
        assert f"what was measured is in {kept}: the same command continues with it" in err
        done = cotenant(*asked)
    assert done.err.startswith(f"chat: continues with {sum(map(len, rows.values()))} measurements from {kept}; ")
    assert not kept.exists()
    content = json.loads(out.read_text())["models"]
    assert list(content) == ["other", "chat"]
    # a request that decodes beside prompts may end too early, so such points may have fewer measurements
    alone = [p for p in content["chat"]["measured"]["points"] if not ("tokens" in p and "sequences" in p)]
    assert len(alone) == 6
    assert min(point["times"] for point in alone) >= 2


def test_an_engine_with_too_small_limits_is_not_measured(engine: str, tmp_path: Path) -> None:
    """With contexts of 64 tokens and at most two requests there are two points of decode."""
    out = tmp_path / "llm.json"
    done = cotenant("profile", "llm", engine, "--model", "chat", "--max-sequences", 2, "--out", out)
    assert done.code == 2
    assert done.err.startswith("cotenant: the limits leave too few measurements for a profile: requests of up to 300 ")
    assert "--max-sequences 2;" in done.err
    assert list(tmp_path.glob("llm.json*")) == []


def test_measurements_of_another_engine_or_with_other_settings_are_not_used(engine: str, tmp_path: Path) -> None:
    out = tmp_path / "llm.json"
    kept = Partial(out, {"url": "http://127.0.0.1:9", "model": "chat", "rounds": 5, "gpu": ""})
    kept.put("prefill 1 x 16", [[0.1, {"tokens": 16, "pairs": 136}, 99.0]])
    done = cotenant(
        "profile", "llm", engine, "--model", "chat", "--rounds", 2, "--max-sequences", 4, "--out", out
    )  # fmt: skip
    first, second, *_ = done.err.splitlines()
    other = "url, engine, rounds, endpoint, kv-tokens, step-tokens, max-sequences, seed"
    assert first == f"{kept.path} is not used and is replaced: it was measured with another {other}"
    assert second.startswith("chat: 27 measurements")
    assert max(row["ms"] for row in json.loads(out.read_text())["models"]["chat"]["measured"]["points"]) < 50_000


def test_the_libraries_for_tables_and_solvers_are_not_needed(engine: str, tmp_path: Path) -> None:
    hidden = ("polars", "numba", "highspy")
    code = f"import base_install, cotenant.cli.main as c; base_install.hide(*{hidden}); c.main()"
    path = os.pathsep.join([str(Path(base_install.__file__).parent), *sys.path])
    (tmp_path / "models.yaml").write_text("models: [{name: chat, command: 'x --port {port}', memory: 1GiB}]")
    asked = ["--profile", str(tmp_path / "real.json"), "--prompt", "100", "--output", "4", "--duration", "1s"]
    for words, printed in (
        (["bench", "llm", "--url", engine, "--model", "chat", "--rates", "10", *asked], "largest deviation"),
        (["simulate", "--serving", str(tmp_path / "models.yaml"), "--rate", "10", *asked], "TTFT"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, printed in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "give both --url and --model, or neither"),
        (["--model", "chat"], "give both --url and --model, or neither"),
        (["--url", "http://127.0.0.1:9", "--model", "chat"], "run `cotenant profile llm` on the engine first"),
        (["--endpoint", "other"], "'other' is not chat or completions"),
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str], said: str) -> None:
    done = cotenant("bench", "llm", *options)
    assert (done.code, said in done.err) == (2, True), done.err


def test_too_long_requests_are_refused_before_the_engine_is_measured() -> None:
    done = cotenant("bench", "llm", "--rates", "1", "--prompt", "99999", "--duration", "9s")
    assert (done.code, "no request of 1/s fits into the 32,768 tokens" in done.err) == (2, True), done.err
    assert "measuring" not in done.err


def test_all_requests_may_be_too_long(engine: str, tmp_path: Path) -> None:
    asked = ["--url", engine, "--model", "chat", "--profile", tmp_path / "real.json", "--rates", "5"]
    done = cotenant("bench", "llm", *asked, "--prompt", "400", "--duration", "1s")
    assert (done.code, "no request of 5/s fits into the 300 tokens" in done.err) == (2, True), done.err
    done = cotenant("bench", "llm", *asked[:2], "--model", "code", *asked[4:])
    assert (done.code, "real.json, field profile: has the profile of chat, not of code" in done.err) == (2, True)
    asked[3] = "other"
    add_row(tmp_path / "other.json", replace(REAL, name="other"))
    asked[5] = tmp_path / "other.json"
    done = cotenant("bench", "llm", *asked)
    assert (done.code, "has no model 'other'; it has chat" in done.err) == (2, True), done.err


def test_a_file_that_is_no_profile_is_refused_before_the_measurements(tmp_path: Path) -> None:
    out = tmp_path / "models.yaml"
    out.write_text("models: []\n")
    done = cotenant("profile", "llm", "http://127.0.0.1:1", "--model", "chat", "--out", out)
    assert (done.code, "is not JSON" in done.err, "reach" in done.err) == (2, True, False)
