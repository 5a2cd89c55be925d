"""The step `gate` of release_615.py: whether the driver shim, the check of shares and the gate of latency-sensitive
work hold under protocol 3 of MPS."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import WorkError

COTENANT = [sys.executable, "-m", "cotenant.cli.main"]
LOAD = [sys.executable, "-m", "cotenant.bench.workload", "busy"]
START_S = 60


class Node:
    """An agent with the GPU, and tenants of it under MPS that keep the GPU busy."""

    def __init__(self, gpus: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cot-"))
        source = str(Path(__file__).resolve().parents[2] / "src")
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        self.environment = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self.environment |= {"COTENANT_DIR": str(self.folder), "PYTHONPATH": path}
        self.running = [subprocess.Popen([*COTENANT, "agent", "--gpus", gpus], env=self.environment)]
        self.until(lambda: True)

    def run(self, name: str, *options: str) -> None:
        """Start a tenant and wait until it has launched kernels."""
        command = [*COTENANT, "run", "--name", name, "--mechanism", "mps", *options, "--", *LOAD]
        program = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.running.append(program)
        assert program.stdin is not None
        program.stdin.write("run 3600\n")
        program.stdin.flush()
        self.until(lambda: self.rows()[name]["launches"] > 0)

    def until(self, done: Any) -> None:
        """Wait until a condition holds. Raises WorkError after a minute."""
        last, until_s = "it did not happen", time.monotonic() + START_S
        while time.monotonic() < until_s:
            try:
                if self.rows() is not None and done():
                    return
            except (WorkError, KeyError) as error:
                last = str(error)
            time.sleep(0.1)
        raise WorkError(f"gate: waited for {START_S} s: {last}")

    def rows(self) -> dict[str, dict[str, Any]]:
        """The agent's tenants, as in `ps --json`."""
        with ControlClient(self.folder) as client:
            return {row["name"]: row for row in client.call("list")["tenants"]}

    def launches(self, seconds: float) -> dict[str, int]:
        """Kernels that each tenant launched in that time."""
        before = self.rows()
        time.sleep(seconds)
        return {name: row["launches"] - before[name]["launches"] for name, row in self.rows().items() if name in before}

    def end(self) -> None:
        for process in reversed(self.running):
            process.terminate()
            process.wait()


def gate(gpus: str, seconds: float) -> dict[str, object]:
    """Measure launches of a best-effort tenant alone and beside a latency-sensitive one, and record what the agent
    reports about both."""
    node = Node(gpus)
    try:
        node.run("be", "--best-effort", "--limit", "50%")
        alone = node.launches(seconds)
        node.run("ls", "--latency-sensitive", "--limit", "50%")
        beside, rows = node.launches(seconds), node.rows()
        return {
            "be_alone": alone["be"],
            "beside": beside,
            "be_waited_s": round(rows["be"]["gate_wait_s"], 2),
            "sms": {name: row["gpus"][0]["sms"] for name, row in rows.items()},
            "not_enforced": {name: [each["text"] for each in row["not_enforced"]] for name, row in rows.items()},
            "warnings": {name: row["warnings"] for name, row in rows.items()},
        }
    finally:
        node.end()
