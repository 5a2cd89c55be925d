"""Measures two models of 4B parameters on one GPU, relative to one alone, to time slicing, and to MPS with halves.

    CUDA_VISIBLE_DEVICES=UUID PYTHONPATH=src python bench/gpu/models_pair.py OUT.jsonl [STEP,STEP...] [SECONDS]

Steps: alone, cotenant, cotenant_mps, mps, time, and each but the first with the prefix train_. All run in this order by
default, within SECONDS (270). The engine is small_llm.py; a request has 2,048 prompt tokens and 192 to 320 output
tokens, at random. In `cotenant` the models are behind `cotenant serve`, and in `cotenant_mps` behind it with
`mechanism: mps`, under which each model may use all SMs. In the other steps the engines are asked directly; `mps` gives
each of them half of the threads. The number of requests in flight per model is 2, 4, 8, 16 and 32, one after the other.
A row has the tokens per second of all models and of two models alone, the median and 90th percentile of TTFT and TPOT,
and TTFT relative to that alone. `waited_ms` and `prefill_ms` are medians that the engines print: how long a prompt
waited in its engine, and how long its prefill took on the GPU. Rows are written as they come.

In the steps train_, both models get requests of 1,024 prompt and 64 output tokens at 1.25/s each, first without and
then with a training program, which is best-effort under Cotenant. A row has TTFT and TPOT relative to those without the
program, and the steps of the program relative to its steps alone in the time that the models leave. The models need
twice the GPU time that one of them, while the other is idle, has measured for the same requests.

CUDA_VISIBLE_DEVICES=cpu tests the script with a tiny model on the CPU, and =soft with `cotenant timed-llm` on the
software GPU (steps cotenant, cotenant_mps, train_cotenant, train_cotenant_mps).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from stream_client import Client, middle

HERE = Path(__file__).resolve().parent
TRAIN = "train"  # first argument of a training program; its second argument is the device
DEVICE = sys.argv[2] if sys.argv[1:2] == [TRAIN] else os.environ.get("CUDA_VISIBLE_DEVICES", "")
REHEARSAL = DEVICE in ("cpu", "soft")
NAMES = ("one", "two")
LOADS = (1, 2, 4) if REHEARSAL else (2, 4, 8, 16, 32)
PROMPT, OUTPUT = (64, 16) if REHEARSAL else (2048, 256)
TRAIN_PROMPT, TRAIN_OUTPUT, TRAIN_RATE = (64, 8, 1.25) if REHEARSAL else (1024, 64, 1.25)
MEMORY, TRAIN_MEMORY = ("1GiB", "1GiB") if REHEARSAL else ("26GiB", "16GiB")
START_S = 25.0  # time that is reserved for the start of each pair
READY_WITHIN_S = 120.0
SLICES = "slices" if DEVICE == "soft" else "auto"  # what `auto` means on an NVIDIA GPU
SHORTEST_S, LONGEST_S = 3.0, 14.0
Engine = Callable[[str, str], list[str]]  # command line of a model's engine, from name and port


def engine(name: str, port: str) -> list[str]:
    """Command line of small_llm.py or, on the software GPU, of `cotenant timed-llm`."""
    if DEVICE == "soft":
        words = ["-m", "cotenant.cli.main", "timed-llm", "--model", name, "--device", "cuda", "--memory", "64MiB"]
        return [sys.executable, *words, "--port", port]
    shape = "tiny" if DEVICE == "cpu" else "4b"
    return [sys.executable, str(HERE / "small_llm.py"), "--name", name, "--shape", shape, "--port", port]


async def load(folder: Path, ports: dict[str, int], count: int, seconds: float) -> dict[str, Any]:
    """Keep `count` requests in flight at each model for `seconds`; the first quarter of the time is not counted."""
    client = Client(ports)
    each = [(name, number, PROMPT, OUTPUT) for name in ports for number in range(count)]
    tasks = [asyncio.create_task(client.closed(*given)) for given in each]
    begun = time.monotonic()
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.3)  # in this time the engines notice that the clients have disconnected
    counted = (begun + seconds / 4, begun + seconds)
    sent = {"seconds": round(seconds, 1), "prompt": PROMPT, "output": OUTPUT}
    return client.row(*counted) | Said(folder).prompts(*counted) | sent


# ---- the models ----


@contextlib.contextmanager
def plain(
    names: tuple[str, ...], folder: Path, environment: dict[str, str], engine: Engine = engine
) -> Iterator[dict[str, int]]:
    """Run the models as ordinary processes; yields their ports."""
    import socket

    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        running = []
        for name in names:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports[name] = free.getsockname()[1]
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            command = engine(name, str(ports[name]))
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
            )
            stack.callback(end, process, group=True)
            running.append((process, name))
        for process, name in running:
            deadline = time.monotonic() + READY_WITHIN_S
            while not listed(ports[name]):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
                time.sleep(0.2)
        yield ports


def listed(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as got:
        return bool(got.status == 200)
    return False


def end(process: subprocess.Popen[bytes], group: bool = False) -> None:
    """End a process, and with `group` what it has left of its process group."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(20)
    finally:  # also if a signal interrupts the wait
        process.kill()
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Run an MPS daemon in a folder of its own; yields the environment of programs that have half of the GPU each."""
    control = "nvidia-cuda-mps-control"
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in own.values():
        Path(path).mkdir(exist_ok=True)
    subprocess.run([control, "-d"], env=os.environ | own, check=True)
    try:
        yield own | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50", "CUDA_VISIBLE_DEVICES": "0"}  # the daemon's first GPU
    finally:
        subprocess.run([control], input=b"quit\n", env=os.environ | own, check=False)


@contextlib.contextmanager
def cotenant(folder: Path, mechanism: str, engine: Engine = engine) -> Iterator[tuple[dict[str, int], str]]:
    """Run both models behind `cotenant serve`; yields the ports, and the agent's folder."""
    rows = [
        {"name": name, "command": shlex.join(engine(name, "{port}")), "memory": MEMORY, "keep": 1}
        for name in NAMES
    ]
    gpus = {"model": DEVICE, "memory": "4GiB"} if REHEARSAL else {}
    if DEVICE != "cpu":
        gpus["mechanism"] = mechanism
    (folder / "models.yaml").write_text(
        json.dumps({"gpus": gpus, "models": rows, "listen": {"http": "127.0.0.1:0"}})
    )  # a JSON document is also a YAML document
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", str(folder / "models.yaml"), "--json"]
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen([*command, "--program-logs", str(folder)], stdout=subprocess.PIPE, stderr=log)
        assert server.stdout is not None
        try:
            first = server.stdout.readline()
            said = (folder / "serve.log").read_text()[-2000:]
            if not first:
                raise SystemExit(f"the server did not start: {said}")
            url = json.loads(first)["http"]
            deadline = time.monotonic() + READY_WITHIN_S
            while True:
                with urllib.request.urlopen(f"{url}/cotenant/status", timeout=30) as got:
                    status = json.loads(got.read())
                if all(row["state"] == "resident" for row in status["models"]):
                    break
                if time.monotonic() > deadline:
                    raise SystemExit(f"the models did not start: {status['models']}")
                time.sleep(0.2)
            yield dict.fromkeys(NAMES, int(url.rpartition(":")[2])), status["agent"] or ""
        finally:
            end(server)


