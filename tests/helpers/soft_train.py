"""A training job on the software GPU: python soft_train.py KERNEL_US STEPS CURVE

A step runs one kernel of that length and updates a weight; each step appends [step, weight as hex] to CURVE.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import cotenant
from cotenant.bench.driver import Driver


class Weight:
    value = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def shuffled(epoch: int) -> list[int]:
    order = list(range(50))
    random.shuffle(order)
    return order


def undisturbed(steps: int) -> list[list[object]]:
    """The curve of an uninterrupted job. It does not depend on the GPU."""
    random.seed(11)
    weight, curve = Weight(), []
    loop = cotenant.loop(shuffled, epochs=10**6, steps=steps, seed=4)
    for batch in loop:
        weight.value = weight.value * 0.99 + batch * random.random()
        curve.append([loop.step, weight.value.hex()])
    return curve


def main() -> None:
    kernel_ns, steps, curve = int(sys.argv[1]) * 1000, int(sys.argv[2]), sys.argv[3]
    random.seed(11)
    cuda, weight = Driver(), Weight()
    done = cuda.event()
    loop = cotenant.loop(shuffled, checkpoint={"weight": weight}, epochs=10**6, steps=steps, seed=4)
    with open(curve, "a") as out:
        for batch in loop:
            cuda.launch(kernel_ns)
            cuda.record(done)
            cuda.wait(done)
            weight.value = weight.value * 0.99 + batch * random.random()
            print(json.dumps([loop.step, weight.value.hex()]), file=out, flush=True)


if __name__ == "__main__":
    main()
