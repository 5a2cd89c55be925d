"""Measures vLLM as the engine of two models on one GPU, and its sleep mode beside Cotenant's eviction.

    CUDA_VISIBLE_DEVICES=UUID PYTHONPATH=src:tests/helpers python bench/gpu/models_vllm.py OUT.jsonl STEP,STEP SECONDS

Steps: alone, cotenant, cotenant_mps, mps, time (as in models_pair.py, with vLLM and Qwen3-4B's shape, 2,048 prompt and
256 output tokens, 2, 8 and 32 requests in flight per model), sleep1, sleep2 and switch, with models of an 8B shape. All
weights are random. `alone` and `time` use the same two engines, because the start of an engine takes 40 to 45 s (the
first one 73 s), and come first: one engine is idle while the other is measured alone. In `sleep1` and `sleep2` one vLLM
sleeps on that level and wakes up, ROUNDS times; after level 2 it reads its weights from the disk (the page cache)
again. `sleep_s`: until it sleeps; `card_gib`: the memory in use on the GPU then; `wake_s`: until it is awake;
`first_token_s`: from the order to wake up to the first token. `switch` has the rows of models_switch.py, where
`first_token_s` contains the eviction of the other model. `identical`: the answer equals the first one.

Rows are written as they come; `ready_s` is the time in which the engines of a step started, `ended` how many answers
ended in the counted part of a load. CUDA_VISIBLE_DEVICES=soft tests all but vLLM: with `cotenant timed-llm` on the
software GPU (steps cotenant, cotenant_mps, switch) and with a stand-in for the sleep mode. With
COTENANT_BENCH_LIBRARY=.../libcotenant-softgpu.so, the steps alone and time run there, too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import models_pair
import vllm_engine
from card_watch import card_gib
from models_pair import loads, plain, say
from models_switch import SHAPE, ask, turns

SOFT = models_pair.DEVICE == "soft"
COUNTS = (2, 4) if SOFT else (2, 8, 32)
START_S = 5.0 if SOFT else 48.0  # with the end of the engines before
SWITCH_START_S = 10.0 if SOFT else 75.0  # two engines, one after the other
END_S = 2.0 if SOFT else 10.0  # the end of the last engines
LONGEST_S = 4.0 if SOFT else 30.0
ROUNDS = 3
STEPS = "alone,cotenant,cotenant_mps,mps,time,sleep1,sleep2,switch"
WAKE = {1: ["/wake_up"], 2: ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]}
Rows = Generator[dict[str, Any], None, None]
RELOAD = {"method": "reload_weights"}


@functools.cache
def weightless(shape: str) -> str:
    """The folder of a model for --load-format dummy."""
    return str(vllm_engine.model(Path(tempfile.mkdtemp(prefix=f"vllm-{shape}-")), shape))


@functools.cache
def writing() -> tuple[subprocess.Popen[bytes], str]:
    """Begin to write a model of the 8B shape with random weights; returns the process and the model's folder."""
    folder = tempfile.mkdtemp(prefix="vllm-disk-")
    code = f"from pathlib import Path; from tiny_llm import make; make(Path({folder!r}), 0, **{SHAPE!r})"
    return subprocess.Popen([sys.executable, "-c", code]), folder


def on_disk() -> str:
    """The folder of a model of the 8B shape with random weights."""
    process, folder = writing()
    if process.wait():
        raise SystemExit("the model with weights was not written")
    return folder


def pair_engine(name: str, port: str) -> list[str]:
    """Command line of one of two 4B models."""
    if SOFT:
        return models_pair.engine(name, port)
    return vllm_engine.command(weightless("4b"), name, port, "4b", "--load-format", "dummy")


def sleep_engine(level: int, name: str, port: str) -> list[str]:
    """Command line of an 8B model that can sleep. After level 1 it still has its weights."""
    if SOFT:
        return [sys.executable, "-m", "sleeper", port]
    model, loads = (weightless("8b"), "dummy") if level == 1 else (on_disk(), "auto")
    command = vllm_engine.command(model, name, port, "8b", "--enable-sleep-mode", "--load-format", loads)
    return ["env", "VLLM_SERVER_DEV_MODE=1", *command]


def post(port: int, path: str) -> None:
    body = json.dumps(RELOAD).encode() if path == "/collective_rpc" else b""
    sent = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(sent, timeout=60) as got:
        got.read()


def sleeps(level: int) -> Rows:
    """Put a model to sleep and wake it up, several times."""
    engine = functools.partial(sleep_engine, level)
    with plain(("one",), Path(tempfile.mkdtemp(prefix="sleep-")), {}, engine) as ports:
        port = ports["one"]
        _, first = ask(port, "one")
        awake_s, _ = ask(port, "one")
        yield {"first_token_awake_s": round(awake_s, 4), "card_gib_awake": card_gib()}
        for number in range(ROUNDS):
            begun = time.monotonic()
            post(port, f"/sleep?level={level}")
            asleep = time.monotonic()
            row: dict[str, Any] = {"round": number, "sleep_s": round(asleep - begun, 4), "card_gib": card_gib()}
            begun = time.monotonic()
            for path in WAKE[level]:
                post(port, path)
            awake = time.monotonic()
            first_s, text = ask(port, "one")
            row |= {"wake_s": round(awake - begun, 4), "first_token_s": round(awake - begun + first_s, 4)}
            yield row | {"identical": text == first}


def start_s(step: str) -> float:
    """The time in seconds that the engines of a step take to start."""
    return SWITCH_START_S if step == "switch" else START_S


def rows(step: str, alone: dict[int, dict[str, Any]], until_s: float, later: list[str]) -> Rows:
    """The rows of a step, within the time until `until_s` that it leaves the later ones to start their engines."""
    if step.startswith("sleep"):
        yield from sleeps(int(step.removeprefix("sleep")))
    elif step == "switch":
        yield from turns(Path(tempfile.mkdtemp(prefix="switch-")), "soft" if SOFT else "vllm", ROUNDS)
    else:
        each_s = sum(map(start_s, later)) / max(1, len(later))
        yield from loads(step, alone, until_s, len(later), pair_engine, COUNTS, each_s, LONGEST_S)


def joined(steps: list[str]) -> list[str]:
    """Join the steps alone and time to one, which comes first."""
    if not {"alone", "time"} <= set(steps):
        return steps
    return ["alone+time", *(step for step in steps if step not in ("alone", "time"))]


def late(*_: object) -> None:
    raise SystemExit("the step took too long")


def main() -> None:
    """Run the steps, each within its part of the time."""
    out = Path(sys.argv[1])
    steps = joined((sys.argv[2] if len(sys.argv) > 2 else STEPS).split(","))
    until_s = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else 400.0) - END_S
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no step's fault, so it ends all steps
    signal.signal(signal.SIGALRM, late)
    alone: dict[int, dict[str, Any]] = {}
    out.write_text("")
    if "sleep2" in steps and not SOFT:
        writing()  # takes 35 s, in which the first engine starts
    for number, step in enumerate(steps):
        later = steps[number + 1 :]
        left_s = until_s - time.monotonic() - sum(map(start_s, later))
        if left_s < start_s(step):
            say(out, {"step": step, "fault": f"only {left_s:.0f} s are left, too few to start its engines"})
            continue
        signal.setitimer(signal.ITIMER_REAL, left_s)
        try:
            with contextlib.closing(rows(step, alone, until_s, later)) as found:
                for row in found:
                    say(out, {"step": step} | row)
        except (SystemExit, OSError, subprocess.SubprocessError) as error:
            say(out, {"step": step, "fault": str(error)})
        signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("ended by a signal") from None
