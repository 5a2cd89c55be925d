"""Programs for swap.py: `swap_jobs.py products BYTES SECONDS` and `swap_jobs.py train STEPS [PAUSE_S]`.

With COTENANT_SWAP_ON=soft the programs use the driver API only, for the software GPU: kernels only take time, and the
contents of memory must survive parking and moving.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def products(size: int, seconds: float) -> None:
    """Multiplies 8192^3 bf16 matrices that together use all of `size` bytes; prints the count of products over time."""
    import torch

    side = 8192
    each = side * side * 2
    matrices = [torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(max(3, size // each))]
    expected = [float(m.float().sum()) for m in matrices]
    out = torch.empty_like(matrices[0])
    torch.mm(matrices[0], matrices[1], out=out)
    torch.cuda.synchronize()
    print(json.dumps({"ready": len(matrices)}), flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    done, marks = 0, []
    while time.monotonic() < end:
        for _ in range(16):
            torch.mm(matrices[done % len(matrices)], matrices[(done + 1) % len(matrices)], out=out)
            done += 1
        torch.cuda.synchronize()
        marks.append((time.monotonic(), done))
    corrupted = sum(float(m.float().sum()) != wanted for m, wanted in zip(matrices, expected, strict=True))
    print(json.dumps({"marks": marks, "corrupted": corrupted, "held": torch.cuda.memory_reserved()}), flush=True)


class Soft:
    """Blocks of memory with known contents on the software GPU."""

    def __init__(self, size: int) -> None:
        from cotenant.bench.driver import Driver

        self.cuda = Driver()
        self.each = min(size, 2 << 20)
        self.blocks = [ctypes.c_uint64() for _ in range(max(1, size // self.each))]
        for number, block in enumerate(self.blocks):
            self.cuda.call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(self.each))
            self.write(number, hashlib.sha256(str(number).encode()).digest() * (self.each // 32))

    def write(self, number: int, data: bytes) -> None:
        self.cuda.call("cuMemcpyHtoD_v2", self.blocks[number], data, ctypes.c_size_t(len(data)))

    def read(self, number: int) -> bytes:
        data = ctypes.create_string_buffer(self.each)
        self.cuda.call("cuMemcpyDtoH_v2", data, self.blocks[number], ctypes.c_size_t(self.each))
        return data.raw

    def corrupted(self, first: int = 0) -> int:
        wanted = [hashlib.sha256(str(n).encode()).digest() * (self.each // 32) for n in range(len(self.blocks))]
        return sum(self.read(n) != wanted[n] for n in range(first, len(self.blocks)))


def soft_products(size: int, seconds: float) -> None:
    """As `products`, on the software GPU."""
    memory = Soft(size)
    print(json.dumps({"ready": len(memory.blocks)}), flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    done, marks = 0, []
    while time.monotonic() < end:
        for _ in range(16):
            memory.cuda.launch(1_700_000)
        memory.cuda.synchronise()
        done += 16
        marks.append((time.monotonic(), done))
    print(json.dumps({"marks": marks, "corrupted": memory.corrupted(), "held": size}), flush=True)


def soft_train(steps: int, pause_s: float) -> None:
    """As `train`, on the software GPU: each step starts from the contents that the previous one left there."""
    memory = Soft(4 << 20)
    for step in range(steps):
        memory.cuda.launch(200_000)
        memory.cuda.synchronise()
        digest = hashlib.sha256(memory.read(0)).digest()
        memory.write(0, digest * (memory.each // 32))
        print(json.dumps({"step": step, "loss": digest.hex()}), flush=True)
        time.sleep(pause_s)
    print(json.dumps({"ballast": memory.corrupted(1) == 0}), flush=True)


def train(steps: int, pause_s: float) -> None:
    """Train a small network deterministically; prints every loss as an exact number."""
    import torch

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
        torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 16 * 16, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    ).cuda()  # fmt: skip
    images = torch.randn(512, 3, 32, 32, generator=torch.Generator().manual_seed(2)).cuda()
    labels = torch.randint(0, 10, (512,), generator=torch.Generator().manual_seed(3)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # 2 GiB whose contents must also return unchanged
    ballast = torch.full((1 << 28,), 3, dtype=torch.int64, device="cuda")
    for step in range(steps):
        at = (step * 64) % 512
        loss = torch.nn.functional.cross_entropy(model(images[at : at + 64]), labels[at : at + 64])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "loss": float(loss.detach()).hex()}), flush=True)
        time.sleep(pause_s)
    print(json.dumps({"ballast": int(ballast.sum()) == 3 << 28}), flush=True)


if __name__ == "__main__":
    soft = os.environ.get("COTENANT_SWAP_ON") == "soft"
    if sys.argv[1] == "products":
        (soft_products if soft else products)(int(sys.argv[2]), float(sys.argv[3]))
    else:
        (soft_train if soft else train)(int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
