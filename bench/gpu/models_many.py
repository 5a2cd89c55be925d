"""Measures eight 8B-shaped models on one GPU of 80 GiB under bursts of requests, behind `cotenant serve`.

    CUDA_VISIBLE_DEVICES=UUID PYTHONPATH=src python bench/gpu/models_many.py OUT.jsonl [SECONDS] [HOST] [SHAPE]

The engine is small_llm.py, shape 8b: 14.2 GiB of weights and 2.4 GiB of keys and values for 8 requests, with graphs and
workspaces about 17.5 GiB. `memory: 20GiB` a model, so four of the eight models are on the GPU, and the others are in
host memory. The agent reserves 20 GiB of host memory for each running program, which for eight models takes 178 GiB
with the programs' own. If the host has less memory, there are fewer models, and GPU memory for half of them. HOST (such
as 250GiB) is for virtual machines whose memory grows when it is used: the script first uses so much memory that the
kernel reports enough. SHAPE 4b instead of 8b: 7.5 GiB of weights and 2.7 GiB of keys and values, `memory: 12.5GiB` a
model, so that eight models fit into a host of 120 GiB.

The trace is drawn by cotenant.workloads (seed 0): a model gets Poisson requests for 8 s in the mean and none for 30 s
in the mean, both exponential. The rate of the k-th model while it gets requests is 4/s k^-0.8. Prompts have 512 tokens
in the mean, at most 2,048, and answers 64 (lognormal, coefficients of variation 1 and 0.7). OUT.csv has the requests
that were sent, and OUT.models.json the models file, both in the formats that `cotenant simulate --serving` reads.

All steps end within SECONDS (265). Rows, written as they come:

dedicated  the hottest model alone with the whole GPU, without Cotenant, under its part of the trace. Pauses of more
           than 2 s are shortened to 2 s
start      settings, and the seconds from the first request to a model that was not started to its first token.
           Models start at once as far as there is space, so these times include waits for the others
warm       before the trace, each model has been started, and the models without space have returned once. So the
           trace has evictions and returns, but no cold starts. `card_gib`: the memory in use on the GPU
trace      attainment (part of the requests that were sent) of TTFT 1,000 ms, TPOT 100 ms and both, and with TTFT 2,000
           ms. `at_once` and `waited`: the requests that waited at most 20 ms in the server's queue, and the others,
           whose model had to return. `switches`: from the server's counters during the trace. `wrong_model`: answers
           that name another model than the request
gpus       models with requests at the same time (pauses of at most 5 s belong to a burst): the most, and the mean.
           Serving with one GPU per model needs `one_per_model` GPUs

CUDA_VISIBLE_DEVICES=soft tests the script with `cotenant timed-llm` on the software GPU. With MECHANISM=time before
it, the models share the GPU by turns, not by hardware time slices.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import ctypes
import dataclasses
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from card_watch import card_gib
from many_trace import HOTTEST_RPS, SKEW, Kind, Request, bursts, draw, shortened, together
from models_pair import end, listed
from stream_client import Answer, Client, middle

from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.host_memory import total_bytes
from cotenant.core.errors import InputError, WorkError
from cotenant.core.units import parse_memory
from cotenant.serving.llm.program import free_port

HERE = Path(__file__).resolve().parent
SOFT = os.environ.get("CUDA_VISIBLE_DEVICES") == "soft"
MODELS = 8
MECHANISM = os.environ.get("MECHANISM", "auto")
SHAPE = sys.argv[4] if len(sys.argv) > 4 else "8b"
MEMORY = 64 << 20 if SOFT else {"8b": 20 << 30, "4b": 25 << 29}[SHAPE]
# host memory of a program beside that for its evicted memory, and of everything else
PROGRAM, OTHERS = (0, 1 << 30) if SOFT else (3 << 29, 6 << 30)
KIND = Kind(2.0, 7.5, "64~1", "16", 256) if SOFT else Kind()
DRAWN_S = 600.0
TTFT_MS, LONG_TTFT_MS, TPOT_MS = 1000.0, 2000.0, 100.0
AT_ONCE_MS = 20.0  # a longer wait in the server's queue is a wait for a switch
DEDICATED_S, TRACE_S, END_S = (5.0, 20.0, 5.0) if SOFT else (30.0, 150.0, 12.0)
START_S, LAST_ANSWER_S = 120.0, 15.0
SAMPLE_S = 0.1
COUNTERS = ("deaths", "retries")
Played = tuple[list[tuple[Request, Answer]], list[str]]


def count_for(host_bytes: int) -> int:
    """The number of models for whose programs and evicted memory the host has space."""
    return max(0, min(MODELS, (host_bytes - OTHERS) // (MEMORY + PROGRAM)))


@contextlib.contextmanager
def grown(wanted: int) -> Iterator[None]:
    """Use memory until the kernel reports `wanted` bytes of it, at most as much; frees it at the end."""
    held: list[mmap.mmap] = []
    lock = threading.Lock()

    def fill(piece: int = 1 << 30) -> None:
        while total_bytes() < wanted:
            with lock:
                if (len(held) + 1) * piece > wanted:
                    return
                held.append(part := mmap.mmap(-1, piece))
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(part)), 1, piece)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(fill) for _ in range(8)]:
            done.result()
    yield
    held.clear()


# ---- programs ----


def engine(name: str, port: str, tenant: bool = True) -> list[str]:
    """Command line of a model's engine. `tenant`: it has an agent, without which there is no software GPU."""
    if SOFT:
        words = ["-m", "cotenant.cli.main", "timed-llm", "--model", name, "--port", port, "--speed", "10"]
        return [sys.executable, *words, *(("--device", "cuda", "--memory", "48MiB") if tenant else ())]
    shape = ["--shape", SHAPE, "--slots", "8"]
    return [sys.executable, str(HERE / "small_llm.py"), "--name", name, *shape, "--port", port]


