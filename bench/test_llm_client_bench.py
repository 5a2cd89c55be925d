"""Compares `cotenant load --openai` with AIPerf. Both send requests at the same times to the same timed engine,
directly and through the models endpoint. Prints percentiles with 95 % intervals (bootstrap).

AIPERF=/path/to/aiperf pytest -q -s bench/test_llm_client_bench.py     (aiperf in an environment of its own)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.bench.llm_fidelity import timed_engine
from cotenant.core.metrics.tokens import Target as Promise
from cotenant.loadgen.openai import OpenAiTest, run_openai
from cotenant.loadgen.target import parse_target
from cotenant.profiles.llm.profile import roofline
from cotenant.workloads.llm.text import WORDS
from cotenant.workloads.llm.trace import make_trace

AIPERF = os.environ.get("AIPERF") or shutil.which("aiperf")
PROMPT, OUTPUT, COUNT = 500, 64, 90
TOKENIZER = """
import json, sys, tokenizers, transformers
words = {"[UNK]": 0, **{w: i + 1 for i, w in enumerate(json.loads(sys.argv[1]))}}
made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
same = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "[UNK]")
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **same)
fast.save_pretrained("tokenizer")
"""


def aiperf(url: str, folder: Path) -> list[dict[str, Any]]:
    """The rows that AIPerf writes, one per request."""
    assert AIPERF is not None
    python = Path(AIPERF).with_name("python")
    made = [python, "-c", TOKENIZER, json.dumps(WORDS)]
    subprocess.run(made, cwd=folder, check=True, capture_output=True, timeout=120)
    command = [
        AIPERF, "profile", "-m", "timed", "--url", url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming",
        "--request-count", str(COUNT), "--request-rate", "3", "--random-seed", "42", "--use-server-token-count",
        "--synthetic-input-tokens-mean", str(PROMPT), "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean",
        str(OUTPUT), "--output-tokens-stddev", "0", "--tokenizer", "./tokenizer", "--ui", "none",
        "--artifact-dir", "out",
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return [json.loads(line) for line in (folder / "out" / "profile_export.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def served(place: str, folder: Path) -> Iterator[str]:
    """URL of the engine, or of the models endpoint in front of one."""
    if place == "engine":
        with timed_engine(replace(roofline("timed", 8e9), name="timed")) as url:
            yield url
        return
    engine = f"{sys.executable} -m cotenant.cli.main timed-llm --model timed --profile 8b --port {{port}}"
    models = folder / "models.yaml"
    models.write_text(
        "gpus: {count: 1, model: cpu, memory: 8GiB}\nlisten: {http: '127.0.0.1:0'}\n"
        f'models:\n  - {{name: timed, memory: 1GiB, keep: 1, command: "{engine}"}}\n'
    )
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", str(models), "--json", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"{json.loads(server.stdout.readline())['http']}/v1"
    finally:
        server.terminate()
        server.wait(30)


def percentile(values: Any, p: int) -> tuple[float, float, float]:
    """A percentile, and its interval by bootstrap."""
    drawn = np.random.default_rng(p).choice(values, (2000, len(values)))
    low, high = np.percentile(np.percentile(drawn, p, axis=1), (2.5, 97.5))
    return float(np.percentile(values, p)), float(low), float(high)


@pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed; AIPERF names it")
@pytest.mark.parametrize("place", ["engine", "door"])
def test_both_clients_see_the_same_engine(place: str, tmp_path: Path) -> None:
    with served(place, tmp_path) as url:
        rows = aiperf(url, tmp_path)
        sent_s = [row["metadata"]["request_start_ns"] / 1e9 for row in rows]
        trace = make_trace("aiperf", sent_s, None, [PROMPT] * COUNT, [OUTPUT] * COUNT, ("timed",))
        ours = run_openai(OpenAiTest(parse_target(url), trace, (Promise("timed"),), check=True))
    for name, key in (("time_to_first_token", "ttft_ms"), ("inter_token_latency", "tpot_ms")):
        theirs = [row["metrics"][name]["value"] for row in rows]
        for p in (50, 90, 99):
            a, b = percentile(theirs, p), percentile(getattr(ours.times, key), p)
            print(f"{place} {key} p{p}: aiperf {a[0]:.2f} ({a[1]:.2f} to {a[2]:.2f}), ", end="")
            print(f"cotenant load {b[0]:.2f} ({b[1]:.2f} to {b[2]:.2f})")
            if p == 50:
                assert a[1] <= b[2] * 1.1
                assert b[1] <= a[2] * 1.1
    assert {row["metrics"]["output_sequence_length"]["value"] for row in rows} == {OUTPUT}
    assert ours.summary()["total"]["answered"] == COUNT
