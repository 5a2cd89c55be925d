"""Multiplies matrices and prints how fast: run it alone and beside others to see its share."""

import time

import torch

size = 8192
a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
while True:
    began = time.monotonic()
    for _ in range(50):
        c = a @ b
    torch.cuda.synchronize()
    rate = 50 * 2 * size**3 / (time.monotonic() - began) / 1e12
    free, total = torch.cuda.mem_get_info()
    print(f"{rate:.0f} TFLOP/s; {free / 2**30:.1f} of {total / 2**30:.1f} GiB free", flush=True)
