"""The best-effort program of `cotenant bench colocation`, which runs the loads listed below. Like an unmodified
program, it makes no calls to the agent.

Usage: `python -m cotenant.bench.be_loads BACKEND`, where BACKEND is torch or driver.

The program prints `ready NAME` (the name of the GPU). Then it reads these commands from standard input, one a line, and
answers each with a JSON object; end of input ends the program.

- `load KIND` sets up a load: "kind", and "unit_ms" (duration of a launch)
- `run SECONDS` runs the load: the object that bench/workload.py prints for a block, whose unit of work is a launch
- `times SECONDS` runs the load: "times_ns", the times at which each launch returned
- `ends SECONDS` runs the load: "times_ns", the times at which each launch was seen to have completed

The variable COTENANT_BENCH_CORE names a core. When a load has been set up, the threads that launch its work are moved
to that core.

Kinds of loads:

- mmN: bf16 products of NxN matrices; mmzN: of matrices of zeros, which runs the same kernels at much less power
- addN: out = in + 1 over N MiB
- copyN: copies of N MiB on the device
- train-resnet50[:BATCH] and train-transformer[:BATCH]: training steps. With the default batch (32 images, 16 sequences)
  the host limits the speed, with three times that batch the GPU does.

On the software GPU, a kernel occupies the device for as long as the kernel of that load took on an H100.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cotenant.bench.workload import LAUNCH_CORE, in_a_sentence, keep_to, pipelined, run_block
from cotenant.core.errors import InputError

KIND = re.compile(r"^(?:(mm|mmz|add|copy)([1-9]\d{0,4})|(train-resnet50|train-transformer)(?::([1-9]\d{0,3}))?)$")
UNIT_S = 0.001  # duration of one unit of work, which may be several launches
DEPTH = 4  # number of units of work that are kept in flight

# The durations of the software GPU's kernels are those of an H100 80GB HBM3. mm: 2 N^3 / 690 TFLOP/s, with a lower
# bound for small ones; add and copy: 3.0 TB/s, read and written; training: as measured, as (kernels per step, ns of
# each).
TRAINING_KERNELS_NS = {"train-resnet50": (700, 18_000), "train-transformer": (260, 55_000)}
HOST_GAP_NS = {"train-resnet50": 26_000, "train-transformer": 14_000}
TRAINING_BATCH = {"train-resnet50": 32, "train-transformer": 16}


def soft_kernel(kind: str) -> tuple[int, str]:
    """Return the length in ns and the work class of a kernel of the load `kind` on the software GPU."""
    found = KIND.match(kind)
    assert found is not None
    if found[1] in ("mm", "mmz"):
        return max(6_000, round(2 * int(found[2]) ** 3 / 690e3)), "compute"
    if found[1] in ("add", "copy"):
        return max(4_000, round(2 * (int(found[2]) << 20) / 3000)), "memory"
    return round(TRAINING_KERNELS_NS[found[3]][1] * training_batch(kind) / TRAINING_BATCH[found[3]]), "mixed"


def training_batch(kind: str) -> int:
    """Return the number of images or sequences in one training step of the load."""
    found = KIND.match(kind)
    assert found is not None
    assert found[3] is not None
    return int(found[4] or TRAINING_BATCH[found[3]])


class Load:
    """One best-effort load. A unit is `per_unit` calls of `launch`; `mark(i)` records event i behind a unit, `wait(i)`
    waits for it.
    """

    def __init__(
        self, launch: Callable[[], None], mark: Callable[[int], None], wait: Callable[[int], None], per_unit: int
    ) -> None:
        self.launch, self.mark, self.wait, self.per_unit = launch, mark, wait, per_unit

    def run(self, seconds: float) -> dict[str, Any]:
        """Run the load for `seconds` with DEPTH units of work in flight."""

        def start(index: int) -> None:
            for _ in range(self.per_unit):
                self.launch()
            self.mark(index)

        def wait(index: int) -> int:
            self.wait(index)
            return 0

        step, finish = pipelined(start, wait, DEPTH, self.per_unit)
        return run_block(step, finish, seconds)


def launch_times(load: Load, seconds: float) -> dict[str, Any]:
    """Launch the load's work for `seconds` without waiting for completion; record when each launch returned."""
    times_ns: list[int] = []
    until_ns = time.monotonic_ns() + round(seconds * 1e9)
    while not times_ns or times_ns[-1] < until_ns:
        load.launch()
        times_ns.append(time.monotonic_ns())
    load.mark(0)
    load.wait(0)
    return {"times_ns": times_ns}