@contextlib.contextmanager
def program(command: list[str], log: Path, ready: Callable[[], bool]) -> Iterator[None]:
    """Run a program with its output in a file, from the time when it is ready. Raises SystemExit with its output if it
    ends before, or is not ready within START_S.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + START_S
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{log.stem} did not start: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            end(process)


def answers(agent: Path) -> bool:
    """Whether an agent answers in this folder."""
    with contextlib.suppress(WorkError), ControlClient(agent, timeout_s=10.0) as client:
        client.call("status")
        return True
    return False


@contextlib.contextmanager
def cotenant(folder: Path, models: Path, host: int) -> Iterator[int]:
    """Run an agent with `host` bytes for evicted memory, and `cotenant serve`; yields the port."""
    agent, port, card = folder / "agent", free_port(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = "soft" if SOFT else card if card.startswith("GPU-") else "all"
    words = [sys.executable, "-m", "cotenant.cli.main"]
    own = [*words, "agent", "--dir", str(agent), "--gpus", gpus, "--swap-memory", f"{host}B"]
    serve = [*words, "serve", str(models), "--dir", str(agent), "--http", f"127.0.0.1:{port}"]
    serve += ["--program-logs", str(folder)]
    with (
        program(own, folder / "agent.log", lambda: answers(agent)),
        program(serve, folder / "serve.log", lambda: listed(port)),
    ):
        yield port


def status(port: int) -> dict[str, dict[str, Any]]:
    """The server's rows about its models."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/cotenant/status", timeout=60) as got:
        return {row["name"]: row for row in json.loads(got.read())["models"]}


# ---- measuring ----


