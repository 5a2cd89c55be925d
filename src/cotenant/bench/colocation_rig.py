"""The agent and the programs of `cotenant bench colocation`. Depending on the scheme, LS and BE programs run
concurrently or in time slices."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.bench.driver import LIBRARY_VARIABLE
from cotenant.bench.harness import Bench, with_source
from cotenant.bench.overhead import core_of_its_own
from cotenant.bench.workload import LAUNCH_CORE
from cotenant.core.errors import WorkError

START_S = 120.0
SLACK_S = 30.0  # an answer may take this much longer than a block
TAIL_BYTES = 3000


class Program:
    """A child process that reads orders as lines and answers with lines of JSON. Every wait has a timeout."""

    def __init__(self, name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
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
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def said(self) -> str:
        """The last bytes of the program's standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - TAIL_BYTES))
        return self._errors.read().decode(errors="replace")

    def _line(self, patience_s: float) -> str:
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            raise WorkError(f"{self.name} did not answer within {patience_s:g} s; its output: {self.said()}") from None
        if line is None:
            raise WorkError(f"{self.name} ended (code {self.process.wait()}); its output: {self.said()}")
        return line

    def wait_ready(self) -> Program:
        """Block until the program has set up its GPU. Returns the program itself."""
        while not (line := self._line(START_S)).startswith("ready "):
            pass
        self.gpu = line.removeprefix("ready ").strip()
        return self

    def tell(self, line: str) -> None:
        """Send one line."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkError(f"{self.name} ended; its output: {self.said()}") from None

    def answer(self, patience_s: float = SLACK_S) -> dict[str, Any]:
        """Wait for the next line, a JSON object."""
        found: dict[str, Any] = json.loads(self._line(patience_s))
        return found

    def ask(self, line: str, patience_s: float = SLACK_S) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        self.tell(line)
        return self.answer(patience_s)

    def close(self) -> None:
        """End the program."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # the program has ended before it read the line
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()


class Rig:
    """Context manager: runs an agent, LS clients and BE programs. `together`: concurrently under MPS, else in time
    slices. `pinned`: all BE programs launch from the same core, and all other processes of the benchmark avoid it,
    because the choice of the core has more effect than the shim."""

    def __init__(
        self, gpus: str, *, together: bool, pinned: bool = False, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.together, self.pinned = together, pinned
        self.core: dict[str, str] = {}
        self.bench = Bench(gpus, settings or {})
        self.mechanism = mechanisms.choose(Use.TENANT, concurrent=together)
        self._programs: list[Program] = []
        self.clients: list[ControlClient] = []
        self._stack = ExitStack()

    def __enter__(self) -> Rig:
        with ExitStack() as entered:
            if self.pinned:
                self.core = {LAUNCH_CORE: str(entered.enter_context(core_of_its_own()))}
            entered.enter_context(self.bench)
            with ControlClient(self.bench.folder) as client:
                gpu = client.call("status")["gpus"][0]
            self._stack = entered.pop_all()
        self.uuid, self.name = str(gpu["uuid"]), str(gpu["name"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and hasattr(error, "add_note"):
            error.add_note("agent: " + (self.bench.folder / "agent.log").read_text()[-TAIL_BYTES:])
        for program in self._programs:
            program.close()
        for client in self.clients:
            client.close()
        self._stack.close()

    def _tenant(self, spec: TenantSpec, arguments: list[str], *, shim: bool) -> Program:
        client = ControlClient(self.bench.folder)
        self.clients.append(client)
        answer = register(client, Launch(self.bench.folder, spec, arguments))
        environment = self.bench.environment | answer["environment"]
        if shim:
            environment = self.with_shim(answer)
        else:
            environment |= {LIBRARY_VARIABLE: str(self.bench.device.driver())}
        program = Program(spec.name, arguments, environment | self.core)
        self._programs.append(program)
        client.call("started", name=spec.name, pid=program.process.pid)
        return program

    def with_shim(self, answer: dict[str, Any]) -> dict[str, str]:
        """Environment of a tenant's program, from the agent's answer to `register`."""
        before = os.environ.get("COTENANT_SOFTGPU_STATE")
        try:
            if self.bench.device.simulated:
                os.environ["COTENANT_SOFTGPU_STATE"] = self.bench.environment["COTENANT_SOFTGPU_STATE"]
            return program_environment(answer)
        finally:
            if before is None:
                os.environ.pop("COTENANT_SOFTGPU_STATE", None)
            else:
                os.environ["COTENANT_SOFTGPU_STATE"] = before

    def _native(self, name: str, arguments: list[str], sms: float) -> Program:
        if self.together:
            return self._tenant(TenantSpec(name, limit=sms, mechanism=self.mechanism), arguments, shim=False)
        return self.plain(name, arguments)

    def plain(self, name: str, arguments: list[str]) -> Program:
        """Run any module as a program without the agent and without MPS."""
        device = self.bench.device
        more = device.environment([self.uuid]) | {LIBRARY_VARIABLE: str(device.driver())}
        program = Program(name, arguments, self.bench.environment | more | self.core)
        self._programs.append(program)
        return program

    def ls(self, name: str = "ls", *, sms: float = 1.0, batch: int = 4) -> Program:
        """Start an LS client without the shim, as workers of `cotenant serve` run. After `join` it reports activity."""
        return self._native(name, ["cotenant.bench.ls_client", self.bench.backend, str(batch)], sms)

    def join(self, ls: Program, work_class: str = "unknown") -> None:
        """Let a ready LS client report activity to the agent, as work of that class."""
        ls.ask(f"floor {self.bench.folder} {self.uuid} {work_class}")

    def be_native(self, name: str = "be-native", *, sms: float = 1.0) -> Program:
        """Start a BE program without the shim."""
        return self._native(name, ["cotenant.bench.be_loads", self.bench.backend], sms)

    def be(
        self, name: str = "be", *, sms: float = 1.0, below: bool = False, work_sms: int = 0, kernels: str = ""
    ) -> Program:
        """Start an unmodified BE program as a best-effort tenant under the shim."""
        spec = TenantSpec(
            name,
            limit=sms,
            priority=-1 if below else 0,
            mechanism=self.mechanism,
            best_effort=True,
            work_sms=work_sms,
            kernels=kernels,
        )
        return self.tenant(spec, ["cotenant.bench.be_loads", self.bench.backend])

    def tenant(self, spec: TenantSpec, arguments: list[str]) -> Program:
        """Run any module as a tenant under the shim."""
        return self._tenant(spec, arguments, shim=True)

    def mps_environment(self) -> dict[str, str]:
        """Environment with which a program that the caller starts runs concurrently with the others."""
        client = ControlClient(self.bench.folder)
        self.clients.append(client)
        spec = TenantSpec(f"own-{len(self.clients)}", mechanism=self.mechanism)
        return dict(register(client, Launch(self.bench.folder, spec, ["own"]))["environment"])

    def scheme(self, name: str, **changes: Any) -> dict[str, Any]:
        """Apply a scheme to the GPU. Returns the agent's answer."""
        with ControlClient(self.bench.folder) as client:
            return client.call("colocation", scheme=name, **changes)

    def tenants(self) -> dict[str, dict[str, Any]]:
        """The agent's rows of its tenants, by name."""
        return {row["name"]: row for row in self.bench.tenants()}
