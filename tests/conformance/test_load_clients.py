"""AIPerf and GuideLLM against the door of language models; skipped where they are not installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models_door import Door, door

WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "was", "for", "on", "are", "with", "as", "his")
UNKNOWN = {"id": 0, "content": "[UNK]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
           "special": True}  # fmt: skip
PLACES = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Two timed engines with room for one."""
    engine = f"{sys.executable} -m cotenant.cli.main timed-llm --speed 10 --port {{port}} --model"
    rows: list[dict[str, Any]] = [{"name": n, "memory": "6GiB", "command": f"{engine} {n}"} for n in ("a", "b")]
    with door(Path(tmp_path_factory.mktemp("load")), *rows) as it:
        yield it


@pytest.fixture(autouse=True)
def tokenizer(tmp_path: Path) -> None:
    """A tokenizer of words that needs no download; timed engines count words, too."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0} | {w: i + 1 for i, w in enumerate(WORDS)}, "unk_token": "[UNK]"}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [UNKNOWN], "normalizer": None,
               "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
               "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict.fromkeys(
        ("unk_token", "bos_token", "eos_token"), "[UNK]"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run(program: str, *words: object, where: Path) -> None:
    found = shutil.which(program, path=PLACES)
    if found is None:
        pytest.skip(f"{program} is not installed")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [found, *map(str, words)], cwd=where, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_aiperf_streams_chats(two: Door, tmp_path: Path) -> None:
    """Every request is answered with the tokens asked for, and the server's metrics are read."""
    run(
        "aiperf", "profile", "-m", "a", "--url", f"http://127.0.0.1:{two.port}", "--endpoint-type", "chat",
        "--streaming", "--request-count", 20, "--concurrency", 4, "--tokenizer", "./tokenizer", "--ui", "none",
        "--synthetic-input-tokens-mean", 50, "--output-tokens-mean", 20, "--use-server-token-count",
        "--artifact-dir", "out", where=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert (found["request_count"]["avg"], found["error_summary"]) == (20, [])
    lengths = {name: (found[name]["min"], found[name]["max"]) for name in ("output_sequence_length",)}
    assert lengths == {"output_sequence_length": (20, 20)}
    assert found["usage_prompt_tokens"]["avg"] == pytest.approx(50, abs=1)
    assert found["time_to_first_token"]["min"] > 0
    seen = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())["summary"]
    assert seen["endpoints_successful"] == [f"http://127.0.0.1:{two.port}/metrics"]


def test_guidellm_keeps_four_streams(two: Door, tmp_path: Path) -> None:
    run(
        "guidellm", "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{two.port},model=b",
        "--tokenizer", "kind=hf_auto,model=./tokenizer",
        "--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=20", "--profile", "kind=concurrent,streams=4",
        "--constraint", "kind=max_requests,count=20", "--output", "kind=json,path=out.json",
        "--disable-console-interactive", where=tmp_path,
    )  # fmt: skip
    (found,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    states = {k: v for k, v in found["scheduler_state"].items() if k.endswith("_requests")}
    assert (states["successful_requests"], states["errored_requests"], states["cancelled_requests"]) == (20, 0, 0)
    assert {row["output_metrics"]["text_tokens"] for row in found["requests"]["successful"]} == {20}
