"""Memory of CUDA graphs, which is known only after a launch, as the real agent counts it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.bench.harness import Bench

HELPERS = Path(__file__).resolve().parent.parent / "shim"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")

GRAPHS = """
import sys
sys.path.insert(0, sys.argv[1])
from cuda_calls import *
start()
codes = []
for _ in range(3):
    stream, graph, run, p = c_void_p(), c_void_p(), c_void_p(), c_uint64()
    cu("cuStreamCreate", byref(stream), 1)
    cu("cuStreamBeginCapture_v2", stream, 2)
    cu("cuMemAllocAsync", byref(p), c_size_t(300 << 20), stream)
    cu("cuStreamEndCapture", stream, byref(graph))
    cu("cuGraphInstantiateWithFlags", byref(run), graph, c_uint64(0))
    codes.append(raw("cuGraphLaunch", run, stream))
    cu("cuStreamSynchronize", stream)
print(*codes, raw("cuMemAlloc_v2", byref(p), c_size_t(1)), mem_info()[0], flush=True)
sys.stdin.readline()
"""


def test_memory_of_graphs_counts_at_the_agent() -> None:
    """300 MiB a graph under a cap of 512: it is known after the launch, so the second passes and nothing after it."""
    with Bench("soft", {}, kernel_ns=2_000_000) as node:
        line = [sys.executable, "-m", "cotenant.cli.main", "run", "--dir", str(node.folder), "--name", "graphs"]
        process = subprocess.Popen(
            [*line, "--memory", "512MiB", "--", sys.executable, "-c", GRAPHS, str(HELPERS)],
            env=node.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["0", "0", "2", "2", "0"]
        (row,) = node.tenants()
        assert row["gpus"][0]["memory"]["graph"] >= 600 << 20  # in the driver's own granularity
        assert "of 512 MiB in use (a graph's memory" in process.communicate("\n", timeout=60)[1]
