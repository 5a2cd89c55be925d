"""Measures the TPOT of a model beside two busy ones on the software GPU, with and without a `request` in models.yaml.

pytest -q -s bench/test_models_request_bench.py     (COTENANT_REQUEST_S=8 seconds a load)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

SECONDS = float(os.environ.get("COTENANT_REQUEST_S", "8"))
COMMAND = [sys.executable, "-m", "cotenant.cli.main"]
# a decode step of one request takes 8.1 ms alone, one of 16 requests 9.6 ms
TIMES = {"prefill_ms": {"base": 8, "per_token": 0.02}, "decode_ms": {"base": 8, "per_sequence": 0.1}}
REQUEST = 0.6


@contextlib.contextmanager
def serving(folder: Path, mechanism: str, request: float) -> Iterator[str]:
    """A server of three models that all fit the software GPU; the first has the request. Yields its address."""
    folder.mkdir()
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"format": "cotenant-llm-profile-1", "models": {"any": TIMES}}))
    engine = f"timed-llm --profile {profile} --port {{port}} --device cuda --memory 100MiB --model"
    rows = [
        {"name": name, "command": " ".join([*COMMAND, engine, name]), "memory": "256MiB", "keep": 1}
        for name in ("chat", "code", "more")
    ]
    if request:
        rows[0]["request"] = request
    content = {"gpus": {"model": "soft", "memory": "1GiB", "mechanism": mechanism}, "models": rows}
    (folder / "models.yaml").write_text(yaml.safe_dump(content))
    environment = os.environ | {"COTENANT_SOFTGPU_STATE": str(folder / "softgpu")}
    words = [*COMMAND, "serve", str(folder / "models.yaml"), "--http", "127.0.0.1:0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["http"]
        finally:
            server.send_signal(signal.SIGTERM)


def load(url: str, model: str, clients: int, seconds: float) -> subprocess.Popen[str]:
    """Begin to keep `clients` requests of 64 prompt and 64 output tokens in flight at a model."""
    words = ["--arrivals", f"closed:{clients}", "--prompt", "64", "--output", "64", "--duration", f"{seconds}s"]
    asked = [*COMMAND, "load", "--openai", url, "--model", model, *words, "--json"]
    return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(begun: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = begun.communicate()
    assert begun.returncode == 0, err
    (row,) = json.loads(out)["models"].values()
    found: dict[str, Any] = row
    return found


@pytest.mark.parametrize("mechanism", ["slices", "time"])
def test_a_request_bounds_the_time_per_token(tmp_path: Path, mechanism: str) -> None:
    found = {}
    for request in (0.0, REQUEST):
        with serving(tmp_path / f"{request}", mechanism, request) as url:
            alone = result(load(url, "chat", 1, SECONDS / 2))["tpot_ms"]["p50"]
            others = [load(url, name, 16, SECONDS + 4) for name in ("code", "more")]
            time.sleep(2)  # until their requests are in flight
            beside = result(load(url, "chat", 1, SECONDS))
            rates = [result(each)["output_tokens_per_s"] for each in others]
        tpot = beside["tpot_ms"]
        found[request] = (alone, tpot["p50"])
        print(
            f"{mechanism}, request {request:.0%}: TPOT {alone:.1f} ms alone, beside others {tpot['p50']:.1f} "
            f"(p99 {tpot['p99']:.1f}), TTFT {beside['ttft_ms']['p50']:.0f} ms; others {sum(rates):.0f} tokens/s"
        )
    alone, without = found[0.0]
    assert without > 2.2 * alone  # each of three has about a third
    alone, tpot = found[REQUEST]
    assert tpot < 1.25 * alone / REQUEST
