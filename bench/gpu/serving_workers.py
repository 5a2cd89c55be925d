"""Starts serving_worker.py processes, each with a part of one GPU under MPS, and sends them orders; also a step's time
limit."""

from __future__ import annotations

import marshal
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms.mps import Mps
from cotenant.devices.base import Gpu

HERE = Path(__file__).resolve().parent


class OutOfTimeError(Exception):
    """Raised when the time of a step is over; results until then are kept."""


class Clock:
    """The time limit of a step."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def check(self, need: float = 0.0) -> None:
        if self.left() < need:
            raise OutOfTimeError(f"{need:.0f} s more are not left")


class WorkerProcess:
    """One worker. ask() sends a question and waits for the answer; begin() and answer() do the two separately."""

    def __init__(self, name: str, environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "serving_worker.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=environment, stdout=file, stderr=file,
            )  # fmt: skip
        theirs.close()
        self.device = ""

    def ready(self, timeout: float = 90.0) -> None:
        self.device = self.answer(timeout)["ready"]

    def begin(self, do: str, **arguments: Any) -> None:
        self.socket.send(marshal.dumps({"do": do, "with": arguments}))

    def answer(self, timeout: float = 60.0) -> dict[str, Any]:
        if not select.select([self.socket], [], [], timeout)[0]:
            raise TimeoutError(f"worker {self.name} said nothing for {timeout:.0f} s; {self.tail()}")
        text = self.socket.recv(1 << 16)
        if not text:
            raise RuntimeError(f"worker {self.name} ended (code {self.process.wait()}); {self.tail()}")
        found: dict[str, Any] = marshal.loads(text)
        if "error" in found:
            raise RuntimeError(f"worker {self.name}: {found['error']}")
        return found

    def ask(self, do: str, timeout: float = 60.0, **arguments: Any) -> dict[str, Any]:
        self.begin(do, **arguments)
        return self.answer(timeout)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-600:]

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Workers:
    """Context manager: a private MPS daemon on the one visible GPU, and the workers started under it."""

    def __init__(self) -> None:
        self.uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.folder = Path(tempfile.mkdtemp(prefix="serving-"))
        self.mps = Mps(self.folder) if self.uuid.startswith("GPU-") else None
        self.started: list[WorkerProcess] = []

    def __enter__(self) -> Workers:
        return self

    def start(self, name: str, fraction: float) -> WorkerProcess:
        """Start a worker. Its ready() waits until it has loaded its libraries."""
        more = {"CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        environment = os.environ | more
        if self.mps is not None:
            spec = TenantSpec(f"{name}-{len(self.started)}", 0.0, fraction)
            environment |= self.mps.grant(spec, (Gpu(self.uuid, "", 0, 0),)).environment
        worker = WorkerProcess(name, environment, self.folder / f"{name}-{len(self.started)}.log")
        self.started.append(worker)
        return worker

    def start_all(self, fractions: Sequence[tuple[str, float]]) -> list[WorkerProcess]:
        made = [self.start(name, fraction) for name, fraction in fractions]
        for worker in made:
            worker.ready()
        return made

    def close_workers(self) -> None:
        for worker in self.started:
            worker.close()
        self.started = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_workers()
        if self.mps is not None:
            self.mps.close()
