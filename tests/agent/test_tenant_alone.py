"""A tenant alone, through the real agent and the real shim: it is fenced seldom, and gives way at once."""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import time
from pathlib import Path

import pytest

from cotenant.abi.tenant_page import PageLayout
from cotenant.agent.config.files import TenantSpec
from cotenant.bench.harness import Bench

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")

TURNS = {"quota": "50ms", "min_quota": "20ms", "max_quota": "50ms"}


def fences(bench: Bench) -> int:
    """Fences that the one process of an agent has recorded so far, as it says on its page."""
    assert bench.agent is not None
    for number in Path(f"/proc/{bench.agent.pid}/fd").iterdir():
        if "cotenant-page" in os.readlink(number):
            return PageLayout.from_buffer_copy(number.read_bytes()[: ctypes.sizeof(PageLayout)]).slots[0].fences
    raise AssertionError("the agent has no page")


@pytest.mark.timed
@pytest.mark.parametrize(("alone_after", "most", "least"), [("0s", 0.3, 0.0), ("1000s", 1.5, 0.7)])
def test_a_lone_tenant_is_fenced_seldom(alone_after: str, most: float, least: float) -> None:
    """Graphs of 1.2 ms: one fence for each in a turn with a deadline, one for about seven (8 ms) in a turn without."""
    with Bench("soft", TURNS | {"alone_after": alone_after}) as bench:
        tenant = bench.tenant("graph", TenantSpec("a"))
        tenant.wait_ready()
        tenant.block(0.3)  # until the shim knows how long a replay takes and the first deadline has passed
        before = fences(bench)
        tenant.begin(0.6)
        replays = tenant.result()["count"]
        time.sleep(0.3)  # the count is published five times a second
        assert least * replays <= fences(bench) - before <= most * replays


@pytest.mark.timed
def test_an_idle_holder_without_a_deadline_gives_way_to_whoever_comes() -> None:
    """Two that work in turn, each for one step of 1.2 ms after the other has been idle for 0.1 s, twice its quota: the
    one that comes gets the GPU from the other in about 1 ms (10 for a test machine), and neither waits for a turn."""
    with Bench("soft", TURNS | {"alone_after": "0s"}) as bench:
        two = [bench.tenant("graph", TenantSpec(name)) for name in ("a", "b")]
        for tenant in two:
            tenant.wait_ready()
        taken_ms = []
        for number in range(24):
            time.sleep(0.1)
            two[number % 2].begin(0.0)
            done = two[number % 2].result()
            assert done["count"] == 1
            taken_ms.append((done["end_ns"] - done["begin_ns"]) / 1e6)
        turns = {row["name"]: row["gpus"][0]["turns"] for row in bench.tenants()}
    assert statistics.median(taken_ms) < 1.2 + 10, taken_ms
    assert min(turns.values()) >= 11  # each step was a separate turn
