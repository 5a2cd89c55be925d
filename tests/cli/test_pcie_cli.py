"""cotenant bench pcie and profile kernels on the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import cotenant
from waiting import wait_for

from cotenant.cli.bench_pcie import _tell


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--weights", "1,x"], "--weights"),
        (["--weights", "0,1"], "--weights"),
        (["--direction", "up"], "--direction"),
        (["--memory", "shared"], "--memory"),
        (["--mode", "both"], "--mode"),
        (["--seconds", "0"], "--seconds"),
        (["--size", "big"], "--size"),
        (["--size", "0"], "--size"),
        (["--size", "64KiB"], "--size"),
        (["--size", "1TiB"], "--size"),
        (["--copy-chunk-bytes", "3"], "--copy-chunk-bytes"),
        (["--copy-chunk-bytes", "0"], "--copy-chunk-bytes"),
        (["--copy-period-bytes", "0"], "--copy-period-bytes"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], field: str) -> None:
    done = cotenant("bench", "pcie", *arguments)
    assert done.code == 2
    assert field in done.err
    assert done.out == ""


def test_a_profiled_program_is_given_time() -> None:
    done = cotenant("profile", "kernels", "--gpus", "soft", "--timeout", "0", "--", "true")
    assert done.code == 2
    assert "--timeout" in done.err


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_benchmark_that_is_killed_leaves_nothing() -> None:
    """Not its agent, and no tenant either, which may be waiting for an agent to come back."""
    script = """
import time
from cotenant.bench.harness import Bench
from cotenant.agent.config.files import TenantSpec
with Bench("soft", {}) as bench:
    tenant = bench.tenant("busy", TenantSpec("one"))
    tenant.wait_ready()
    tenant.begin(60)
    print(bench.agent.pid, tenant.process.pid, bench.folder, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    *pids, folder = process.stdout.readline().split()
    there = [Path(f"/proc/{pid}") for pid in pids]
    assert [path.exists() for path in there] == [True, True]
    process.kill()
    process.communicate()
    try:
        wait_for(lambda: not any(path.exists() for path in there))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timed
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_answer_s_keys() -> None:
    done = cotenant("bench", "pcie", "--weights", "1,3", "--seconds", "0.6", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert {"shares", "total_over_link", "ls_copy_wait_chunks"} <= set(found)
    assert sum(found["shares"]) == pytest.approx(1.0)
    assert found["shares"][1] > found["shares"][0]
    # The software link has 150 MB/s. On a busy machine a native block may be disturbed, and then the quotient, too.
    assert 0.3 * 150e6 < found["total_over_link"] * found["native_bytes_per_s"] < 1.1 * 150e6
    assert found["ls_copy_wait_chunks"] >= 0.0
    assert found["chunk_bytes"] == 1 << 20  # of the agent of this run, not the default


@pytest.mark.timed
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_pageable_copies_share_by_weight_too() -> None:
    words = ("--weights", "1,3", "--memory", "pageable", "--mode", "sync", "--no-ls", "--seconds", "1.2")
    found = json.loads(cotenant("bench", "pcie", *words, "--json").out)
    assert found["shares"] == pytest.approx([0.25, 0.75], abs=0.08)
    assert found["ls_copy_wait_chunks"] is None


def test_a_p99_of_few_copies_is_called_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"gpu": "g", "direction": "h2d", "memory": "pinned", "native_bytes_per_s": 1e8, "weights": [1.0]}
    told |= {"shares": [1.0], "total_over_link": 1.0, "chunk_us": 1000.0, "ls_copy_wait_chunks": 1.5}
    for copies, words in ((52, "the longest of 52 copies"), (753, "p99")):
        _tell(told | {"ls_copy_wait_chunks_median": 0.5, "ls_beside_us": {"copies": copies}})
        assert f"waits 1.50 chunks of 1000 us ({words}; median 0.50)" in capsys.readouterr().out
