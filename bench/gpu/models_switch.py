"""Measures the eviction and return of a language model behind the server: two models with space for one, used
alternately.

CUDA_VISIBLE_DEVICES=UUID PYTHONPATH=src:tests/helpers python bench/gpu/models_switch.py OUT.json [ENGINE] [ROUNDS]

ENGINE: transformers (default), vllm, small (small_llm.py): 8B-shaped models with random weights. With `soft` as the
device, `cotenant timed-llm` replaces the engine; with `cpu`, the models are tiny and start again at each turn. Each
round sends a request to both models at temperature 0. It records how long the eviction of one and the return of the
other took (from the server's counters), the time to the first token, and whether the answer equals that of the first
round. Both moves run at the same time, so the first token comes soon after the longer one. With
MECHANISM=time before it, the models share the GPU by turns, not by hardware time slices.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm_engine

DEVICE = os.environ.get("CUDA_VISIBLE_DEVICES")
if DEVICE in ("soft", "cpu"):
    del os.environ["CUDA_VISIBLE_DEVICES"]
NAMES = ("one", "two")
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
COMMANDS = {
    "transformers": "transformers serve {model} --port {{port}} --device cuda:0",
    "cpu": "transformers serve {model} --port {{port}} --device cpu",
    "vllm": shlex.join(vllm_engine.command("{model}", "{name}", "{{port}}", "8b", "--load-format", "dummy")),
    "small": f"{sys.executable} {Path(__file__).parent}/small_llm.py --name {{name}} --shape 8b --port {{{{port}}}}",
    "soft": f"{sys.executable} -m cotenant.cli.main timed-llm --model {{name}} --port {{{{port}}}} --device cuda"
    " --memory 48MiB --speed 10",
}


def models_file(folder: Path, engine: str) -> Path:
    """Write a models file with two models, of which one fits on the GPU."""
    rows = []
    for seed, name in enumerate(NAMES):
        model = folder / name
        if engine == "vllm":
            vllm_engine.model(model, "8b")
        elif engine not in ("soft", "small"):
            from tiny_llm import make

            make(model, seed, **({} if engine == "cpu" else SHAPE))
        command = COMMANDS[engine].format(model=model, name=name)
        rows.append({"name": name, "command": command, "memory": "64MiB" if engine == "soft" else "24GiB"})
    gpus = {"model": "soft", "memory": "100MiB"} if engine == "soft" else {"memory": "36GiB"}
    gpus |= {"model": "cpu"} if engine == "cpu" else {"mechanism": os.environ.get("MECHANISM", "auto")}
    path = folder / "models.yaml"
    path.write_text(json.dumps({"gpus": gpus, "models": rows, "listen": {"http": "127.0.0.1:0"}}))
    return path


def ask(port: int, name: str) -> tuple[float, str]:
    """Send a request; returns the seconds to the first text, and the whole answer."""
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 32, "temperature": 0.0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    began, first, text = time.monotonic(), 0.0, ""
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{name}: {answer.status} {answer.read().decode()[:2000]}")
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(event["error"]["message"])
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            first = first or (time.monotonic() - began if piece else 0.0)
            text += piece
    connection.close()
    return first, text


def rows_of(port: int) -> dict[str, dict[str, Any]]:
    """The server's rows about its models."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/cotenant/status")
    found = json.loads(connection.getresponse().read())["models"]
    connection.close()
    return {row["name"]: row for row in found}


def turns(folder: Path, engine: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Run the server, send requests to the models in turn, and yield a row per request."""
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", str(models_file(folder, engine)), "--json"]
    log = folder / "serve.log"
    answers: dict[str, str] = {}
    environment = os.environ | {"COTENANT_DIR": str(folder / "agent")}
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [*command, "--program-logs", str(folder)], stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as server,
    ):
        assert server.stdout is not None
        try:
            first = server.stdout.readline()
            if not first:
                raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
            port = int(json.loads(first)["http"].rpartition(":")[2])
            for number in range(rounds + 1):
                for name in NAMES:
                    before = rows_of(port)
                    first_s, text = ask(port, name)
                    after = rows_of(port)
                    other = next(n for n in NAMES if n != name)
                    took = {
                        kind: after[of]["switch_s"].get(kind, 0.0) - before[of]["switch_s"].get(kind, 0.0)
                        for of, kind in ((other, "evict"), (name, "bring"), (name, "start"))
                    }
                    same = answers.setdefault(name, text) == text
                    yield {"round": number, "model": name, "first_token_s": first_s, "identical": same} | took
                    time.sleep(1.0)
        finally:
            server.terminate()
            server.wait(60)


def main() -> None:
    """Write one row per request."""
    out, engine = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "transformers"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    engine = DEVICE if DEVICE in ("soft", "cpu") else engine
    found: list[dict[str, Any]] = []
    for row in turns(Path(tempfile.mkdtemp(prefix="models-switch-")), engine, rounds):
        found.append(row)
        out.write_text(json.dumps({"engine": engine, "rounds": found, "fault": ""}, indent=1))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
