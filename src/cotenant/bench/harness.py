"""Runs a private agent and its tenants for a benchmark, in a temporary folder, and stops them in every case."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
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
READY_WITHIN_S = 120.0
SLACK_S = 30.0  # default time for which `answer` and `ask` wait for a line of a program
TAIL_BYTES = 3000
PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Called in a child process: have the kernel send it SIGTERM when the benchmark's process dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def with_source(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the folder of the package `cotenant` on PYTHONPATH, so that a child process finds the
    package's modules even if it is not installed.
    """
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    return dict(environment) | {"PYTHONPATH": path}


class Program:
    """A child process that sets up a GPU, then reads commands as lines and answers with lines of JSON; its standard
    error is kept for messages.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.gpu = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=with_source(environment) | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C then reaches only this process, which ends its child processes itself
            # the child ends with this process; it could otherwise wait forever for an agent that has ended
            preexec_fn=_end_with_parent,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def said(self) -> str:
        """Return the last bytes of the program's standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - TAIL_BYTES))
        return self._errors.read().decode(errors="replace")

    def _line(self, patience_s: float | None) -> str:
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            raise WorkError(f"{self.name} did not answer within {patience_s:g} s; its output: {self.said()}") from None
        if line is None:
            self._lines.put(None)
            raise WorkError(f"{self.name} ended early (code {self.process.wait()}); its output: {self.said()}")
        return line

    def wait_ready(self) -> Program:
        """Block until the program has set up its GPU. Returns the program itself."""
        while not (line := self._line(READY_WITHIN_S)).startswith("ready "):
            pass
        self.gpu = line.removeprefix("ready ").strip()
        return self

    def tell(self, line: str) -> None:
        """Send the program one line, a command."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkError(f"{self.name} ended early; its output: {self.said()}") from None

    def answer(self, patience_s: float | None = SLACK_S) -> dict[str, Any]:
        """Wait for the program's next line, a JSON object. `patience_s` None: without a timeout."""
        found: dict[str, Any] = json.loads(self._line(patience_s))
        return found

    def ask(self, line: str, patience_s: float | None = SLACK_S) -> dict[str, Any]:
        """Send the program a line and wait for the answer."""
        self.tell(line)
        return self.answer(patience_s)

    def begin(self, seconds: float, order: str = "run") -> None:
        """Start one block, a timed run of the program's work. With `order` "steps" the program also records the
        duration of each step.
        """
        self.tell(f"{order} {seconds}")

    def result(self) -> dict[str, Any]:
        """Wait for the result of the block that `begin` started."""
        return self.answer(None)

    def block(self, seconds: float) -> float:
        """Run one block, a timed run of the program's work. Returns units of work per second."""
        self.begin(seconds)
        return rate(self.result())

    def close(self) -> None:
        """End the program that the benchmark started."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # the program ended before it read the line
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()


def rate(block: Mapping[str, Any]) -> float:
    """Return the units of work per second in a block (one timed run of a workload)."""
    return float(block["count"] / ((block["end_ns"] - block["begin_ns"]) / 1e9))


class Bench:
    """Context manager: runs an agent in a temporary folder, and the programs that its methods start. All of them end
    with the `with` block.
    """

    def __init__(
        self, gpus: str, settings: Mapping[str, Any], *, kernel_ns: int = 1_600_000, trace: Path | None = None
    ) -> None:
        self.gpus = gpus
        self.device = device_named(gpus)
        self.settings = dict(settings)
        self.kernel_ns = kernel_ns
        self.trace = trace
        self.backend = "driver" if self.device.simulated or importlib.util.find_spec("torch") is None else "torch"
        self.programs: list[Program] = []
        self.clients: list[ControlClient] = []
        self.agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Bench:
        self.folder = Path(tempfile.mkdtemp(prefix="cotenant-bench-"))
        # the benchmark's own software GPU, which no other program uses
        self.environment = dict(os.environ)
        if self.device.simulated:
            self.environment["COTENANT_SOFTGPU_STATE"] = str(self.folder / "softgpu")
            # the variable would name real GPUs, not the software GPU
            self.environment.pop("CUDA_VISIBLE_DEVICES", None)
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
                    # the agent refused its options, most often --gpus; the last line of its log says which one and why
                    raise InputError(last)
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
        for program in self.programs:
            if kind is not None:
                program.process.terminate()  # the end of the program's block is not awaited
            program.close()
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

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], core: int | None = None
    ) -> Program:
        """Start a module as a program with its arguments. `core`: where its launching thread runs."""
        pinned = {} if core is None else {LAUNCH_CORE: str(core)}
        started = Program(name, arguments, dict(environment) | pinned)
        self.programs.append(started)
        return started

    def _workload(self, kind: str) -> list[str]:
        return ["cotenant.bench.workload", kind, self.backend, str(self.kernel_ns)]

    def native(self, kind: str, *, core: int | None = None, program: Sequence[str] | None = None) -> Program:
        """Start a workload, or the module `program` with its arguments, without the shim."""
        environment = self.environment | {LIBRARY_VARIABLE: str(self.device.driver())}
        return self.start(f"native {kind}", program or self._workload(kind), environment, core)

    def tenant(
        self, kind: str, spec: TenantSpec, *, core: int | None = None, program: Sequence[str] | None = None,
        shim: bool = True,
    ) -> Program:  # fmt: skip
        """Start a workload, or the module `program` with its arguments, as a tenant of the agent. If `shim` is False,
        the program does not load the shim. Its environment then has the variables of the mechanism that enforces the
        tenant's share (such as MPS), but not those of the shim."""
        arguments = program or self._workload(kind)
        client = ControlClient(self.folder)
        self.clients.append(client)
        answer = register(client, Launch(self.folder, spec, list(arguments)))
        plain = self.environment | answer["environment"] | {LIBRARY_VARIABLE: str(self.device.driver())}
        started = self.start(spec.name, arguments, self.with_shim(answer) if shim else plain, core)
        client.call("started", name=spec.name, pid=started.process.pid)
        return started

    def with_shim(self, answer: dict[str, Any]) -> dict[str, str]:
        """Return the environment of a tenant's program, from the agent's answer to `register`."""
        before = dict(os.environ)
        if self.device.simulated:
            os.environ["COTENANT_SOFTGPU_STATE"] = self.environment["COTENANT_SOFTGPU_STATE"]
        try:
            return program_environment(answer)
        finally:
            # the software GPU's environment is restored, because the caller may use another software GPU
            if self.device.simulated:
                del os.environ["COTENANT_SOFTGPU_STATE"]
                os.environ.update(before)

    def tenants(self) -> list[dict[str, Any]]:
        """Return the agent's rows about its tenants, as in `cotenant tenants --json`."""
        with ControlClient(self.folder) as client:
            rows: list[dict[str, Any]] = client.call("list")["tenants"]
            return rows