def end_times(load: Load, seconds: float) -> dict[str, Any]:
    """Launch the load's work for `seconds` with DEPTH launches in flight; record when each launch was seen to have
    completed.
    """
    ends_ns: list[int] = []
    started, until_ns = 0, time.monotonic_ns() + round(seconds * 1e9)
    while time.monotonic_ns() < until_ns:
        if started - len(ends_ns) >= DEPTH:
            load.wait(len(ends_ns) % DEPTH)
            ends_ns.append(time.monotonic_ns())
        load.launch()
        load.mark(started % DEPTH)
        started += 1
    while len(ends_ns) < started:
        load.wait(len(ends_ns) % DEPTH)
        ends_ns.append(time.monotonic_ns())
    return {"times_ns": ends_ns}


def calibrated(load: Load, single: bool) -> float:
    """Set the load's number of launches per unit of work: 1 if `single`, otherwise as many as take UNIT_S. Returns the
    length of a launch in ms.
    """
    for _ in range(3):
        load.run(0.02)
    found = load.run(0.15)
    one_s: float = (found["end_ns"] - found["begin_ns"]) / 1e9 / max(1, found["count"])
    load.per_unit = 1 if single else max(1, round(UNIT_S / one_s))
    return one_s * 1e3


def torch_load(kind: str) -> Load:
    """Return the best-effort load of this kind, run by PyTorch."""
    import torch

    from cotenant.bench.networks import training_step

    torch.cuda.empty_cache()
    events = [torch.cuda.Event() for _ in range(DEPTH)]
    found = KIND.match(kind)
    assert found is not None
    launch: Callable[[], Any]
    if found[1] in ("mm", "mmz"):
        make = torch.randn if found[1] == "mm" else torch.zeros
        a = make(int(found[2]), int(found[2]), device="cuda", dtype=torch.bfloat16)
        launch = partial(torch.mm, a, a, out=torch.empty_like(a))
    elif found[1] is not None:
        x = torch.zeros(int(found[2]) << 19, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        launch = partial(torch.add, x, 1.0, out=y) if found[1] == "add" else partial(y.copy_, x)
    else:
        launch = training_step(torch, found[3], training_batch(kind))
    return Load(launch, lambda i: events[i].record(), lambda i: events[i].synchronize(), 1)


def driver_load(kind: str, cuda: Any) -> Load:
    """Return the best-effort load of this kind on the plain driver API, with kernels of known length."""
    length_ns, work = soft_kernel(kind)
    events = [cuda.event() for _ in range(DEPTH)]
    found = KIND.match(kind)
    assert found is not None
    if found[3] is None:
        launch = partial(cuda.launch, length_ns, work=work)
        return Load(launch, lambda i: cuda.record(events[i]), lambda i: cuda.wait(events[i]), 1)
    kernels, gap_ns = TRAINING_KERNELS_NS[found[3]][0], HOST_GAP_NS[found[3]]

    def step() -> None:
        for index in range(kernels):
            until_ns = time.monotonic_ns() + gap_ns
            cuda.launch(length_ns, work="memory" if index % 2 else "compute")
            while time.monotonic_ns() < until_ns:
                pass

    return Load(step, lambda i: cuda.record(events[i]), lambda i: cuda.wait(events[i]), 1)


def main(arguments: list[str]) -> int:
    """Print `ready`, then execute the lines of standard input."""
    backend = arguments[0] if arguments else "driver"
    if backend == "torch":
        import torch

        name = torch.cuda.get_device_name(0)
        torch.zeros(1, device="cuda")
        cuda = None
    else:
        from cotenant.bench.driver import Driver

        cuda = Driver()
        name = cuda.name
    print(f"ready {name}", flush=True)
    load: Load | None = None
    core, everywhere = os.environ.get(LAUNCH_CORE), os.sched_getaffinity(0)
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["load"] and not KIND.match(" ".join(words[1:])):
            raise InputError(f"no load is called {' '.join(words[1:])!r}: see --be of cotenant bench colocation")
        if words[:1] == ["load"]:
            os.sched_setaffinity(0, everywhere)
            load = None  # this frees the memory of the previous load before the next one allocates
            load = torch_load(words[1]) if cuda is None else driver_load(words[1], cuda)
            one_ms = calibrated(load, words[1].startswith("train-"))
            if core:
                keep_to(int(core))
            print(json.dumps({"kind": words[1], "unit_ms": one_ms}), flush=True)
        elif words[:1] == ["times"] and load is not None:
            print(json.dumps(launch_times(load, float(words[1]))), flush=True)
        elif words[:1] == ["ends"] and load is not None:
            print(json.dumps(end_times(load, float(words[1]))), flush=True)
        elif words[:1] == ["run"] and load is not None:
            print(json.dumps(load.run(float(words[1]))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(in_a_sentence(main))