@contextlib.contextmanager
def models(way: str, folder: Path, engine: Engine = engine) -> Iterator[tuple[dict[str, int], str, dict[str, str]]]:
    """Run the models of a step; yields ports, the agent's folder, and the environment of a further program."""
    with contextlib.ExitStack() as stack:
        environment: dict[str, str] = {}
        if way.startswith("cotenant"):
            mechanism = "mps" if way == "cotenant_mps" else SLICES
            ports, agent = stack.enter_context(cotenant(folder, mechanism, engine))
            yield ports, agent, environment
            return
        if way == "mps":
            environment = stack.enter_context(mps(folder))
        ports = stack.enter_context(plain(NAMES[:1] if way == "alone" else NAMES, folder, environment, engine))
        yield ports, "", environment


# ---- training ----


def train() -> None:
    """Train for ever, and print a line with the time after each step."""
    if DEVICE == "soft":
        from cotenant.bench.driver import Driver

        cuda = Driver()
        done = cuda.event()
        while True:
            cuda.launch(5_000_000)
            cuda.record(done)
            cuda.wait(done)
            print(time.monotonic(), flush=True)
    import torch

    kind = {"device": "cpu" if DEVICE == "cpu" else "cuda"}
    width, batch = (64, 2) if DEVICE == "cpu" else (1024, 16)
    layer = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, norm_first=True, **kind)
    net = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to(**kind)
    optimizer = torch.optim.AdamW(net.parameters(), fused=DEVICE != "cpu")
    x = torch.randn(batch, 512, width, **kind)
    while True:
        with torch.autocast(kind["device"], torch.bfloat16):
            loss = (net(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        print(time.monotonic(), flush=True)


class Training:
    """A training program, as a tenant of the agent if there is one, under the mechanism of its models."""

    def __init__(self, folder: Path, agent: str, mechanism: str, environment: dict[str, str]) -> None:
        own = [sys.executable, str(Path(__file__).resolve()), TRAIN, DEVICE]
        share = ["run", "--dir", agent, "--name", "train", "--mechanism", mechanism, "--best-effort"]
        share += ["--memory", TRAIN_MEMORY, "--"]
        command = [sys.executable, "-m", "cotenant.cli.main", *share, *own] if agent else own
        self._log = (folder / "train.log").open("wb")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=os.environ | environment)
        self.stamps: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + READY_WITHIN_S
        while len(self.stamps) < 10:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the training did not start: {(folder / 'train.log').read_text()[-2000:]}")
            time.sleep(0.1)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.stamps.append(float(line))

    def rate(self, begin_s: float, end_s: float) -> float:
        """Steps per second between two times."""
        return sum(begin_s <= at < end_s for at in self.stamps) / (end_s - begin_s)

    def close(self) -> None:
        end(self.process)
        self._log.close()


class Said:
    """What the engines have printed to their logs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _lines(self, name: str, kind: str) -> list[list[float]]:
        text = (self._folder / f"{name}.log").read_text() if (self._folder / f"{name}.log").exists() else ""
        # the last line may not be complete yet
        words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [[float(word) for word in each[1:]] for each in words if each[:1] == [kind]]

    def prompts(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """Medians of what prompts waited in their engine and of their prefill, in ms."""
        found = [row for name in NAMES for row in self._lines(name, "prompt") if begin_s <= row[0] < end_s]
        return {"waited_ms": middle([row[1] for row in found]), "prefill_ms": middle([row[2] for row in found])}

    def busy_part(self, name: str, begin_s: float, end_s: float) -> float | None:
        """Fraction of the time in which an engine's steps ran on the GPU, while it had the GPU for itself."""
        seen = [row for row in self._lines(name, "busy") if begin_s <= row[0] < end_s]
        if len(seen) < 2:
            return None
        return round((seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0]), 4)


