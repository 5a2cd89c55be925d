"""A program that sleeps for 0.1 s, launches one small kernel, waits for it, and so on: `waking.py driver|torch ROUNDS`.

Prints one JSON object {"launch_us", "done_us"}: host time of each launch, and until the GPU had done it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

IDLE_S = 0.1


def program(backend: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns a function that launches a kernel, and one that waits for it."""
    if backend == "torch":
        import torch

        x = torch.zeros(64, 64, device="cuda")
        return lambda: x.add_(1.0), torch.cuda.synchronize
    from cotenant.bench.driver import Driver

    cuda = Driver()
    return lambda: cuda.launch(5_000), cuda.synchronise


def main(backend: str, rounds: int) -> None:
    launch, wait = program(backend)
    for _ in range(2000):
        launch()
    wait()
    time.sleep(1.0)
    taken: dict[str, list[float]] = {"launch_us": [], "done_us": []}
    for _ in range(rounds):
        time.sleep(IDLE_S)
        began_ns = time.perf_counter_ns()
        launch()
        taken["launch_us"].append((time.perf_counter_ns() - began_ns) / 1e3)
        wait()
        taken["done_us"].append((time.perf_counter_ns() - began_ns) / 1e3)
    print(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
