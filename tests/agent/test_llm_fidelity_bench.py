"""bench/gpu/llm_fidelity.sh without a GPU: vLLM and the libraries of its tokenizer are stand-ins, and the engine is
`cotenant timed-llm` with the limits of vLLM's options.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "bench" / "gpu"
TOKENIZERS = """
class Tokenizer:
    def __init__(self, model): ...
class models:
    WordLevel = staticmethod(lambda words, unknown: words)
class pre_tokenizers:
    WhitespaceSplit = staticmethod(dict)
"""
TRANSFORMERS = """
class PreTrainedTokenizerFast:
    def __init__(self, tokenizer_object): ...
    def save_pretrained(self, folder): ...
"""
VLLM = """
import json, os, sys
given = dict(zip(sys.argv, sys.argv[1:]))
folder = sys.argv[sys.argv.index("serve") + 1]
assert json.load(open(f"{folder}/config.json"))["model_type"] == "qwen3"
name, profile = given["--served-model-name"], f"{folder}/profile.json"
row = {"prefill_ms": {"base": 5, "per_token": 0.01}, "decode_ms": {"base": 4},
       "max_context": int(given["--max-model-len"]), "max_sequences": int(given["--max-num-seqs"]),
       "step_tokens": int(given["--max-num-batched-tokens"])}
json.dump({"format": "cotenant-llm-profile-1", "models": {name: row}}, open(profile, "w"))
words = ["-m", "cotenant.cli.main", "timed-llm", "--model", name, "--port", given["--port"], "--profile", profile]
os.execv(sys.executable, [sys.executable, *words])
"""


@pytest.fixture
def vllm_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module("vllm_engine")


def test_the_limits_are_those_that_vllm_prints(vllm_engine: ModuleType) -> None:
    assert (vllm_engine.kv_tokens("4b"), vllm_engine.kv_tokens("8b")) == (80_096, 32_768)
    words = vllm_engine.command("folder", "m", "1", "4b")
    given = dict(itertools.pairwise(words))
    assert vllm_engine.limits("4b") == (
        f"--max-sequences {given['--max-num-seqs']} --kv-tokens 80096 "
        f"--step-tokens {given['--max-num-batched-tokens']} --schedules-ahead"
    )
    assert given["--kv-cache-memory-bytes"] == "11G"


def test_an_unmodified_vllm_is_profiled_and_compared(tmp_path: Path) -> None:
    site, cli = tmp_path / "site", tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    (cli / "main.py").write_text(VLLM)
    (site / "tokenizers.py").write_text(TOKENIZERS)
    (site / "transformers.py").write_text(TRANSFORMERS)
    environment = os.environ | {
        "PYTHON": sys.executable, "ENGINE": "vllm", "ENGINE_SITE": str(site), "RATES": "4", "DURATION": "2s",
        "ROUNDS": "2", "PROMPT": "100", "OUTPUT": "8", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(site)]),
    }  # fmt: skip
    out = tmp_path / "out"
    command = ["bash", str(GPU / "llm_fidelity.sh"), str(out), "tiny"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + (out / "engine.log").read_text()
    row = json.loads((out / "profile.json").read_text())["models"]["qwen3-tiny"]
    assert (row["max_sequences"], row["step_tokens"], row["max_context"]) == (32, 8192, 2560)
    assert row["kv_tokens"] == (1 << 30) // (2 * 2 * 2 * 32 * 2 * 16) * 16
    assert [row["load"] for row in json.loads((out / "fidelity.json").read_text())["rows"]] == ["4/s"]
