"""The serving backend on a GPU: CUDA graphs, green contexts of several sizes, worker processes. Needs torch and one
GPU.

CUDA_VISIBLE_DEVICES=GPU-... PYTHONPATH=src python bench/gpu/backend.py OUT.json graphs,ladder,worker,neighbours
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "src")]

from cases import Keep, each  # noqa: E402

from cotenant.serving.backends.base import Share  # noqa: E402
from cotenant.serving.backends.torch import TorchModel  # noqa: E402
from cotenant.serving.protocol.tensors import Tensor  # noqa: E402
from cotenant.serving.worker import Job, ModelSpec, Result, Worker, WorkerSpec  # noqa: E402

ON_GPU = Path("/dev/nvidiactl").exists()  # without a GPU the script runs on the CPU, which only tests the script itself
FOLDER = Path(tempfile.mkdtemp(prefix="cotenant-backend-"))
CONFIG = {"max_batch_size": 32, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, 224, 224]}],
          "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1000]}]}  # fmt: skip


def model_folder() -> str:
    """Folder with a ResNet-50 as TorchScript, with random weights. It is made at the first call."""
    import serving_models
    import torch

    path = FOLDER / "resnet50" / "1"
    if not (path / "model.pt").exists():
        path.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        net = serving_models.resnet([3, 4, 6, 3]).eval()
        with torch.no_grad():
            torch.jit.trace(net, torch.zeros(2, 3, 224, 224)).save(str(path / "model.pt"))
    return str(path)


def spec(batch: int = 32, **config: Any) -> ModelSpec:
    return ModelSpec("resnet50", "resnet50", "torch", model_folder(), "1", batch, {**CONFIG, **config})


def images(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3, 224, 224), np.float32)


def timed(model: TorchModel, count: int, repeats: int = 20) -> float:
    """Median duration of a batch in ms, copies included."""
    x = images(count)
    repeats = repeats if ON_GPU else 1
    for _ in range(min(3, repeats)):
        model.run([x], count)
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        model.run([x], count)
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def graphs(report: Keep) -> dict[str, Any]:
    """Compare times and results of eager execution and CUDA graphs by batch size, also for an exported program."""
    return each({"exported": exported, "resnet50": resnet50}, report, 60.0)


def resnet50(report: Keep) -> dict[str, Any]:
    """Time TorchScript: ms of a batch of each size, eager and by its graph."""
    found: dict[str, Any] = {"load_s": {}, "ms": {}}
    without = spec(parameters={"no_graphs": {"string_value": "true"}})
    eager, captured = (TorchModel(x, Share(1.0, on_gpu=True)) for x in (without, spec()))
    found["load_s"] = {"eager": eager.info.load_s, "graphs": captured.info.load_s}
    found["memory_gib"] = captured.info.memory_bytes / 2**30
    for count in (1, 2, 4, 5, 8, 16, 32):
        a, b = eager.run([images(count)], count)[0], captured.run([images(count)], count)[0]
        found["ms"][count] = {
            "eager": timed(eager, count), "graphs": timed(captured, count),
            "largest_difference": float(np.abs(a - b).max()), "largest": float(np.abs(a).max()),
        }  # fmt: skip
        report(found)
    return found


def exported(_report: Keep) -> dict[str, Any]:
    """Time a small exported program (.pt2) with a dynamic batch size."""
    import torch

    path = FOLDER / "exported" / "1"
    path.mkdir(parents=True)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (torch.zeros(2, 64),), dynamic_shapes=({0: batch},))
    torch.export.save(program, str(path / "model.pt2"))
    model = TorchModel(ModelSpec("e", "e", "torch", str(path), "1", 16), Share(1.0, on_gpu=True))
    x = np.random.default_rng(1).standard_normal((5, 64), np.float32)
    difference = float(np.abs(model.run([x], 5)[0] - net(torch.from_numpy(x)).detach().numpy()).max())
    return {"difference": difference, "ms": timed_small(model, x), "memory_bytes": model.info.memory_bytes}


def timed_small(model: TorchModel, x: np.ndarray) -> float:
    took = []
    for _ in range(200):
        began = time.perf_counter()
        model.run([x], len(x))
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def ladder(report: Keep) -> dict[str, Any]:
    """Measure one process on green contexts of several sizes: SMs, ms of a batch of 32, and time of a switch between
    contexts."""
    model = TorchModel(spec(), Share(1.0, on_gpu=True, resizes=True))
    if model._contexts is None:
        return {"skipped": "green contexts need a GPU"}
    whole: dict[str, Any] = {"sms": model._contexts.sms, "piece": model._contexts._group}

    def rung(fraction: float) -> dict[str, Any]:
        began = time.perf_counter()
        model.resize(fraction)
        first_s = time.perf_counter() - began
        return {"sms": model._sms, "first_step_s": first_s, "ms": timed(model, 32), "ms_1": timed(model, 1)}

    def switches(_report: Keep) -> dict[str, Any]:
        took = []
        for i in range(40):
            began = time.perf_counter()
            model.resize((0.25, 0.75)[i % 2])
            took.append((time.perf_counter() - began) * 1e6)
            model.run([images(1)], 1)
        after = {}
        for fraction in (0.25, 0.75):
            model.resize(fraction)
            after[fraction] = timed(model, 32)
        return {"switch_us": statistics.median(took), "after_switching": after}

    fractions = (1.0, 0.75, 0.5, 0.25, 0.125)
    cases = {str(fraction): lambda _report, fraction=fraction: rung(fraction) for fraction in fractions}
    return whole | each(cases | {"switches": switches}, lambda found: report(whole | found), 40.0)


class Heard:
    """Receives results and failures of workers."""

    def __init__(self) -> None:
        self.waiting: dict[Worker, asyncio.Future[Result]] = {}

    def finished(self, worker: Worker, job: Job, result: Result) -> None:
        self.waiting.pop(worker).set_result(result)

    def died(self, worker: Worker, why: str) -> None:
        self.waiting.pop(worker).set_exception(RuntimeError(why))

    async def run(self, worker: Worker, units: list[list[Tensor]], number: int) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.waiting[worker] = future
        worker.submit(Job(number, "resnet50", units))
        return await future


def units_of(count: int) -> list[list[Tensor]]:
    return [[Tensor("x", "FP32", (3, 224, 224), image.tobytes())] for image in images(count)]


async def median_ms(heard: Heard, worker: Worker, count: int, seconds: float = 3.0) -> tuple[float, float]:
    """Median duration of a batch in ms, measured by the gateway and by the worker."""
    units, whole, inner = units_of(count), [], []
    end = time.perf_counter() + seconds
    number = 0
    while time.perf_counter() < end:
        number += 1
        began = time.perf_counter()
        result = await heard.run(worker, units, number)
        whole.append((time.perf_counter() - began) * 1e3)
        inner.append(result.executed_ms)
    return statistics.median(whole), statistics.median(inner)


def worker_spec(name: str, mechanism: str, fraction: float, start: float = 0.0) -> WorkerSpec:
    return WorkerSpec(name, 0, "H100-80GB", f"{fraction:.0%}", fraction, mechanism, (spec(),), start)


def worker(report: Keep) -> dict[str, Any]:
    """Measure the cost of a worker process, and batch times under several MPS percentages."""
    from cotenant.serving.workers.local import LocalWorkers

    async def measure() -> dict[str, Any]:
        heard, found = Heard(), {}
        for mechanism, fraction in (("time", 1.0), ("mps", 1.0), ("mps", 0.5), ("mps", 0.25)):
            factory = LocalWorkers(mechanism, 1)
            made = factory.create(worker_spec("w", mechanism, fraction), heard)
            began = time.perf_counter()
            infos = await made.start()
            row: dict[str, Any] = {"boot_s": time.perf_counter() - began, "load_s": infos["resnet50"].load_s}
            for count in (1, 8, 32):
                row[str(count)] = await median_ms(heard, made, count, 2.0)
            await made.stop(5.0)
            await factory.close()
            found[f"{mechanism} {fraction}"] = row
            report(found)
        return found

    return asyncio.run(measure())


def neighbours(report: Keep) -> dict[str, Any]:
    """Measure two workers on disjoint green contexts: each alone, both together, and together after both were
    resized."""
    from cotenant.serving.workers.local import LocalWorkers

    async def measure() -> dict[str, Any]:
        heard, found = Heard(), {}
        factory = LocalWorkers("green", 1)
        a = factory.create(worker_spec("a", "green", 0.5), heard)
        b = factory.create(worker_spec("b", "green", 0.5, 0.5), heard)
        await asyncio.gather(a.start(), b.start())
        for name, one in (("a alone", a), ("b alone", b)):
            found[name] = await median_ms(heard, one, 32)
            report(found)
        together = await asyncio.gather(median_ms(heard, a, 32), median_ms(heard, b, 32))
        found["together"] = dict(zip("ab", together, strict=True))
        found["resized"] = [await a.resize(0.25), await b.resize(0.75)]  # type: ignore[attr-defined]
        together = await asyncio.gather(median_ms(heard, a, 32), median_ms(heard, b, 32))
        found["together 25 % and 75 %"] = dict(zip("ab", together, strict=True))
        await asyncio.gather(a.stop(5.0), b.stop(5.0))
        await factory.close()
        return found

    return asyncio.run(measure())


STEPS = {"graphs": graphs, "ladder": ladder, "worker": worker, "neighbours": neighbours}


def main() -> None:
    """Run the named steps, each in a child process. The result is written after each step."""
    out = Path(sys.argv[1])
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    if len(names) == 1:
        content: dict[str, Any] = {}

        def report(partial: Any) -> None:
            content[names[0]] = partial
            out.write_text(json.dumps(content, indent=1))

        try:
            report(STEPS[names[0]](report))
        except BaseException:
            content.setdefault(names[0], {})
            content[f"{names[0]} failed"] = traceback.format_exc()[-4000:]
            out.write_text(json.dumps(content, indent=1))
        return
    import subprocess

    whole: dict[str, Any] = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    for name in names:
        part = FOLDER / f"{name}.json"
        began = time.time()
        try:
            done = subprocess.run(
                [sys.executable, __file__, str(part), name], timeout=100, capture_output=True, text=True, check=False
            )
            tail = done.stderr[-2000:]
        except subprocess.TimeoutExpired as error:
            tail = f"over 100 s: {str(error.stderr)[-2000:]}"
        whole |= json.loads(part.read_text()) if part.exists() else {name: "nothing was written"}
        whole[f"{name} took_s"], whole[f"{name} stderr"] = time.time() - began, tail
        out.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
