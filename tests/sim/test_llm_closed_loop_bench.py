"""bench/gpu/llm_closed_loop.py: clients of a closed loop in virtual time, by hand and against a plain simulator."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from llm_oracle import one_model

from cotenant.profiles.llm.files import add_row
from cotenant.profiles.llm.profile import LlmProfile, StepTimes

GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"
# a prompt of 10 tokens takes 20 ms, a decode step 4 ms
PROFILE = LlmProfile("a", StepTimes(0.010, 0.001, 0, 0.004, 0, 0), 10_000, 1000, 8, 500)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module("llm_closed_loop")


def test_one_client_by_hand(loop: ModuleType) -> None:
    live = {"in_flight": 1, "seconds": 8.0, "prompt": 10, "output": 40}
    row = loop.simulated(PROFILE, live)
    assert (row["ttft_ms"], row["ttft_p90_ms"], row["tpot_ms"], row["tpot_p90_ms"]) == (20, 20, 4, 4)
    # 40 tokens take 20 + 39 x 4 ms; the lengths are 30 to 50 tokens, and the interval cuts two answers
    assert row["tokens_per_s"] == pytest.approx(40 / 0.176, rel=0.02)
    assert row["ended"] == pytest.approx(6 / 0.176, abs=2)


@pytest.mark.parametrize(("count", "outside_s"), [(1, 0.05), (2, 0.0), (7, 0.0), (7, 0.05), (12, 0.0)])
def test_every_token_comes_when_a_plain_simulator_says(loop: ModuleType, count: int, outside_s: float) -> None:
    times = StepTimes(0.007, 0.0011, 0.00001, 0.013, 0.0007, 0.00003)
    profile = LlmProfile("a", times, 400, 60, 8, 200, request_s=outside_s)
    found = loop.closed(profile, count, 3.0, 30, 20)
    assert len(found) > 2 * count
    # each is due at the end of a step, which the plain simulator computes with another rounding error
    plain = one_model(profile, [(one.sent_s + outside_s - 1e-9, 30, one.output) for one in found])
    for one, other in zip(found, plain, strict=True):
        within = [at for at in other.tokens_s if at <= 3.0]
        assert one.answer.stamps == pytest.approx(within)
        assert one.answer.whole == (len(within) == one.output)
    for number in range(count):
        own = [one for one in found if one.client == number]
        assert own[0].sent_s == 0.0
        assert all(after.sent_s == one.answer.stamps[-1] for one, after in pairwise(own))


def test_the_script_prints_deviations_of_rows_of_one_model_alone(loop: ModuleType, tmp_path: Path) -> None:
    given = {"step": "alone", "in_flight": 2, "seconds": 4.0, "prompt": 10, "output": 40}
    live = loop.simulated(PROFILE, given)
    live["tokens_per_s"] /= 1.25
    rows = [{"step": "alone", "ready_s": 1.0}, given | live, {"step": "mps", "in_flight": 2}]
    add_row(tmp_path / "profile.json", PROFILE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, GPU / "llm_closed_loop.py", tmp_path / "profile.json", tmp_path / "rows.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [row] = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["in_flight"], row["requests"]) == (2, live["first_tokens"])
    assert row["tokens_per_s"]["deviation"] == pytest.approx(0.25, abs=1e-3)
    assert row["ttft_ms"] == {"simulated": live["ttft_ms"], "live": live["ttft_ms"], "deviation": 0}
