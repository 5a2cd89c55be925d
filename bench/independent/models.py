"""Seven models on one GPU by `cotenant serve`: the largest load at which each has 99 % of its requests in time.

    python bench/independent/models.py [--soft] [PLANNER...]      gpulet-interference, temporal

On a real GPU, the models are seven encoders of PyTorch, profiled by `cotenant profile service`. --soft tests the script
with seven timed models and a made-up profile. At factor 1 the models request 1, 1/2 ... 1/7 of the GPU's time, scaled
so that the sum is the whole GPU, where each model's capacity is that of its largest batch alone. An SLO is six times
the duration of that batch alone, which corresponds to the 15 to 40 ms in docs/benchmarks/serving.md. The plan is that
for the largest multiple of 0.05 of those rates for which `cotenant plan` finds one. Requests arrive as a Poisson
process and are sent at their scheduled times, whether or not earlier ones were answered; a latency counts from that
time.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from servers import free_port

SOFT = "--soft" in sys.argv
NAMES = [f"encoder{n}" for n in range(7)]
# duration of a trial in s, factor between two rates, attainment that is wanted; the rarest model gets a hundred
# requests or more
SECONDS, STEP, WANTED = 20.0 if SOFT else 5.0, 1.05, 0.99
BATCHES = (1, 4, 16, 32)
PERCENT = (10, 20, 30, 40, 50, 60, 80, 100)
GPU = "rehearsal" if SOFT else "card"

# an encoder as a user would write it in a model file; the value of LAYERS is put before it
ENCODER = """
import torch
INPUTS, OUTPUTS = [("x", "INT64", [512])], [("y", "FP32", [8])]
layer = torch.nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, norm_first=True)
words = torch.nn.Embedding(1000, 2048).half().cuda().eval()
encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).half().cuda().eval()
@torch.inference_mode()
def run(x):
    hidden = encoder(words(torch.from_numpy(x % 1000).cuda()))
    return hidden[:, 0, :8].float().cpu().numpy()
