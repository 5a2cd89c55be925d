"""Code that the steps of swap.py share: jobs, native or as tenants, and facts about the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))

from cotenant.agent.config.files import TenantSpec, check_spec  # noqa: E402
from cotenant.agent.ipc.client import ControlClient  # noqa: E402
from cotenant.agent.tenants.launcher import Launch, program_environment, register  # noqa: E402
from cotenant.bench.harness import Bench  # noqa: E402

JOBS = str(HERE / "swap_jobs.py")
SOFT = os.environ.get("COTENANT_SWAP_ON") == "soft"  # a trial run on the software GPU, at a thousandth of the size
GPU = "soft" if SOFT else os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
GIB = 1 << 20 if SOFT else 1 << 30


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


class Job:
    """A program of swap_jobs.py, native or as a tenant. Its output lines are stored as they arrive."""

    def __init__(
        self, arguments: list[str], bench: Bench | None = None, spec: TenantSpec | None = None, **extra: str
    ) -> None:
        command = [sys.executable, JOBS, *arguments]
        environment = dict(os.environ)
        if SOFT:
            environment |= soft_environment()
        if bench is not None and spec is not None:
            client = ControlClient(bench.folder)
            bench.clients.append(client)
            environment = program_environment(register(client, Launch(bench.folder, check_spec(spec), command)))
            if SOFT:
                environment |= {"COTENANT_SOFTGPU_STATE": bench.environment["COTENANT_SOFTGPU_STATE"]}
        self.process = subprocess.Popen(
            command,
            env=environment | extra,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if bench is not None and spec is not None:
            client.call("started", name=spec.name, pid=self.process.pid)
        self.lines: list[dict[str, Any]] = []
        self.errors = ""
        self.threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self.threads:
            thread.daemon = True
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = (self.errors + line)[-3000:]

    def wait_lines(self, count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.lines) < count:
            if self.process.poll() is not None and not self.threads[0].is_alive():
                raise RuntimeError(f"a job ended early ({self.process.returncode}): {self.errors[-1500:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(self.lines)} of {count} lines after {seconds} s; {self.errors[-1500:]}")
            time.sleep(0.01)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self, seconds: float) -> list[dict[str, Any]]:
        self.process.wait(seconds)
        for thread in self.threads:
            thread.join(5)
        if self.process.returncode != 0:
            raise RuntimeError(f"a job failed ({self.process.returncode}): {self.errors[-1500:]}")
        return self.lines

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def agent_log(bench: Bench) -> list[str]:
    return (bench.folder / "agent.log").read_text(errors="replace").splitlines()[-30:]


def soft_environment() -> dict[str, str]:
    """Environment of a native program: a private software GPU as its driver."""
    from cotenant.native.libraries import SOFT_DRIVER, library_path

    state = f"/tmp/cotenant-rehearsal-{os.getpid()}"
    return {"COTENANT_BENCH_LIBRARY": str(library_path(SOFT_DRIVER)), "COTENANT_SOFTGPU_STATE": state}


def query(what: str) -> str:
    if SOFT:
        return "0"
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    if GPU != "all":
        command.append(f"--id={GPU.split(',')[0]}")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def used_mib() -> int:
    return int(query("memory.used").splitlines()[0])


def losses(lines: list[dict[str, Any]]) -> list[str]:
    return [line["loss"] for line in lines if "loss" in line]