class Watch(threading.Thread):
    """Reads the server's counters every SAMPLE_S, so that the duration of each switch is known."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.took: dict[str, list[float]] = {}
        self._port, self._last, self._over = port, status(port), threading.Event()
        self._first = self._last
        self.start()

    def run(self) -> None:
        """Sample until the end."""
        while not self._over.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        now = status(self._port)
        for name, row in now.items():
            had = self._last[name]
            for kind, count in row["switches"].items():
                if new := count - had["switches"].get(kind, 0):
                    each = (row["switch_s"][kind] - had["switch_s"].get(kind, 0.0)) / new
                    self.took.setdefault(kind, []).extend([each] * new)
        self._last = now

    def close(self) -> dict[str, Any]:
        """Stop; returns numbers of switches, their mean and largest durations in s, and other counters that changed."""
        self._over.set()
        self.join()
        self._sample()
        found: dict[str, Any] = {
            kind: {"count": len(took), "mean_s": round(sum(took) / len(took), 3), "most_s": round(max(took), 3)}
            for kind, took in self.took.items()
        }
        changed = {kind: sum(self._last[n][kind] - self._first[n][kind] for n in self._last) for kind in COUNTERS}
        return found | {kind: count for kind, count in changed.items() if count}


async def play(ports: dict[str, int], requests: Sequence[Request], last_s: float = LAST_ANSWER_S) -> Played:
    """Send each request at its time. Returns the answers, also those not whole `last_s` seconds after the last request
    was sent, and the faults.
    """
    begun, faults = time.monotonic(), list[str]()
    clients = [Client(ports, faults=faults) for _ in requests]  # each keeps the answer of its one request
    tasks = []
    for client, r in zip(clients, requests, strict=True):
        await asyncio.sleep(max(0.0, begun + r.at_s - time.monotonic()))
        tasks.append(asyncio.create_task(client.ask(r.model, r.prompt, r.output)))
    _, late = await asyncio.wait(tasks, timeout=last_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pairs = zip(requests, clients, strict=True)
    return [(r, c.answers[r.model][0] if r.model in c.answers else Answer(begun + r.at_s)) for r, c in pairs], faults


def ttft_ms(answer: Answer) -> float:
    """Time to the first token; infinite if there was none."""
    return (answer.stamps[0] - answer.sent_s) * 1e3 if answer.stamps else float("inf")


def tpot_ms(answer: Answer) -> float:
    """Mean time between tokens; 0 with one token, and infinite for an answer that is not whole."""
    if not answer.whole or not answer.stamps:
        return float("inf")
    return (answer.stamps[-1] - answer.stamps[0]) * 1e3 / max(1, len(answer.stamps) - 1)


def times(found: Sequence[tuple[Request, Answer]]) -> dict[str, Any]:
    """Statistics of some requests. Times are of those with a first token, attainment is of all."""
    ttfts, tpots = [ttft_ms(a) for _, a in found], [tpot_ms(a) for _, a in found]
    got, between = [t for t in ttfts if t < float("inf")], [t for t in tpots if 0 < t < float("inf")]

    def part(met: Iterable[bool]) -> float | None:
        return round(sum(met) / len(found), 4) if found else None

    return {
        "requests": len(found), "answered": sum(a.whole for _, a in found),
        "ttft_met": part(t <= TTFT_MS for t in ttfts), "tpot_met": part(t <= TPOT_MS for t in tpots),
        "both_met": part(t <= TTFT_MS and u <= TPOT_MS for t, u in zip(ttfts, tpots, strict=True)),
        "both_met_long": part(t <= LONG_TTFT_MS and u <= TPOT_MS for t, u in zip(ttfts, tpots, strict=True)),
        **{f"ttft_p{p}_ms": middle(got, p / 100) for p in (50, 90, 99)},
        **{f"tpot_p{p}_ms": middle(between, p / 100) for p in (50, 99)},
    }  # fmt: skip


def trace_row(found: Sequence[tuple[Request, Answer]], faults: list[str], hottest: str) -> dict[str, Any]:
    """The row of the trace, without what the server's counters say."""
    at_once = [pair for pair in found if pair[1].queued_ms is not None and pair[1].queued_ms <= AT_ONCE_MS]
    waited = [pair for pair in found if pair not in at_once]
    keys = ("requests", "both_met", "both_met_long", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")

    def short(pairs: Sequence[tuple[Request, Answer]]) -> dict[str, Any]:
        return {key: value for key, value in times(pairs).items() if key in keys}

    queued = [a.queued_ms for _, a in waited if a.queued_ms is not None]
    return times(found) | {
        "wrong_model": sum(not a.models <= {r.model} for r, a in found), "faults": faults[:3], "faulty": len(faults),
        "at_once": short(at_once), "waited": short(waited) | {"queued_p50_ms": middle(queued)},
        "hottest": short([pair for pair in found if pair[0].model == hottest]),
    }  # fmt: skip


def measure(out: Path, until_s: float, host: int) -> Iterator[dict[str, Any]]:
    """Run all steps; yields the rows."""
    folder, begun_s = Path(tempfile.mkdtemp(prefix="many-")), time.monotonic()
    wanted = min(host, MODELS * (MEMORY + PROGRAM) + OTHERS)
    with grown(wanted):
        count = count_for(min(host, total_bytes()))
        if count < 2:
            raise SystemExit(f"{total_bytes() / 2**30:.0f} GiB of host memory hold no two models; see HOST")
        grew_s = time.monotonic() - begun_s
    names = [f"model-{k + 1}" for k in range(count)]
    gpu, swap = (count + 1) // 2 * MEMORY, count * MEMORY
    rows = [{"name": n, "command": subprocess.list2cmdline(engine(n, "{port}")), "memory": f"{MEMORY}B"} for n in names]
    gpus = {"memory": f"{gpu}B", "mechanism": MECHANISM} | ({"model": "soft"} if SOFT else {})
    models = out.with_suffix(".models.json")
    models.write_text(json.dumps({"gpus": gpus, "models": rows}))
    drawn = draw(names, DRAWN_S, KIND)

    hottest = shortened([r for r in drawn if r.model == names[0] and r.at_s < TRACE_S])
    port, log = free_port(), folder / "dedicated.log"
    with program(engine(names[0], str(port), tenant=False), log, lambda: listed(port)):
        asyncio.run(play({names[0]: port}, [Request(0.0, names[0], 64, 8)]))
        found, faults = asyncio.run(play({names[0]: port}, [r for r in hottest if r.at_s < DEDICATED_S]))
    yield {"row": "dedicated"} | times(found) | {"faults": faults[:3]}

    begun_s = time.monotonic()
    with cotenant(folder, models, swap) as port:
        server_s, ports = time.monotonic() - begun_s, dict.fromkeys(names, port)
        found, faults = asyncio.run(play(ports, [Request(0.0, name, 64, 8) for name in names], START_S))
        if faults or not all(a.whole for _, a in found):
            raise SystemExit(f"models did not start: {faults}, {status(port)}")
        yield {
            "row": "start", "models": count, "shape": SHAPE, "memory_gib": MEMORY / 2**30,
            "gpu_memory_gib": gpu / 2**30, "swap_memory_gib": swap / 2**30,
            "host_gib": round(total_bytes() / 2**30, 1), "grew_s": round(grew_s, 1), "server_s": round(server_s, 1),
            "first_token_s": [round(ttft_ms(a) / 1e3, 1) for _, a in found],
            "hottest_rps": HOTTEST_RPS, "skew": SKEW,
        } | dataclasses.asdict(KIND)  # fmt: skip
        # the models that came last leave for the first time, for which their host memory is locked
        watch, away = Watch(port), [n for n, row in status(port).items() if row["state"] == "evicted"]
        found, faults = asyncio.run(play(ports, [Request(0.0, name, 64, 8) for name in away]))
        yield {
            "row": "warm", "returned": len(away), "faults": faults[:3], "card_gib": card_gib(),
            "ttft_ms": [round(ttft_ms(a)) for _, a in found], "switches": watch.close(),
        }  # fmt: skip
        seconds = min(TRACE_S, until_s - time.monotonic() - END_S)
        if seconds < 5.0:
            raise SystemExit("no time left for the trace")
        sent = [r for r in drawn if r.at_s < seconds]
        with out.with_suffix(".csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("time_s", "model", "prompt_tokens", "output_tokens"))
            table.writerows((r.at_s, r.model, r.prompt, r.output) for r in sent)
        watch = Watch(port)
        found, faults = asyncio.run(play(ports, sent))
        switches = watch.close()
        row = {"row": "trace", "seconds": round(seconds, 1)} | trace_row(found, faults, names[0])
        yield row | {"switches": switches, "card_gib": card_gib()}
    most, mean = together([span for name in names for span in bursts(sent, name)], seconds)
    yield {"row": "gpus", "cotenant": 1, "one_per_model": count, "most_at_once": most, "mean_at_once": mean}


def main() -> None:
    """Run the steps, and write a line per row."""
    out, began_s = Path(sys.argv[1]), time.monotonic()
    until_s = began_s + (float(sys.argv[2]) if len(sys.argv) > 2 else 265.0)
    host = parse_memory(sys.argv[3], "HOST") if len(sys.argv) > 3 else total_bytes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    if SOFT:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    out.write_text("")

    def say(row: dict[str, Any]) -> None:
        print(line := json.dumps(row | {"at_s": round(time.monotonic() - began_s, 1)}), flush=True)
        with out.open("a") as file:
            file.write(line + "\n")

    try:
        for row in measure(out, until_s, host):
            say(row)
    except (SystemExit, OSError, subprocess.SubprocessError, InputError, WorkError) as error:
        say({"row": "fault", "fault": str(error)})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
