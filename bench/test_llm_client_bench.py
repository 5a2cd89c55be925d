"""`cotenant load --openai` against AIPerf: the same engine, the same send times, figures side by side.

AIPERF=/path/to/aiperf pytest -q -s bench/test_llm_client_bench.py     (aiperf in an environment of its own)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

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


def aiperf(url: str, folder: Path) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Its figures, and when it sent each request."""
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
    rows = [json.loads(line) for line in (folder / "out" / "profile_export.jsonl").read_text().splitlines()]
    found: dict[str, dict[str, float]] = json.loads((folder / "out" / "profile_export_aiperf.json").read_text())
    return found, [row["metadata"]["request_start_ns"] / 1e9 for row in rows]


@pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed; AIPERF names it")
def test_both_clients_see_the_same_engine(tmp_path: Path) -> None:
    profile = replace(roofline("timed", 8e9), name="timed")
    with timed_engine(profile) as url:
        theirs, sent_s = aiperf(url, tmp_path)
        trace = make_trace("aiperf", sent_s, None, [PROMPT] * COUNT, [OUTPUT] * COUNT, ("timed",))
        ours = run_openai(OpenAiTest(parse_target(url), trace, (Promise("timed"),), check=True)).summary()["total"]
    for their, our in (("time_to_first_token", "ttft_ms"), ("inter_token_latency", "tpot_ms")):
        for p in ("p50", "p90", "p95", "p99"):
            a, b = theirs[their][p], ours[our][p]
            print(f"{our} {p}: aiperf {a:.2f}, cotenant load {b:.2f}, ratio {b / a:.3f}")
        assert ours[our]["p50"] == pytest.approx(theirs[their]["p50"], rel=0.1)
    assert theirs["output_sequence_length"]["avg"] == OUTPUT
    assert ours["answered"] == COUNT
