"""cotenant.loop under PyTorch: a job that is stopped, moved and resumed has the loss curve of one that was not, bit by
bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.extras

from ports import reserved_ports  # noqa: E402
from waiting import wait_for  # noqa: E402

# Put before a program: after the steps in HOLD_AT it waits for the file GO-STEP, so that a test acts between two steps.
HOLD = """
import os, time

def hold(step):
    while str(step) in os.environ.get("HOLD_AT", "").split() and not os.path.exists(f"{os.environ['GO']}-{step}"):
        time.sleep(0.01)
"""

# A program with many sources of randomness: dropout, augmentation by three generators, masking in the collate function,
# shuffling, and also momentum and a learning rate schedule.
PROGRAM = """
import json, os, random, sys, time
import numpy as np, torch
import cotenant

class Pictures(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, i):
        x = torch.full((16,), float(i) / 96)
        return x + torch.randn(16) * 0.1 + random.random() + float(np.random.rand()), i % 4

def masked(items):
    x, y = torch.utils.data.default_collate(items)
    return x * torch.bernoulli(torch.full_like(x, 0.9)), y

def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    workers, out = int(sys.argv[1]), open(sys.argv[2], "a")
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    loader = torch.utils.data.DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=workers, collate_fn=masked)
    loop = cotenant.loop(loader, checkpoint={"model": model, "optimizer": optimizer, "scheduler": scheduler}, epochs=3)
    for x, y in loop:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(json.dumps([loop.step, loss.item().hex()]), file=out, flush=True)
        time.sleep(float(os.environ.get("STEP_S", "0")))
        hold(loop.step)

main()
"""


def start(folder: Path, workers: int, curve: Path, **environment: str) -> subprocess.Popen[str]:
    program = folder.parent / "program.py"
    program.write_text(HOLD + PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(program), str(workers), str(curve)], text=True, stderr=subprocess.PIPE,
        env=os.environ | {"COTENANT_JOB_DIR": str(folder)} | environment, start_new_session=True,
    )  # fmt: skip


def curve_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def after_steps(process: subprocess.Popen[str], curve: Path, steps: int) -> None:
    end = time.monotonic() + 200  # long, because a busy machine imports torch slowly
    while process.poll() is None and time.monotonic() < end:
        if curve.exists() and len(curve.read_text().splitlines()) >= steps:
            return
        time.sleep(0.01)
    raise AssertionError(f"the program ended early: {process.stderr.read() if process.stderr else ''}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder / "job", 0, folder / "curve")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return curve_of(folder / "curve")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loss_curve_is_bit_identical(tmp_path: Path, whole: list[Any], workers: int) -> None:
    """Stopped twice by a signal to its whole group, in different epochs, and killed once, under other worker counts."""
    assert len(whole) == 36
    folder, curve, go = tmp_path / "job", tmp_path / "curve", tmp_path / "go"
    for attempt, (until, number) in enumerate(((5, signal.SIGTERM), (17, signal.SIGTERM), (22, signal.SIGKILL))):
        process = start(
            folder, workers, curve, HOLD_AT=str(until - 1), GO=str(go), COTENANT_ATTEMPT=str(attempt),
            COTENANT_CPUS=str(1 + attempt),
        )  # fmt: skip
        after_steps(process, curve, until)
        os.killpg(process.pid, number)
        Path(f"{go}-{until - 1}").touch()
        process.communicate(timeout=60)
        assert process.returncode == (75 if number == signal.SIGTERM else -9)
    process = start(folder, workers, curve, COTENANT_ATTEMPT="3")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    steps = curve_of(curve)
    assert sorted({step for step, _ in steps}) == list(range(36))
    # this includes the steps that were repeated after the kill
    assert all(whole[step] == [step, loss] for step, loss in steps)


def test_workers_follow_the_cores_and_the_curve_does_not_change(tmp_path: Path, whole: list[Any]) -> None:
    from cotenant.training.contract import Lease, write_lease

    folder, curve, go = tmp_path / "job", tmp_path / "curve", tmp_path / "go"
    folder.mkdir()
    write_lease(folder, 0, Lease(cpus=1.0))
    # a step takes longer than the interval at which the loop reads its lease
    process = start(folder, 1, curve, STEP_S="0.08", HOLD_AT="3 11 19", GO=str(go))
    for cpus, until, following in ((1, 4, 3.0), (3, 12, 2.0), (2, 20, 2.0)):
        after_steps(process, curve, until)
        wait_for(lambda: len(children(process.pid)) == cpus, what=f"{cpus} workers")  # noqa: B023 - called in this round
        write_lease(folder, 0, Lease(cpus=following))
        Path(f"{go}-{until - 1}").touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert curve_of(curve) == whole


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


GANG = """
import json, os, sys, time
import torch, torch.distributed as dist
import cotenant

def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Dropout(0.1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank)
    loop = cotenant.loop(loader, checkpoint={"model": model, "optimizer": optimizer}, epochs=4)
    with open(f"{sys.argv[1]}-{rank}", "a") as out:
        for x, y in loop:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
            print(json.dumps([loop.step, loss.item().hex()]), file=out, flush=True)
            hold(loop.step)

main()
"""


def gang(folder: Path, curve: Path, port: int, **environment: str) -> list[subprocess.Popen[str]]:
    program = folder.parent / "gang.py"
    program.write_text(HOLD + GANG)
    started = []
    for rank in range(2):
        own = {"COTENANT_JOB_DIR": str(folder), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"} | environment
        command = [sys.executable, str(program), str(curve)]
        started.append(subprocess.Popen(command, text=True, stderr=subprocess.PIPE, env=os.environ | own))
    return started


def ended(started: list[subprocess.Popen[str]]) -> list[int]:
    for process in started:
        _, err = process.communicate(timeout=120)
        assert process.returncode in (0, 75), err
    return [process.returncode for process in started]


def test_a_gang_leaves_together_and_goes_on_bit_by_bit(tmp_path: Path, free_port: int) -> None:
    """One rank alone is asked to leave; both leave after the same step."""
    for name in ("whole", "job"):
        (tmp_path / name).mkdir()
    assert ended(gang(tmp_path / "whole" / "job", tmp_path / "whole" / "curve", free_port)) == [0, 0]
    curve, go = tmp_path / "job" / "curve", tmp_path / "go"
    started = gang(tmp_path / "job" / "job", curve, free_port, HOLD_AT="10", GO=str(go))
    after_steps(started[1], Path(f"{curve}-1"), 11)
    started[1].send_signal(signal.SIGTERM)
    Path(f"{go}-10").touch()
    assert ended(started) == [75, 75]
    assert ended(gang(tmp_path / "job" / "job", curve, free_port, COTENANT_ATTEMPT="1")) == [0, 0]
    for rank in range(2):
        expected = curve_of(tmp_path / "whole" / f"curve-{rank}")
        assert len(expected) == 32
        assert curve_of(Path(f"{curve}-{rank}")) == expected


@pytest.fixture
def free_port() -> Iterator[int]:
    with reserved_ports() as (port,):
        yield port
