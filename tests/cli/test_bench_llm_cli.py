"""`cotenant bench llm --url`: the simulator against an engine that somebody else runs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import base_install
import pytest
from command import command, cotenant

from cotenant.profiles.llm.files import add_row
from cotenant.profiles.llm.profile import LlmProfile, StepTimes

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
