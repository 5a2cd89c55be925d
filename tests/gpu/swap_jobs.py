"""Programs for swap.py: `swap_jobs.py products BYTES SECONDS` and `swap_jobs.py train STEPS [PAUSE_S]`."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def products(size: int, seconds: float) -> None:
    """bf16 products of 8192^3 that go round all of `size` bytes; prints how many were done by when."""
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


def train(steps: int, pause_s: float) -> None:
    """A small network trained deterministically; prints every loss as an exact number."""
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
    ballast = torch.full((1 << 28,), 3, dtype=torch.int64, device="cuda")  # 2 GiB that must come back too
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
    if sys.argv[1] == "products":
        products(int(sys.argv[2]), float(sys.argv[3]))
    else:
        train(int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
