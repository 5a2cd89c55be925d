"""A job on the software GPU that uses all GPUs it has: python elastic_job.py KERNEL_US STEPS OUT

A step takes KERNEL_US on one GPU and half as long on two, and moves a weight. Each step appends to OUT the step, the
weight, the GPUs and the batch that the job was given, and the attempt.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

from soft_train import Weight, shuffled

import cotenant
from cotenant.bench.driver import Driver

kernel_ns, steps, out = int(sys.argv[1]) * 1000, int(sys.argv[2]), sys.argv[3]
# The name is that of a pretended node's GPU, which the software GPU's library does not have.
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
gpus = len(os.environ["COTENANT_GPUS"].split(","))
batch, attempt = int(os.environ.get("COTENANT_BATCH", "0")), int(os.environ["COTENANT_ATTEMPT"])
random.seed(11)
cuda, weight = Driver(), Weight()
done = cuda.event()
loop = cotenant.loop(shuffled, checkpoint={"weight": weight}, epochs=10**6, steps=steps, seed=4)
with open(out, "a") as file:
    for value in loop:
        cuda.launch(kernel_ns // gpus)
        cuda.record(done)
        cuda.wait(done)
        weight.value = weight.value * 0.99 + value * random.random()
        print(json.dumps([loop.step, weight.value.hex(), gpus, batch, attempt]), file=file, flush=True)
