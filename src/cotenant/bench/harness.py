"""Runs a private agent and its tenants for a benchmark, in a temporary folder, and stops them in every case."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.bench.driver import LIBRARY_VARIABLE
from cotenant.bench.workload import LAUNCH_CORE
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.registry import device_named

START_WITHIN_S = 90.0
PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Called in a child process: have the kernel send it SIGTERM when the benchmark's process dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def with_source(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with this package on PYTHONPATH, for a child that runs a module of a package not installed."""
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    return dict(environment) | {"PYTHONPATH": path}


class Workload:
    """A running program that follows the protocol of bench/workload.py, native or as a tenant."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.gpu = ""

    def wait_ready(self) -> None:
        """Block until the program has set up its GPU. WorkError if it ends before that."""
        line = self._line()
        if not line.startswith("ready "):
            raise WorkError(f"a workload did not start: {line.strip() or 'it ended'}")
        self.gpu = line.removeprefix("ready ").strip()

    def begin(self, seconds: float, order: str = "run") -> None:
        """Start one block. With `order` "steps" the program also records the duration of each step."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{order} {seconds}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkError("a workload ended early") from None

    def result(self) -> dict[str, Any]:
        """Wait for the result of the block."""
        line = self._line()
        if not line:
            raise WorkError(f"a workload ended early (code {self.process.wait()})")
        block: dict[str, Any] = json.loads(line)
        return block

    def block(self, seconds: float) -> float:
        """Run one block. Returns units of work per second."""
        self.begin(seconds)
        done = self.result()
        return float(done["count"] / ((done["end_ns"] - done["begin_ns"]) / 1e9))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        """End the program."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Bench:
    """Context manager: runs an agent in a temporary folder, and the workloads started through it."""

    def __init__(
        self, gpus: str, settings: Mapping[str, Any], *, kernel_ns: int = 1_600_000, trace: Path | None = None
    ) -> None:
        self.gpus = gpus
        self.device = device_named(gpus)
        self.settings = dict(settings)
        self.kernel_ns = kernel_ns
        self.trace = trace
        self.backend = "driver" if self.device.simulated or importlib.util.find_spec("torch") is None else "torch"
        self._workloads: list[Workload] = []
        self.clients: list[ControlClient] = []
        self.agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Bench:
        self.folder = Path(tempfile.mkdtemp(prefix="cotenant-bench-"))
        # the benchmark's own software GPU, which no other program uses
        self.environment = dict(os.environ)
        if self.device.simulated:
            self.environment["COTENANT_SOFTGPU_STATE"] = str(self.folder / "softgpu")
            self.environment.pop("CUDA_VISIBLE_DEVICES", None)  # the variable would name real GPUs
        config = self.folder / "agent.json"
        config.write_text(json.dumps(self.settings))
        command = [sys.executable, "-m", "cotenant.agent", "--dir", str(self.folder), "--gpus", self.gpus]
        if self.trace is not None:
            command += ["--trace", str(self.trace)]
        self.log = open(self.folder / "agent.log", "wb")
        self.agent = subprocess.Popen(
            [*command, "--config", str(config)],
            stderr=self.log,
            stdout=self.log,
            env=with_source(self.environment),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            self.wait_for_agent()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def wait_for_agent(self) -> None:
        assert self.agent is not None
        deadline = time.monotonic() + START_WITHIN_S
        while time.monotonic() < deadline:
            if self.agent.poll() is not None:
                said = (self.folder / "agent.log").read_text().strip().splitlines()
                last = said[-1].removeprefix("cotenant agent: ") if said else "the agent wrote no message"
                if self.agent.returncode == 2:
                    raise InputError(last)  # most often a wrong --gpus, which the agent's message names
                raise WorkError(f"the agent did not start: {last}")
            try:
                ControlClient(self.folder).close()
                return
            except WorkError:
                time.sleep(0.02)
        raise WorkError(f"the agent did not start within {START_WITHIN_S:g} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for workload in self._workloads:
            if kind is not None:
                workload.process.terminate()  # the end of the workload's block is not awaited
            workload.close()
        for client in self.clients:
            client.close()
        if self.agent is not None:
            self.agent.terminate()
            try:
                self.agent.wait(10)
            except subprocess.TimeoutExpired:
                self.agent.kill()
                self.agent.wait()
        self.log.close()
        if error is not None:
            said = (self.folder / "agent.log").read_text(errors="replace").splitlines()
            error.add_note("the agent's log: " + " | ".join(said[-20:]))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(
        self, kind: str, environment: Mapping[str, str], core: int | None, program: Sequence[str] | None
    ) -> Workload:
        usual = ["cotenant.bench.workload", kind, self.backend, str(self.kernel_ns)]
        command = [sys.executable, "-m", *(program or usual)]
        process = subprocess.Popen(
            command,
            env=with_source(environment) | ({} if core is None else {LAUNCH_CORE: str(core)}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C then reaches only this process, which ends its child processes itself
            preexec_fn=_end_with_parent,  # otherwise a child that waits for an agent that has ended would run on
        )
        workload = Workload(process)
        self._workloads.append(workload)
        return workload

    def native(self, kind: str, *, core: int | None = None, program: Sequence[str] | None = None) -> Workload:
        """Start a workload without the shim. `core`: where its launching thread runs. `program`: another module with
        its arguments."""
        environment = self.environment | {LIBRARY_VARIABLE: str(self.device.driver())}
        return self._start(kind, environment, core, program)

    def tenant(
        self, kind: str, spec: TenantSpec, *, core: int | None = None, program: Sequence[str] | None = None
    ) -> Workload:
        """Start a workload as a tenant of the agent."""
        client = ControlClient(self.folder)
        self.clients.append(client)
        answer = register(client, Launch(self.folder, spec, [kind]))
        before = dict(os.environ)
        if self.device.simulated:
            os.environ["COTENANT_SOFTGPU_STATE"] = self.environment["COTENANT_SOFTGPU_STATE"]
        try:
            environment = program_environment(answer)
        finally:
            if self.device.simulated:  # the environment is restored, because the caller may use another software GPU
                del os.environ["COTENANT_SOFTGPU_STATE"]
                os.environ.update(before)
        workload = self._start(kind, environment, core, program)
        client.call("started", name=spec.name, pid=workload.process.pid)
        return workload

    def tenants(self) -> list[dict[str, Any]]:
        """The agent's rows of its tenants, as in `cotenant tenants --json`."""
        with ControlClient(self.folder) as client:
            rows: list[dict[str, Any]] = client.call("list")["tenants"]
            return rows
