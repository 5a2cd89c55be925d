"""Small services, plans and requests for tests of the server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.core.serving import Gpulet, Seat, ServingPlan

# Latency in ms of a batch of 1 and of 8 on each partition of a made-up GPU.
PROFILE = {
    "gpu": "X", "source": "made up", "memory_mb": 1000, "max_gpulets": 4, "partitions": {"50%": 0.5, "100%": 1.0},
    "models": {
        name: {"memory_mb": 1, "latency_ms": {"50%": {"1": 10.0, "8": 24.0}, "100%": {"1": 6.0, "8": 13.0}}}
        for name in ("a", "b", "c")
    },
}  # fmt: skip


def deployment(services: Sequence[Mapping[str, Any]], folder: Path, *, gpus: int = 1, **more: Any) -> dict[str, Any]:
    """Content of a services file with timed models on made-up GPUs; the profile is written into the folder."""
    path = folder / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return {
        "gpus": {"count": gpus, "model": "X"}, "backend": "timed", "profile": str(path),
        "services": [dict(x) for x in services], **more,
    }  # fmt: skip


def drill(folder: Path, name: str, **config: Any) -> str:
    """Write a model folder with a timed.json; returns its path with a slash, as a services file would name it."""
    version = folder / "models" / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "timed.json").write_text(json.dumps(config))
    return str(folder / "models" / name)


def plan(*lets: Mapping[str, int], gpus: int = 1, partition: str = "50%") -> ServingPlan:
    """A plan with a gpulet for each mapping of services to batches, two to a GPU."""
    made, rates = [], {}
    for i, seats in enumerate(lets):
        duty = sum(8.0 + 2.0 * batch for batch in seats.values())
        own = tuple(Seat(name, name.rsplit(":")[-1], batch, 10.0) for name, batch in seats.items())
        made.append(Gpulet(i // 2, "X", partition, 50.0, i % 2, duty, own))
        rates |= dict.fromkeys(seats, 10.0)
    return ServingPlan("test", gpus, tuple(made), rates_rps=rates)


def tensor(values: Sequence[float], rows: int = 1) -> dict[str, Any]:
    """INPUT of a timed model."""
    return {"name": "INPUT", "shape": [rows, len(values) // rows], "datatype": "FP32", "data": list(values)}


def ask(
    url: str, path: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> tuple[int, dict[str, str], Any]:  # fmt: skip
    """(status, headers, JSON or bytes) of one request on a connection of its own."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, got, content = answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        status, got, content = error.code, dict(error.headers), error.read()
    try:
        return status, {k.lower(): v for k, v in got.items()}, json.loads(content)
    except ValueError:
        return status, {k.lower(): v for k, v in got.items()}, content


def infer(url: str, model: str, values: Sequence[float] = (1.0, 2.0), rows: int = 1, **more: Any) -> Any:
    """(status, headers, answer) of an inference on a timed model."""
    return ask(url, f"/v2/models/{model}/infer", {"inputs": [tensor(values, rows)]}, **more)
