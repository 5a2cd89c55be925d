"""A PyTorch program (CPU build) as a tenant on the software GPU: the shim changes nothing that it computes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest

from cotenant.bench.harness import Bench

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed (make test-extras)"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim"),
]

TRAINING = """
import torch
torch.manual_seed(3)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(256, 32)
y = x.sum(dim=1, keepdim=True).sin()
for step in range(40):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


def test_a_training_loop_is_bit_identical_as_a_tenant() -> None:
    command = [sys.executable, "-c", TRAINING]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    with Bench("soft", {}) as bench:
        tenant = subprocess.run(
            [sys.executable, "-m", "cotenant.cli.main", "run", "--dir", str(bench.folder), "--name", "torch",
             "--limit", "50%", "--memory", "1GiB", "--", *command],
            env=bench.environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert tenant.returncode == 0, tenant.stderr
    losses = [float.fromhex(line) for line in tenant.stdout.split()]
    assert len(losses) == 40
    assert losses[-1] < losses[0] / 2  # the model has learned
    assert tenant.stdout == alone
