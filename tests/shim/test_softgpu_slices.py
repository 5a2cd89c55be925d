"""The software GPU's own time slices, set from outside the programs: shares, cut kernels, channels off and on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import SOFTWARE, ChannelControls, ChannelGroup
from cotenant.native.libraries import SOFT_DRIVER, library_path
from cotenant.softgpu.controls import SoftIoctl


class Rig:
    """Programs on a software GPU of their own, and the controls on their channel groups."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, kind: str = "busy", kernel_ms: float = 1.6) -> None:
        environment = os.environ | {"COTENANT_SOFTGPU_STATE": str(self.state)}
        environment["COTENANT_BENCH_LIBRARY"] = str(library_path(SOFT_DRIVER))
        words = [sys.executable, "-m", "cotenant.bench.workload", kind, "driver", str(int(kernel_ms * 1e6))]
        program = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.programs.append(program)
        assert program.stdout is not None
        assert program.stdout.readline().startswith("ready")
        if len(self.programs) == 1:
            self.fd = os.open(self.state, os.O_RDWR)
            self.controls = ChannelControls(SOFTWARE, SoftIoctl())

    def group(self, number: int) -> ChannelGroup:
        """Handles as the software GPU gives them to its first programs, each with one context."""
        group = 0x5C000000 | number << 4
        return ChannelGroup(0xC1D00000 | number, 0x5D000000, 0x5E000000, group, (group | 1, group | 2))

    def set(self, *slices_us: int) -> None:
        for number, slice_us in enumerate(slices_us):
            self.controls.set_slice(self.fd, self.group(number), slice_us)

    def order(self, seconds: float) -> None:
        for program in self.programs:
            assert program.stdin is not None
            program.stdin.write(f"run {seconds}\n")
            program.stdin.flush()

    def blocks(self) -> list[dict[str, Any]]:
        return [json.loads(program.stdout.readline()) for program in self.programs if program.stdout]

    def run(self, seconds: float) -> list[dict[str, Any]]:
        """One block of all programs at once."""
        self.order(seconds)
        return self.blocks()

    def busy_ns(self) -> list[int]:
        return [self.controls.usage(self.fd, self.group(n)).busy_ns for n in range(len(self.programs))]

    def shares(self, seconds: float) -> list[float]:
        """Part of the GPU's time that each program had while all ran, as the GPU accounts it."""
        self.order(seconds + 0.6)
        time.sleep(0.3)
        before, began = self.busy_ns(), time.monotonic_ns()
        time.sleep(seconds)
        after, length = self.busy_ns(), time.monotonic_ns() - began
        self.blocks()
        return [(b - a) / length for a, b in zip(before, after, strict=True)]

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.timed
@pytest.mark.parametrize("kernel_ms", [20, 100])
def test_shares_are_ratios_of_slices_whatever_the_kernels(rig: Rig, kernel_ms: float) -> None:
    rig.start(kernel_ms=kernel_ms)
    rig.start(kernel_ms=kernel_ms)
    rig.set(13_200, 30_800)
    first, second = rig.shares(2)
    assert first / (first + second) == pytest.approx(0.3, abs=0.02)
    assert first + second >= 0.95


@pytest.mark.timed
def test_a_program_alone_loses_nothing(rig: Rig) -> None:
    rig.start()
    rig.set(1)
    (block,) = rig.run(1)
    assert block["busy_ns"] >= 0.97 * (block["end_ns"] - block["begin_ns"])
    assert rig.controls.slice_us(rig.fd, rig.group(0)) == 1


@pytest.mark.timed
def test_short_slices_go_into_switches(rig: Rig) -> None:
    """Two programs with slices of 1 ms get 81 % of one alone together on a card."""
    rig.start()
    rig.start()
    rig.set(1000, 1000)
    assert sum(rig.shares(2)) == pytest.approx(0.82, abs=0.04)


def test_channels_taken_off_stop_what_runs_and_go_on(rig: Rig) -> None:
    rig.start(kernel_ms=50)
    group = rig.group(0)
    assert rig.programs[0].stdin is not None
    rig.programs[0].stdin.write("run 1\n")
    rig.programs[0].stdin.flush()
    time.sleep(0.3)
    for _ in range(2):  # the driver counts how often a group was disabled
        rig.controls.disable(rig.fd, [group])
    stopped = rig.controls.usage(rig.fd, group).busy_ns
    rig.controls.enable(rig.fd, [group])
    time.sleep(0.3)
    assert rig.controls.usage(rig.fd, group).busy_ns == stopped
    for _ in range(3):
        rig.controls.enable(rig.fd, [group])
    assert rig.programs[0].stdout is not None
    block = json.loads(rig.programs[0].stdout.readline())
    assert block["busy_ns"] > 0  # the kernel continued where it had been stopped


def test_a_program_killed_while_it_is_off_leaves_the_gpu_to_others(rig: Rig) -> None:
    rig.start()
    rig.start()
    rig.set(10_000, 10_000)
    assert rig.programs[0].stdin is not None
    rig.programs[0].stdin.write("run 30\n")
    rig.programs[0].stdin.flush()
    time.sleep(0.2)
    rig.controls.disable(rig.fd, [rig.group(0)])
    rig.programs[0].kill()
    rig.programs[0].communicate()
    dead, rig.programs = rig.programs[0], rig.programs[1:]
    (block,) = rig.run(0.3)
    rig.programs.insert(0, dead)
    assert block["busy_ns"] > 0
    with pytest.raises(WorkError, match="status 0x23"):
        rig.controls.slice_us(rig.fd, rig.group(0))


@pytest.mark.timed
def test_a_program_with_gaps_is_skipped_at_once(rig: Rig) -> None:
    rig.start()
    rig.start("training")
    rig.set(2000, 20_000)
    busy, gaps = rig.shares(2)
    assert gaps >= 0.4  # bursts of 4 ms, 0.5 ms of its own where the machine is quiet, and one slice of 2 ms
    assert busy >= 0.25
    usage = rig.controls.usage(rig.fd, rig.group(1))
    assert usage.yields > 0.8 * usage.runs
