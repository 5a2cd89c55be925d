"""A simulated training job: each step sleeps as long as the model's profile states for the job's cores and memory.

    python -m cotenant.training.timed --profile F.json --model NAME --iterations N [--gpus G] [--time-scale X]

It trains nothing and needs no GPU, but it uses `cotenant.loop` as other jobs do, with lease, progress, checkpoints and
resuming. It imports only the standard library, because many such jobs start on one machine.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.training.contract import GPUS_ENV, Lease
from cotenant.training.loop import loop

# an iteration is divided into steps of at most this length, so that the job can stop soon after a request
MOST_STEP_S = 0.05
# if the machine delays the job by up to this time, the job makes up for the delay, because a GPU would have continued
# to compute
BEHIND_S = 0.25


class Pace:
    """Seconds per iteration of one model by cores and memory, computed as in `cotenant.profiles.training.tables`,
    without numpy.
    """

    def __init__(self, profile: dict[str, Any], model: str) -> None:
        entry = profile["models"][model]
        self.iteration_s = float(entry["iteration_s"])
        self._cpus: list[float] = [float(c) for c in profile["cpus_per_gpu"]]
        self._memory: list[float] = [float(m) for m in profile["memory_gb_per_gpu"]]
        self._table: list[list[float]] = [[float(v) for v in row] for row in entry["throughput"]]
        if len(self._table) != len(self._cpus) or any(len(row) != len(self._memory) for row in self._table):
            raise ValueError("throughput must have a row for each core count, with a number for each memory size")

    def at(self, cpus_per_gpu: float, memory_gb_per_gpu: float) -> float:
        """Return the seconds per iteration with these cores and this memory. The speed is interpolated bilinearly in
        the table. Outside the table the nearest row or column counts, and below the first core count the speed is also
        scaled in proportion to the cores.
        """
        i, u = _cell(self._cpus, cpus_per_gpu)
        j, v = _cell(self._memory, memory_gb_per_gpu)
        low, high = (self._between(row, j, v) for row in (self._table[i], self._table[min(i + 1, len(self._cpus) - 1)]))
        speed = (low * (1 - u) + high * u) * min(1.0, cpus_per_gpu / self._cpus[0])
        return self.iteration_s / speed

    def _between(self, row: Sequence[float], j: int, v: float) -> float:
        return row[j] * (1 - v) + row[min(j + 1, len(row) - 1)] * v


def _cell(axis: Sequence[float], x: float) -> tuple[int, float]:
    if len(axis) == 1 or x <= axis[0]:
        return 0, 0.0
    if x >= axis[-1]:
        return len(axis) - 1, 0.0
    i = bisect.bisect_right(axis, x) - 1
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


class _Nothing:
    """A model without weights: its checkpoint is only the loop's own state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def learn(self) -> None:
        pass


class _Small:
    """A small PyTorch model and its optimizer, trained one step at a time on the CPU."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def learn(self) -> None:
        x = self._torch.randn(32, 16)
        self._optimizer.zero_grad()
        (self._model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        self._optimizer.step()


def steps_per_iteration(iteration_s: float) -> int:
    """Return the number of steps into which an iteration is divided."""
    return max(1, math.ceil(iteration_s / MOST_STEP_S - 1e-9))


def train(pace: Pace, iterations: float, gpus: float, time_scale: float = 1.0, *, torch: bool = False) -> None:
    """Run the iterations of a simulated training job by sleeping. `time_scale` 0.1: ten times as fast as the profile.
    `torch`: each step trains a small PyTorch model and sleeps for the rest of its time.
    """
    parts = steps_per_iteration(pace.iteration_s * time_scale)
    model = _Small() if torch else _Nothing()
    work = loop(range(max(1, round(iterations * parts))), checkpoint={"model": model}, every_s=60.0)
    due_s = time.monotonic()
    seen: Lease | None = None
    step_s = 0.0
    for _ in work:
        lease = work.lease
        if lease is not seen:
            cpus, memory_bytes = lease.cpus or math.inf, lease.memory_bytes or math.inf
            step_s, seen = pace.at(cpus / gpus, memory_bytes / 1e9 / gpus) * time_scale / parts, lease
        model.learn()
        due_s = max(due_s + step_s, time.monotonic() - BEHIND_S)
        time.sleep(max(0.0, due_s - time.monotonic()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the simulated training job."""
    parser = argparse.ArgumentParser(prog="python -m cotenant.training.timed", description="A simulated training job.")
    parser.add_argument("--profile", type=Path, required=True, help="a profile file of `cotenant simulate --profiles`")
    parser.add_argument("--model", required=True)
    parser.add_argument("--iterations", type=float, required=True)
    parser.add_argument("--gpus", type=float, default=_gpus_here())
    parser.add_argument("--time-scale", type=float, default=1.0)
    torch = "train a small PyTorch model in each step, instead of only sleeping"
    parser.add_argument("--torch", action="store_true", help=torch)
    given = parser.parse_args(arguments)
    try:
        for name in ("iterations", "gpus", "time_scale"):
            value = getattr(given, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"must be above 0, not {value:g}", field=name.replace("_", "-"))
        train(_pace(given.profile, given.model), given.iterations, given.gpus, given.time_scale, torch=given.torch)
    except InputError as error:
        print(f"cotenant: {error}", file=sys.stderr)
        return 2
    except WorkError as error:
        print(f"cotenant: {error}", file=sys.stderr)
        return 1
    return 0


def _gpus_here() -> float:
    """Return the number of GPUs of this process. The environment variable COTENANT_GPUS states this number, or lists
    the GPUs' names, which are then counted. Without the variable it is 1.
    """
    text = os.environ.get(GPUS_ENV, "")
    try:
        return float(text)
    except ValueError:
        return float(len(text.split(","))) if text else 1.0


def _pace(file: Path, model: str) -> Pace:
    try:
        profile = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({error})", file=file) from None
    models = profile.get("models") if isinstance(profile, dict) else None
    if not isinstance(models, dict) or model not in models:
        raise InputError(f"has no model {model!r}", file=file, field="models")
    try:
        return Pace(profile, model)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"is not a profile file ({error!r})", file=file) from None


if __name__ == "__main__":
    sys.exit(main())
