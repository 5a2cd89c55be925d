"""Measures which shares of the link real processes get by their weights, on the software GPU with a slow link.

pytest -q -s bench/test_copy_shares_bench.py
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.bench.harness import Bench, Program
from cotenant.bench.pcie import percentile, together

MIB = 1 << 20
LINK = 200.0  # MB/s; at this rate, a chunk of 1 MiB takes 5.2 ms
SETTINGS: dict[str, Any] = {"copies": {"chunk_bytes": MIB, "period_bytes": 4 * MIB}}


@pytest.fixture(autouse=True)
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_SOFTGPU_LINK_MBPS", f"{LINK:g}")


def spec(name: str, weight: float | None = None, **more: Any) -> TenantSpec:
    return TenantSpec(name, mechanism="mps", copy_weight=weight, **more)


def copier(bench: Bench, given: TenantSpec, *arguments: object) -> Program:
    program = ["cotenant.bench.copying", *map(str, arguments or ("h2d", "pinned", "async", 4 * MIB))]
    workload = bench.tenant("copy", given, program=program)
    workload.wait_ready()
    return workload


def test_two_tenants_share_by_weight_and_lose_little() -> None:
    with Bench("soft", SETTINGS) as bench:
        one, three = copier(bench, spec("one", 1.0)), copier(bench, spec("three", 3.0))
        rates = together([one, three], 1.5)
        assert rates[0] / sum(rates) == pytest.approx(0.25, abs=0.05)
        assert sum(rates) > 0.3 * LINK * 1e6, "the link is kept busy, as far as a shared machine lets the workers run"


def test_weights_change_while_they_copy() -> None:
    with Bench("soft", SETTINGS) as bench:
        pair = [copier(bench, spec("a", 1.0)), copier(bench, spec("b", 1.0))]
        with ControlClient(bench.folder) as client:
            answer = client.call("set", name="b", copy_weight=4.0)
        assert answer["copy_weight"] == 4.0
        rates = together(pair, 1.2)
        assert rates[1] / sum(rates) == pytest.approx(0.8, abs=0.06)


def test_pageable_and_both_directions() -> None:
    with Bench("soft", SETTINGS) as bench:
        specs = [spec("a", 1.0), spec("b", 3.0)]
        pair = [copier(bench, one, "d2h", "pageable", "sync", 4 * MIB) for one in specs]
        rates = together(pair, 1.8)
        assert rates[1] / sum(rates) == pytest.approx(0.75, abs=0.09)


def test_who_fills_the_link_does_not_wait_for_a_thread_that_copies_pageable_memory() -> None:
    """The thread that copies pageable memory moves a quarter of what the link could. If shares counted bytes alone, the
    other tenant would be slowed to that rate."""
    with Bench("soft", SETTINGS) as bench:
        pinned = copier(bench, spec("pinned", 1.0))
        pageable = copier(bench, spec("pageable", 1.0), "h2d", "pageable", "sync", 4 * MIB)
        rates = together([pinned, pageable], 1.5)
        assert rates[0] > 0.5 * LINK * 1e6, "of 0.715 that the other leaves"
        assert rates[1] > 0.15 * LINK * 1e6, "of 0.285 that its thread can do"


def test_a_latency_sensitive_copy_waits_for_two_chunks_at_most() -> None:
    with Bench("soft", SETTINGS) as bench:
        be = copier(bench, spec("be", 1.0, best_effort=True), "h2d", "pinned", "async", 16 * MIB)
        ls = copier(bench, spec("ls", latency_sensitive=True), "h2d", "pinned", "sync", MIB, 30)
        ls.begin(0.8)
        alone = ls.result()["latencies_us"]
        be.begin(1.8)
        time.sleep(0.2)
        ls.begin(1.2)
        beside = ls.result()["latencies_us"]
        be.result()
        chunk_us = MIB / LINK
        wait = percentile(beside, 0.9) - percentile(alone, 0.5)
        assert wait < 2 * chunk_us + 1500, f"{wait / chunk_us:.2f} chunks"
