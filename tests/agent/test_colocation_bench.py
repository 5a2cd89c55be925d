"""The whole comparison with real processes on the software GPU: its ranking is the card's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cotenant.bench.be_loads import Load
from cotenant.bench.colocation import Plan, Series, expected_s, measure, native_block, parse_ls, parse_schemes, summary
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.core.errors import WorkError

BE_LOADS = ["cotenant.bench.be_loads", "driver"]


def test_blocks_in_which_the_host_paused_are_told_apart() -> None:
    series = Series()
    calm, paused = [0.0, 0.1, 0.0], [0.0, 3.0, 0.0]
    for alone_ms, beside_ms, late in (
        ([1.0, 1.0, 2.0], [1.0, 1.1, 2.2], calm),
        ([1.0, 1.0, 2.0], [1.0, 4.0, 5.0], paused),
    ):
        alone = {"latency_ms": alone_ms, "late_ms": calm, "active_s": 0.1}
        series.add(alone, 100.0, {"latency_ms": beside_ms, "late_ms": late, "active_s": 0.1}, 80.0, 1.0)
    row = summary(series)
    assert row["late_requests"] == [0, 1]
    assert (row["requests"], row["calm_requests"]) == (6, 3)
    assert row["ls_p99_over_alone_calm"] == pytest.approx((1.1 + 0.98 * 1.1) / (1.0 + 0.98 * 1.0))
    assert row["ls_p99_over_alone"] > 2
    assert row["be_over_left"] == pytest.approx(80 / 100 / 0.9)


def test_how_long_it_takes_is_said_beforehand() -> None:
    """Three rounds of 1 s beside seven loads under all schemes took 229 s; of 2 s beside one, under one, 18.5 s."""
    loads = ["mm4096"] * 7
    plan = Plan(parse_ls("resnet50:4:100"), loads, parse_schemes("all"), rounds=3, block_s=1.0)
    assert expected_s(plan) == pytest.approx(229, rel=0.1)
    plan = replace(plan, kinds=loads[:1], schemes=parse_schemes("tidal"), block_s=2.0)
    assert expected_s(plan) == pytest.approx(18.5, rel=0.1)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["be_loads"], 1, "no CUDA driver"),
        (["workload", "busy"], 1, "no CUDA driver"),
        (["ls_client"], 2, "two arguments are needed"),
        (["ls_client", "driver", "four"], 2, "two arguments are needed"),
        (["ls_client", "driver", "4"], 1, "no CUDA driver"),
    ],
)
def test_a_program_that_cannot_begin_says_why_in_a_sentence(words: list[str], code: int, says: str) -> None:
    nowhere = {**os.environ, "COTENANT_BENCH_LIBRARY": "/nowhere/libcuda.so.1", "LD_PRELOAD": ""}
    command = [sys.executable, "-m", f"cotenant.bench.{words[0]}", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=nowhere, input="")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)
    assert says in done.stderr


def test_a_load_that_nobody_knows_is_refused() -> None:
    with Rig("soft", together=True) as rig:
        be = rig.be_native().wait_ready()
        with pytest.raises(WorkError, match="no load is called 'mm40x6'"):
            be.ask("load mm40x6")


@pytest.mark.timed
def test_the_software_gpu_ranks_schemes_as_a_card_does() -> None:
    """By medians, which a busy machine moves least: static parts cost LS its SMs, concurrency its place."""
    plan = Plan(parse_ls("resnet50:4:100"), ["mm4096"], parse_schemes("mps-plus,static,tidal"), rounds=2, block_s=0.6)
    result = measure("soft", plan)
    assert result["backend"] == "driver"
    p50 = {name: rows["mm4096"]["ls_p50_over_alone"] for name, rows in result["schemes"].items()}
    assert p50["tidal"] < p50["static"] < p50["mps-plus"]
    assert p50["tidal"] < 1.4
    for rows in result["schemes"].values():
        row = rows["mm4096"]
        assert row["requests"] > 60
        assert 0.19 < row["be_kernel_ms"] < 0.3
        assert 0.05 < row["ls_active"] < 0.4


def test_best_effort_programs_launch_from_one_core_and_nothing_else_does() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    with Rig("soft", together=True, pinned=True) as rig:
        programs = {
            "ls": rig.ls(),
            "tenant": rig.be(),
            "native": rig.be_native(),
            "plain": rig.plain("plain", BE_LOADS),
        }
        for program in programs.values():
            program.wait_ready()
        for name in ("tenant", "native", "plain"):
            programs[name].ask("load train-transformer", 60)
        cores = {name: os.sched_getaffinity(program.process.pid) for name, program in programs.items()}
        (core,) = cores["tenant"]
        assert cores["native"] == cores["plain"] == {core}
        assert core not in cores["ls"]
        assert core not in os.sched_getaffinity(0)
    assert os.sched_getaffinity(0) == before


def test_long_units_that_end_with_the_block_do_not_count_as_done_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 25 ms that its host holds back, its GPU idle: 40 a second. Three are counted late all along, and
    together at the end: over 0.3 s that was 50 a second, and best-effort work beside a service lacked as much."""

    now_ns = [0]
    monkeypatch.setattr("cotenant.bench.workload.time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))

    def step() -> None:
        now_ns[0] += 25_000_000

    class Host:
        def ask(self, line: str, _: float) -> dict[str, Any]:
            load = Load(step, lambda _: None, lambda _: None, 1)
            return load.run(float(line.removeprefix("run ")))

    assert native_block(cast(Program, Host()), 0.3) == pytest.approx(40, rel=0.06)
