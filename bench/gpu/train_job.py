"""A PyTorch training job for bench/gpu/fleet.py: python train_job.py KIND STEPS CURVE

Appends one line per step to CURVE: [step, loss as hex, moment (CLOCK_MONOTONIC), seconds it took]. Deterministic: two
runs on GPUs of one kind give the same losses bit by bit. In a gang (WORLD_SIZE > 1) it is data-parallel over NCCL and
every rank writes CURVE-<rank>. Without a GPU it runs on the CPU, to try the script itself.

conv   convolutions, small batches         text   a transformer of some width, large products
small  many small kernels, launch-bound    wide   85 million parameters, for the cost of moving state
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

import cotenant


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.take, self.give, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.take(self.norm(x)).view(n, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8.0, dim=-1)
        return x + self.give((weights @ v).transpose(1, 2).reshape(n, length, width))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1))


class Data(torch.utils.data.Dataset[Any]):
    """Images or token vectors by index, with random augmentation."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 65536

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.randn(self.shape) * 0.5 + (number % 10) / 10, number % 10


def build(kind: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """Build a model; returns it, the shape of a sample, and the samples per step."""
    if kind == "conv":
        layers = [nn.Conv2d(3, 64, 3, padding=1), *(block(64) for _ in range(8)), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(64, 10)), (3, 32, 32), 128
    if kind == "text":
        body = [layer for _ in range(6) for layer in (Attention(1024), Feed(1024))]
        return nn.Sequential(nn.Linear(64, 1024), *body, Mean(), nn.Linear(1024, 10)), (128, 64), 32
    if kind == "small":
        body = [layer for _ in range(24) for layer in (nn.Linear(128, 128), nn.ReLU())]
        return nn.Sequential(*body, nn.Linear(128, 10)), (128,), 64
    body = [layer for _ in range(7) for layer in (Attention(1024), Feed(1024))]
    return nn.Sequential(nn.Linear(64, 1024), *body, Mean(), nn.Linear(1024, 10)), (32, 64), 8


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def main() -> None:
    kind, steps, curve = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(7)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world > 1:
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
        curve += f"-{rank}"
    model, shape, batch = build(kind)
    model = model.to(device)
    wrapped: nn.Module = model
    if world > 1:
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Data(shape)
    sampler = torch.utils.data.DistributedSampler(data) if world > 1 else None
    workers = int(os.environ.get("JOB_WORKERS", "2"))
    loader = torch.utils.data.DataLoader(data, batch, shuffle=sampler is None, sampler=sampler, num_workers=workers)
    if world > 1:
        torch.manual_seed(100 + rank)
    loop = cotenant.loop(
        loader, checkpoint={"model": model, "optimizer": optimizer}, epochs=10_000, steps=steps,
        most_workers=max(1, workers),
    )  # fmt: skip
    last = time.monotonic()
    with open(curve, "a") as out:
        for x, y in loop:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(wrapped(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            text = loss.item().hex()
            now = time.monotonic()
            print(json.dumps([loop.step, text, now, now - last]), file=out, flush=True)
            last = now
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
