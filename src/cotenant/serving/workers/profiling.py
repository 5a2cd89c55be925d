"""Measures a service on this machine: latency by batch and partition, overhead, loading time, memory, and slowdown by
other models."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.errors import InputError, WorkError
from cotenant.core.partial import Partial
from cotenant.devices.registry import device_of
from cotenant.serving.worker import WorkerFactory
from cotenant.serving.workers.devices import visible_gpus
from cotenant.serving.workers.onemodel import OneModel, Sample, local_factory
from cotenant.serving.workers.repository import Found

LEAST_RUNS, MOST_RUNS, WARM_RUNS = 12, 2000, 3
Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class ProfileRun:
    """Settings of a profile: a model on shares of this machine. `partitions`: label -> fraction of the machine.
    `against`: other models, each of which runs on the other half of the machine at the same time. `seconds`: length
    of each measurement. `sample`: a file with an inference request to use.
    """

    name: str
    found: Found
    mechanism: str
    partitions: Mapping[str, float]
    batches: tuple[int, ...]
    seconds: float = 0.5
    against: tuple[tuple[str, Found], ...] = ()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    gpu: str = "CPU"
    margin: float | None = None
    sample: Path | None = None

    @property
    def needs_gpu(self) -> bool:
        """Whether the model runs on a GPU; otherwise it runs on CPU cores."""
        return mechanisms.find(self.mechanism).capabilities.needs_gpu

    @property
    def cells(self) -> list[tuple[str, int]]:
        """(partition, batch) to measure, the largest partition first."""
        order = sorted(self.partitions, key=lambda label: -self.partitions[label])
        return [(label, batch) for label in order for batch in self.batches]

    @property
    def key(self) -> str:
        """Settings of this run as text. Measurements that an interrupted run left in a partial file (see `Partial`) are
        used only if they were made with the same settings."""
        sample = None if self.sample is None else str(self.sample)
        found = self.found
        sizes = {name: list(shape) for name, shape in sorted(self.sizes.items())}
        return json.dumps([self.name, found.path, found.version, self.mechanism, self.seconds, self.gpu, sample, sizes])


class OneAtATimeError(InputError):
    """Raised if several batch sizes were given for a model that takes one item at a time."""


def cell_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Statistics of a measurement: median ms in the worker, median ms of overhead, and the 95th percentile of a batch's
    duration divided by its median."""
    totals = sorted(s.total_ms for s in samples)
    executed = statistics.median(s.executed_ms for s in samples)
    middle = totals[len(totals) // 2]
    return {
        "executed_ms": executed,
        "overhead_ms": max(0.0, statistics.median(s.total_ms - s.executed_ms for s in samples)),
        "spread": totals[min(len(totals) - 1, int(len(totals) * 0.95))] / middle,
        "runs": len(samples),
    }


async def measure_cell(model: OneModel, batch: int, seconds: float) -> dict[str, float]:
    """Run batches one after the other for `seconds`, after a few batches for warm-up."""
    for _ in range(WARM_RUNS):
        await model.run(batch)
    samples: list[Sample] = []
    until = time.monotonic() + seconds
    while len(samples) < LEAST_RUNS or (time.monotonic() < until and len(samples) < MOST_RUNS):
        samples.append(await model.run(batch))
    return cell_of(samples)


async def measure(
    run: ProfileRun, partial: Partial, tick: Tick = lambda done, of: None, factory: WorkerFactory | None = None
) -> dict[str, Any]:
    """All measurements of a run: those in the partial file, and the missing ones, which this function makes."""
    made = local_factory(run.mechanism) if factory is None else factory
    cells = run.cells
    total = len(cells) + 1 + len(run.against)
    done = 0
    try:
        for label in dict.fromkeys(label for label, _ in cells):
            missing = [b for x, b in cells if x == label and f"cell/{label}/{b}" not in partial.rows]
            done += sum(x == label for x, _ in cells) - len(missing)
            if missing:
                await _partition(run, made, partial, label, missing)
                done += len(missing)
            tick(done, total)
        if "base_bytes" not in partial.rows:
            partial.put("base_bytes", await _base_bytes(run, made))
        tick(done + 1, total)
        for n, (name, found) in enumerate(run.against):
            if f"beside/{name}" not in partial.rows:
                partial.put(f"beside/{name}", await _beside(run, made, name, found))
            tick(done + 2 + n, total)
    finally:
        await made.close()
    return partial.rows


def _one(
    run: ProfileRun, factory: WorkerFactory, label: str, fraction: float, name: str = "", found: Found | None = None
) -> OneModel:
    return OneModel(
        factory, name or run.name, found or run.found, fraction=fraction, partition=label, mechanism=run.mechanism,
        batch=max(run.batches), gpu_model=run.gpu, sizes=dict(run.sizes), sample=None if name else run.sample,
    )  # fmt: skip


async def _partition(
    run: ProfileRun, factory: WorkerFactory, partial: Partial, label: str, batches: Sequence[int]
) -> None:
    before = _gpu_used() if run.needs_gpu else 0
    async with _one(run, factory, label, run.partitions[label]) as model:
        if not model.info.batchable and max(batches) > 1:
            what = f"{run.name} takes one item at a time: profile it with --batches 1"
            raise OneAtATimeError(what, field="batches")
        for batch in batches:
            partial.put(f"cell/{label}/{batch}", await measure_cell(model, batch, run.seconds))
        resident = _gpu_used() - before if run.needs_gpu else model.resident_bytes()
        known = partial.rows.get("memory", {"load_s": [], "bytes": 0})
        loads = [*known["load_s"], model.load_s]
        partial.put("memory", {"load_s": loads, "bytes": max(known["bytes"], resident)})


async def _base_bytes(run: ProfileRun, factory: WorkerFactory) -> int:
    """Main memory of a worker without models, in bytes; every gpulet needs that much. On a GPU the CUDA context counts
    in each model's memory instead, so the sum over models may be too large but never too small."""
    if run.needs_gpu:
        return 0
    from cotenant.serving.worker import WorkerSpec

    class Nobody:
        def finished(self, *_: Any) -> None: ...
        def died(self, *_: Any) -> None: ...

    worker = factory.create(WorkerSpec("none", 0, run.gpu, "none", 0.01, run.mechanism, ()), Nobody())
    await worker.start()
    with open(f"/proc/{worker.pid}/statm", encoding="ascii") as file:
        found = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    await worker.stop(2.0)
    return found


async def _beside(run: ProfileRun, factory: WorkerFactory, name: str, found: Found) -> dict[str, Any]:
    """Run two models on the share closest to one half, alone and concurrently. Returns the slowdown of each."""
    label = min(run.partitions, key=lambda x: abs(run.partitions[x] - 0.5))
    batch = run.batches[len(run.batches) // 2]
    fraction = min(0.5, run.partitions[label])
    async with (
        _one(run, factory, label, fraction) as own,
        _one(run, factory, label, fraction, f"{name} ", found) as other,
    ):
        size = batch if other.info.batchable else 1
        alone = await measure_cell(own, batch, run.seconds)
        other_alone = await measure_cell(other, size, run.seconds)
        together, other_together = await asyncio.gather(
            measure_cell(own, batch, run.seconds * 2), measure_cell(other, size, run.seconds * 2)
        )
    return {
        "batch": batch,
        "slowdown": together["executed_ms"] / alone["executed_ms"],
        "slows_it": other_together["executed_ms"] / other_alone["executed_ms"],
    }


def _gpu_used() -> int:
    gpu = visible_gpus()[0]
    free = device_of(gpu).free_bytes(gpu.uuid)
    if free is None:
        raise WorkError(f"the driver does not tell how much memory of GPU {gpu.uuid} is in use")
    return gpu.memory_bytes - free


def machine_memory(run: ProfileRun) -> int:
    """Bytes of the memory that models share: the GPU's, or main memory."""
    if not run.needs_gpu:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return visible_gpus()[0].memory_bytes


def assemble(run: ProfileRun, rows: Mapping[str, Any], earlier: Mapping[str, Any] | None, today: str) -> dict[str, Any]:
    """Return the profile as a JSON object. `earlier`: a profile of this machine to which the model is added.

    The overhead is the median over partitions, because it does not depend on them. The margin is `run.margin` if given.
    Otherwise, each measurement has a ratio: the 95th percentile of a batch's duration divided by its median. The margin
    is the median of these ratios, limited to 1.02 to 1.5. Beside a neighbour, every latency is multiplied by `alpha`,
    the largest slowdown measured beside the models `run.against`; 1 if there are none. If `earlier` has a larger alpha
    or measured margin, the larger one is used.
    """
    latency: dict[str, dict[str, float]] = {}
    for label, batch in run.cells:
        latency.setdefault(label, {})[str(batch)] = round(rows[f"cell/{label}/{batch}"]["executed_ms"], 5)
    overhead = {
        str(b): round(statistics.median(rows[f"cell/{x}/{b}"]["overhead_ms"] for x in run.partitions), 5)
        for b in run.batches
    }
    spread = statistics.median(rows[f"cell/{x}/{b}"]["spread"] for x, b in run.cells)
    memory = max(0, rows["memory"]["bytes"] - rows["base_bytes"])
    beside = [row for name, row in rows.items() if name.startswith("beside/")]
    alpha = max([1.0, *(max(r["slowdown"], r["slows_it"]) for r in beside)])
    model = {"memory_mb": round(memory / 1e6, 3), "latency_ms": latency, "overhead_ms": overhead, "l2": {}, "dram": {}}
    zero = dict.fromkeys(("l2_self", "l2_other", "dram_self", "dram_other"), 0.0)
    base = dict(earlier or {})
    if base and (base["gpu"] != run.gpu or base["partitions"] != dict(run.partitions)):
        what = f"is a profile of {base['gpu']} with other partitions; write to another file"
        raise InputError(what, field="out")
    known = base.get("interference")
    alpha = max(alpha, known["constant"]) if known else alpha
    margin = run.margin if run.margin is not None else round(min(1.5, max(1.02, spread)), 4)
    return {
        "gpu": run.gpu,
        "source": f"measured by cotenant profile service on {today}: {describe_machine(run)}",
        "memory_mb": round(machine_memory(run) / 1e6, 3),
        "usable": 0.9,
        "per_gpulet_mb": round(rows["base_bytes"] / 1e6, 3),
        "max_gpulets": most_gpulets(run.partitions),
        "margin": margin if run.margin is not None else max(margin, base.get("margin", margin)),
        "partitions": dict(run.partitions),
        "interference": {**zero, "constant": round(alpha, 4)} if alpha > 1.0 else None,
        "models": {**base.get("models", {}), run.name: model},
    }


def most_gpulets(partitions: Mapping[str, float]) -> int:
    """Largest number of gpulets on one GPU: how many of the smallest partition fit on it, but at most 64."""
    return max(1, min(64, int(1.0 / min(partitions.values()) + 1e-9)))


def describe_machine(run: ProfileRun) -> str:
    """Description of the measurement for the profile's `source`."""
    if run.needs_gpu:
        return f"{visible_gpus()[0].name} under {run.mechanism}"
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def core_partitions() -> dict[str, float]:
    """At most eight partitions of this machine, each of a whole number of cores: label -> fraction of the cores."""
    cores = len(os.sched_getaffinity(0))
    counts = range(1, cores + 1) if cores <= 8 else sorted({max(1, round(cores * k / 8)) for k in range(1, 9)})
    return {f"{round(100 * n / cores, 4):g}%": n / cores for n in counts}