async def requests(ports: dict[str, int], seconds: float) -> tuple[dict[str, Any], float]:
    """Send Poisson requests to each of these models for some seconds. Returns their row, and the start time."""
    client, begun = Client(ports), time.monotonic()
    sending = [client.open(name, TRAIN_PROMPT, TRAIN_OUTPUT, TRAIN_RATE, begun + seconds) for name in ports]
    await asyncio.gather(*sending)
    return client.row(begun, time.monotonic()), begun


def beside_training(way: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Measure the models without and with a training program, and the program while the models are idle."""
    with models(way, folder) as (ports, agent, environment):
        asyncio.run(load(folder, ports, 2, 2.0))  # a first load without measurement
        each = max(SHORTEST_S, (seconds - START_S - 10.0) / 3.5)
        _, begun = asyncio.run(requests({NAMES[0]: ports[NAMES[0]]}, each))
        one = Said(folder).busy_part(NAMES[0], begun, begun + each)
        busy = 2 * one if one is not None else None
        without, _ = asyncio.run(requests(ports, each))
        training = Training(folder, agent, "mps" if way == "cotenant_mps" else SLICES, environment)
        try:
            begun = time.monotonic()
            time.sleep(each / 2)
            alone = training.rate(begun, begun + each / 2)
            if not alone:
                raise SystemExit(f"the training made no step within {each / 2:.1f} s")
            beside, begun = asyncio.run(requests(ports, each))
            had = training.rate(begun, begun + each) / alone
        finally:
            training.close()
    row = {
        "without": without, "beside": beside, "models_busy": busy, "steps_per_s_alone": round(alone, 2),
        "training_over_alone": round(had, 3),
        "training_of_left": over(had, 1 - busy) if busy is not None and busy < 1 else None,
    }  # fmt: skip
    for what in ("ttft_ms", "ttft_p90_ms", "tpot_ms", "tpot_p90_ms"):
        row[f"{what}_over_without"] = over(beside[what], without[what])
    return row


def over(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value and base else None


def loads(
    step: str, alone: dict[int, dict[str, Any]], until_s: float, later: int, engine: Engine = engine,
    counts: tuple[int, ...] = LOADS, start_s: float = START_S, longest_s: float = LONGEST_S,
) -> Generator[dict[str, Any], None, None]:
    """Run the models of a step, and yield a row per number of requests in flight, relative to those of the step alone.
    All loads take equal parts of the time until `until_s` in which no engine starts; `later`: the steps to come. The
    step alone+time runs both models, sends requests to one of them at first, and then to both.
    """
    parts = [(part, count) for part in step.split("+") for count in counts]
    folder, begun = Path(tempfile.mkdtemp(prefix="pair-")), time.monotonic()
    with models(step, folder, engine) as (ports, _, _):
        yield {"step": step, "ready_s": round(time.monotonic() - begun, 2)}
        asyncio.run(load(folder, ports, 2, 2.0))  # a first load without measurement
        for i, (part, count) in enumerate(parts):
            left_s = until_s - time.monotonic()
            seconds = (left_s - start_s * later) / (len(counts) * later + len(parts) - i) - 0.5
            if left_s < SHORTEST_S:
                raise SystemExit("no time left")
            asked = {NAMES[0]: ports[NAMES[0]]} if part == "alone" else ports
            row = asyncio.run(load(folder, asked, count, min(longest_s, max(SHORTEST_S, seconds))))
            if part == "alone":
                alone[count] = row
            elif base := alone.get(count):
                row["of_two_alone"] = over(row["tokens_per_s"], 2 * base["tokens_per_s"])
                row["ttft_over_alone"] = over(row["ttft_ms"], base["ttft_ms"])
                row["tpot_over_alone"] = over(row["tpot_ms"], base["tpot_ms"])
            yield {"step": part, "in_flight": count} | row


def say(out: Path, row: dict[str, Any]) -> None:
    """Print a row, and append it to a file."""
    print(json.dumps(row), flush=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    """Run the steps, and write a line per row."""
    out = Path(sys.argv[1])
    steps = (sys.argv[2] if len(sys.argv) > 2 else "alone,cotenant,cotenant_mps,mps,time").split(",")
    until_s = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else 270.0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no step's fault, so it ends all steps
    if REHEARSAL:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
    alone: dict[int, dict[str, Any]] = {}
    out.write_text("")
    for number, step in enumerate(steps):
        later = len(steps) - number - 1
        try:
            if step.startswith("train_"):
                folder = Path(tempfile.mkdtemp(prefix="pair-"))
                left_s = (until_s - time.monotonic()) / (later + 1)
                say(out, {"step": step} | beside_training(step.removeprefix("train_"), folder, left_s))
                continue
            with contextlib.closing(loads(step, alone, until_s, later)) as rows:
                for row in rows:
                    say(out, row)
        except (SystemExit, OSError, subprocess.SubprocessError) as error:
            say(out, {"step": step, "fault": str(error)})


if __name__ == "__main__":
    train() if sys.argv[1] == TRAIN else main()