"""


def made_up(folder: Path) -> dict[str, Any]:
    """A made-up profile of seven models that use a part of the GPU well. They are slow enough for two cores and this
    client."""
    models = {}
    for name, one in zip(NAMES, (8, 10, 12, 16, 20, 26, 32), strict=True):
        times = {f"{p}%": {str(b): one * (0.7 + 0.3 * b) / (p / 100) ** 0.9 for b in BATCHES} for p in PERCENT}
        models[name] = {"memory_mb": 200, "latency_ms": times, "overhead_ms": {str(b): 0.1 for b in BATCHES}}
    return {
        "gpu": GPU, "source": "made up", "memory_mb": 16000, "usable": 0.9, "per_gpulet_mb": 100, "max_gpulets": 10,
        "margin": 1.05, "partitions": {f"{p}%": p / 100 for p in PERCENT}, "models": models,
    }  # fmt: skip


def profile(folder: Path) -> dict[str, Any]:
    """Write the models to the folder, and measure their profile."""
    where = folder / "profile.json"
    if SOFT:
        where.write_text(json.dumps(made_up(folder)))
    for n, name in enumerate(NAMES):
        if SOFT:
            continue
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(f"LAYERS = {6 + 6 * n}\n{ENCODER}")
        grid = ["--mechanism", "mps", "--partitions", "20%,50%,100%", "--batches", ",".join(map(str, BATCHES))]
        command = ["cotenant", "profile", "service", str(folder / name), "--out", str(where), "--gpu", GPU]
        subprocess.run([*command, *grid, "--seconds", "200ms"], check=True)
    found: dict[str, Any] = json.loads(where.read_text())
    return found


def write_services(folder: Path, rates: dict[str, float], slo_ms: dict[str, float]) -> Path:
    rows = [
        {"name": n, "model": n if SOFT else f"{folder}/{n}", "rate_rps": rates[n], "slo_ms": slo_ms[n]} for n in NAMES
    ]
    file: dict[str, Any] = {
        "gpus": {"count": 1, "model": GPU}, "mechanism": "mps", "profile": "profile.json", "services": rows,
        "replan": {"headroom": 1.0},
    }  # fmt: skip
    if SOFT:
        file["backend"] = "timed"
    (folder / "services.yaml").write_text(json.dumps(file))  # a JSON document is also a YAML document
    return folder / "services.yaml"


def largest_plan(folder: Path, rates: dict[str, float], slo_ms: dict[str, float], planner: str) -> float:
    """Write plan.json with the largest plan; returns its factor."""
    for percent in range(100, 0, -5):
        services = write_services(folder, {n: r * percent / 100 for n, r in rates.items()}, slo_ms)
        command = ["cotenant", "plan", str(services), "--planner", planner, "--out", str(folder / "plan.json")]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True)
        if done.returncode == 0 and json.loads(done.stdout)["feasible"]:
            return percent / 100
    print(f"{planner} has no plan for any part of the load", done.stderr, flush=True)
    return 0.0


class Client:
    """Sends requests over connections that are kept open, with asyncio's streams only."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        shape = [1, 4] if SOFT else [1, 512]
        entry = {"name": "INPUT" if SOFT else "x", "shape": shape, "datatype": "FP32" if SOFT else "INT64"}
        self.body = json.dumps({"inputs": [entry | {"data": [7] * shape[1]}]}).encode()

    async def ask(self, model: str) -> int:
        """Send one request; returns the status of the answer."""
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(self.body)}\r\n\r\n"
        writer.write(head.encode() + self.body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        await reader.readexactly(length)
        self.idle.append((reader, writer))
        return int(lines[0].split()[1])

    async def trial(self, rates: dict[str, float], slo_ms: dict[str, float]) -> tuple[float, float, float]:
        """Run one trial. Returns the worst model's fraction of requests in time, all requests per second, and how late
        this client sent requests (p99, ms)."""
        begin = time.monotonic() + 0.1
        good, sent, late = dict.fromkeys(rates, 0), dict.fromkeys(rates, 0), list[float]()

        async def one(model: str, due: float) -> None:
            late.append((time.monotonic() - due) * 1e3)
            try:
                status = await asyncio.wait_for(self.ask(model), 30)
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                status = 0
            good[model] += status == 200 and (time.monotonic() - due) * 1e3 <= slo_ms[model]

        async def stream(model: str) -> None:
            draw, due = random.Random(f"{model} {rates[model]}"), begin
            async with asyncio.TaskGroup() as group:
                while (due := due + draw.expovariate(rates[model])) < begin + SECONDS:
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    sent[model] += 1
                    group.create_task(one(model, due))

        await asyncio.gather(*map(stream, rates))
        worst = min((good[m] / sent[m] for m in rates if sent[m]), default=1.0)
        return worst, sum(sent.values()) / SECONDS, sorted(late)[len(late) * 99 // 100] if late else 0.0


async def climb(port: int, rates: dict[str, float], slo_ms: dict[str, float], planned: float) -> None:
    client, best = Client(port), None
    for model in NAMES:  # the first request of a model may compile it
        while await client.ask(model) != 200:
            await asyncio.sleep(0.2)
    factor = planned / STEP**8
    while True:
        for _ in range(3):  # a trial that fails is repeated up to twice, because this client itself may have been late
            asked = {m: r * factor for m, r in rates.items()}
            worst, total, late = await client.trial(asked, slo_ms)
            print(f"  factor {factor:.3f}: worst model {worst:.4f} in time, {total:.0f}/s, client late {late:.1f} ms")
            if worst >= WANTED:
                break
        else:
            break
        best, factor = (factor, total), factor * STEP
    if best is None:
        print(f"not even {factor:.3f} of the rates are served, with a plan for {planned:g}", flush=True)
    else:
        print(f"largest factor {best[0]:.3f} ({best[1]:.0f} requests/s), plan for {planned:g}", flush=True)


def main(planners: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="independent-"))
    models = profile(folder)["models"]
    largest = {n: float(models[n]["latency_ms"]["100%"][str(BATCHES[-1])]) for n in NAMES}
    parts = [1 / (n + 1) for n in range(len(NAMES))]
    alone = {n: BATCHES[-1] / largest[n] * 1e3 for n in NAMES}
    rates = {n: alone[n] * part / sum(parts) for n, part in zip(NAMES, parts, strict=True)}
    slo_ms = {n: 6 * t for n, t in largest.items()}
    print("factor 1, requests/s:", {n: round(r, 1) for n, r in rates.items()})
    print("SLO, ms:", {n: round(t) for n, t in slo_ms.items()}, flush=True)
    for planner in planners or ["gpulet-interference", "temporal"]:
        planned = largest_plan(folder, rates, slo_ms, planner)
        if not planned:
            continue
        port = free_port()
        command = ["cotenant", "serve", str(folder / "services.yaml"), "--plan", str(folder / "plan.json")]
        command += ["--http", f"127.0.0.1:{port}", "--grpc", "none", "--json"]
        print(planner, flush=True)
        with open(folder / "log", "w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as server:
            try:
                assert server.stdout
                # the server prints this line when it accepts requests
                assert server.stdout.readline(), (folder / "log").read_text()
                asyncio.run(climb(port, rates, slo_ms, planned))
            finally:
                server.terminate()


if __name__ == "__main__":
    main([a for a in sys.argv[1:] if a != "--soft"])
