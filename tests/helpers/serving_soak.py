"""A long test of a real server whose request rates change, whose models are loaded and unloaded, and which replans all
the time."""

from __future__ import annotations

import csv
import http.client
import json
import os
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cotenant.loadgen.experiment import ServerProcess
from cotenant.loadgen.http import HttpTransport
from cotenant.loadgen.payload import Payload
from cotenant.loadgen.result import LoadResult
from cotenant.loadgen.run import LoadTest, run_here
from cotenant.loadgen.schedule import LoadService
from cotenant.loadgen.target import parse_target
from cotenant.serving.backends.timed import offset
from cotenant.serving.protocol.tensors import Tensor
from cotenant.workloads.requests.arrivals import parse_arrivals

STEADY = {"resnet50": (10.0, 40.0, 20.0), "googlenet": (30.0, 10.0), "bert": (20.0, 50.0, 5.0, 20.0)}
RELOADED = "mobilenet_v2"
SLO_MS = 500.0
SERVICES: dict[str, Any] = {
    "gpus": {"count": 3, "model": "RTX2080Ti"},
    "backend": "timed",
    "replan": {"period": "3s", "headroom": 1.5},
    "services": [{"name": n, "rate_rps": max(r), "slo_ms": SLO_MS} for n, r in STEADY.items()]
    + [{"name": RELOADED, "rate_rps": 20.0, "slo_ms": SLO_MS}],
}


class EchoPayload(Payload):
    """A timed model adds its own number to its input, and every request has an input of its own: the answer's tensor
    says which request and which model it is."""

    def request(self, index: int) -> bytes:
        whole = super().request(index)
        return whole[:-16] + struct.pack("<4f", float(index % (1 << 20)), 1.0, 2.0, 3.0)

    def belongs(self, index: int, body: bytes) -> bool:
        expected = [float(np.float32(x + offset(self.model))) for x in (index % (1 << 20), 1.0, 2.0, 3.0)]
        return super().belongs(index, body) and list(struct.unpack("<4f", body[-16:])) == expected


@dataclass
class Soak:
    """Results. `memory`: (seconds, bytes of the gateway)."""

    result: LoadResult
    server_outcomes: Counter[tuple[str, str]]
    memory: list[tuple[float, int]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    reloads: int = 0
    exit_code: int = 0

    def growth(self) -> float:
        """Growth of the gateway's memory: the median of the last fifth of the run, divided by that of the second fifth.
        1: no growth."""
        values = [b for _, b in self.memory]
        n = len(values) // 5
        return float(np.median(values[-n:]) / np.median(values[n : 2 * n]))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Disturber(threading.Thread):
    """Unloads and loads one model repeatedly, and records the memory of the gateway."""

    def __init__(self, url: str, pid: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.host, self.pid, self.every_s = url.removeprefix("http://"), pid, every_s
        self.ending = threading.Event()
        self.memory: list[tuple[float, int]] = []
        self.reloads = 0

    def ask(self, method: str, path: str) -> Any:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            connection.request(method, path, body=b"" if method == "POST" else None)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, (path, answer.status, text[:200])
            return json.loads(text) if text else None
        finally:
            connection.close()

    def run(self) -> None:
        began = reloaded = time.monotonic()
        while not self.ending.wait(0.25):
            now = time.monotonic()
            self.memory.append((now - began, resident(self.pid)))
            if now - reloaded > self.every_s:
                self.ask("POST", f"/v2/repository/models/{RELOADED}/unload")
                time.sleep(0.3)
                self.ask("POST", f"/v2/repository/models/{RELOADED}/load")
                self.reloads += 1
                reloaded = time.monotonic()


def soak(folder: Path, seconds: float, seed: int = 0, scale: float = 1.0) -> Soak:
    """Run the test; `scale` multiplies the rates."""
    services = folder / "services.yaml"
    services.write_text(yaml.safe_dump(SERVICES))
    server = ServerProcess(
        services,
        ["--http", "127.0.0.1:0", "--grpc", "none", "--log", str(folder / "server.csv")],
        folder / "server.log",
    )
    try:
        server.wait_ready()
        url = server.addresses["http"]
        target = parse_target(url)
        poisson = parse_arrivals("poisson")
        under_load = tuple(
            LoadService(name, rates, poisson, SLO_MS).scaled(scale)
            for name, rates in {**STEADY, RELOADED: (20.0,)}.items()
        )
        step_s = max(2.0, min(20.0, seconds / 8))
        test = LoadTest(target, under_load, seconds, seed, step_s, timeout_s=20.0)
        tensor = [Tensor("INPUT", "FP32", (1, 4), bytes(16))]
        payloads = [EchoPayload(target, s.name, tensor) for s in under_load]
        disturber = Disturber(url, server.process.pid, max(3.0, min(30.0, seconds / 5)))
        disturber.start()
        result = run_here(test, {}, transport=HttpTransport(target, payloads, 512))
        disturber.ending.set()
        disturber.join(60)
        status = disturber.ask("GET", "/cotenant/status")
    finally:
        code = server.stop()
    with (folder / "server.csv").open() as file:
        outcomes = Counter((row["service"], row["outcome"]) for row in csv.DictReader(file))
    return Soak(result, outcomes, disturber.memory, status, disturber.reloads, code)


def check(found: Soak, attainment: float = 0.99, growth: float = 1.05, replans: int = 2) -> None:
    """Assert what must hold for any run."""
    result = found.result
    assert result.wrong == 0, "answers of another request or by another model"
    assert result.stray == 0, "requests answered twice"
    assert (result.rows["finished"] >= 0).all(), "requests without an answer"
    summary = result.summary()["services"]
    for name, row in summary.items():
        assert row["sent"] == row["ok"] + row["late"] + row["dropped"] + row["failed"]
        seen = {outcome: n for (service, outcome), n in found.server_outcomes.items() if service == name}
        answered = seen.get("ok", 0) + seen.get("late", 0)
        assert answered == row["ok"] + row["late"], f"{name}: the server's log and the client's disagree: {seen} {row}"
        if name != RELOADED:
            assert row["failed"] == 0, f"{name}: {result.reasons}"
            assert row["slo_attainment"] >= attainment, f"{name}: {row}"
    assert found.reloads >= 1
    assert found.status["replans"] >= replans
    assert found.exit_code == 0
    assert found.growth() < growth, f"the gateway's memory grew x{found.growth():.3f}"


def flat(found: Soak) -> Soak:
    """A copy without the rows, to print."""
    return replace(found, result=replace(found.result, rows=found.result.rows[:0]))
