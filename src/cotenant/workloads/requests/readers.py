"""Readers of arrival times of recorded requests. Errors name file and line.

azure-llm    CSV with TIMESTAMP (date, time, up to seven fractional digits), also that of azure-lmm
mooncake     one JSON object per line, `timestamp` in ms
servegen     windows of a client (start s, rate, CV, ...) as CSV, or a tar of such files; requests of all clients are
             drawn with gamma gaps of each window's rate and CV
disb         JSON of clients (periodic, poisson, continuous), each with its own arrival process: see disb_clients
offsets-ms   integer offsets in milliseconds within one minute, which is repeated
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.errors import InputError, unknown_name
from cotenant.core.units import counted, number_or_nan
from cotenant.workloads import servegen
from cotenant.workloads.requests.arrivals import MAX_REQUESTS, Arrivals

WRAP_S = 60.0
ZONE = re.compile(r"(Z|\+00:00)$")
FORMATS = ("azure-llm", "mooncake", "servegen", "disb", "offsets-ms")


@dataclass(frozen=True)
class Recorded:
    """Recorded arrival times of requests, ascending, in seconds. `span_s`: length of the recording if the format
    defines it. `total`: number of requests of the whole recording if only its beginning was drawn. `remarks`:
    corrections that were made.
    """

    times_s: np.ndarray
    span_s: float | None = None
    remarks: tuple[str, ...] = ()
    total: float | None = None


def read_requests(
    form: str, path: str | Path, seed: int = 0, rate_rps: float | None = None, duration_s: float = math.inf
) -> Recorded:
    """Read a file of recorded requests in one of FORMATS, except disb, for which there is `disb_clients`.

    Random requests (servegen) are drawn only for the part of the recording that `duration_s` at `rate_rps` (None: as
    recorded) needs.
    """
    readers = {"azure-llm": _azure, "mooncake": _mooncake, "offsets-ms": _offsets}
    where = Path(path)
    if form == "servegen":
        return _servegen(where, seed, rate_rps, duration_s)
    if form not in readers:
        raise unknown_name("request format", form, FORMATS, "arrivals")
    times = np.fromiter(readers[form](where), np.float64)
    if not len(times):
        raise InputError("has no requests", file=where)
    back = int((np.diff(times) < 0).sum())
    remarks = (f"{counted(back, 'request was', 'requests were')} out of order; sorted by time",) if back else ()
    if form == "offsets-ms":
        return Recorded(np.sort(times), WRAP_S, remarks)
    return Recorded(np.sort(times) - times.min(), None, remarks)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if number > MAX_REQUESTS:
                    raise InputError(f"more than {MAX_REQUESTS:,} lines", file=path)
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from None
    except UnicodeDecodeError:
        raise InputError("is not text in UTF-8", file=path) from None


def _azure(path: Path) -> Iterator[float]:
    lines = _lines(path)
    _, header = next(lines, (0, ""))
    names = [c.strip() for c in header.split(",")]
    if "TIMESTAMP" not in names:
        raise InputError("has no column TIMESTAMP", file=path, line=1)
    column = names.index("TIMESTAMP")
    for number, line in lines:
        cells = line.split(",")
        try:
            # the zone of a file is the same in all rows, and only differences of times are used
            whole, _, fraction = ZONE.sub("", cells[column].strip()).partition(".")
            seconds = (datetime.fromisoformat(whole) - datetime(2000, 1, 1)).total_seconds()
            yield seconds + (float("0." + fraction) if fraction else 0.0)
        except (ValueError, IndexError, TypeError):
            raise InputError("TIMESTAMP is not a date and time", file=path, line=number, field="TIMESTAMP") from None


def _mooncake(path: Path) -> Iterator[float]:
    for number, line in _lines(path):
        try:
            value = json.loads(line)["timestamp"]
        except (ValueError, KeyError, TypeError):
            raise InputError("is not a JSON object with timestamp", file=path, line=number) from None
        yield _finite(value, path, number, "timestamp") / 1000.0


def _offsets(path: Path) -> Iterator[float]:
    for number, line in _lines(path):
        for cell in line.replace(",", " ").split():
            if not cell.isdigit():
                raise InputError(f"{cell!r} is not a whole number of milliseconds", file=path, line=number)
            if int(cell) >= WRAP_S * 1000:
                raise InputError(f"offsets must be below 60,000 ms, not {cell} ms", file=path, line=number)
            yield int(cell) / 1000.0


def _finite(value: Any, path: Path, line: int, field: str) -> float:
    number = number_or_nan(value)
    if not math.isfinite(number) or number < 0:
        raise InputError(f"{value!r} is not a number of at least 0", file=path, line=line, field=field)
    return number


def _servegen_windows(path: Path) -> list[np.ndarray]:
    """Return the windows of each ServeGen client as an array (windows, 3): start s, rate, CV."""
    if path.is_dir() or ".tar" in path.name or path.suffix in (".tgz", ".txz"):
        texts = servegen.texts_of(str(path), ("-trace.csv",))
    else:
        texts = {path.name: "\n".join(line for _, line in _lines(path))}
    return [servegen.windows_of(str(path), name, text) for name, text in texts.items()]


def _servegen(path: Path, seed: int, rate_rps: float | None, duration_s: float) -> Recorded:
    """Draw the arrivals of requests of all ServeGen clients. Weeks of many clients are billions of requests, so windows
    after the end of the run are only counted. Each client has its own random stream, so that a longer run has the same
    beginning.
    """
    clients = [(servegen.step_of(windows), windows) for windows in _servegen_windows(path)]
    total = sum(float(windows[:, 1].sum()) * step for step, windows in clients)
    if not total:
        raise InputError("has no requests", file=path)
    end = max(float(windows[:, 0].max()) + step for step, windows in clients if len(windows))
    reach = duration_s if rate_rps is None else duration_s * rate_rps * end / total
    parts, drawn = [], 0.0
    for client, (step, windows) in enumerate(clients):
        rng = np.random.default_rng([seed, client])
        for start, rate, cv in windows[(windows[:, 0] < reach) & (windows[:, 1] > 0)]:
            drawn += rate * step
            if drawn > MAX_REQUESTS:
                raise InputError(f"more than {MAX_REQUESTS:,} requests; a shorter run needs fewer", file=path)
            parts.append(servegen.arrivals(rng, start, step, rate, cv))
    times = np.sort(np.concatenate(parts)) if parts else np.zeros(0)
    return Recorded(times, end) if reach >= end else Recorded(times, end, total=total)


@dataclass(frozen=True)
class DisbClient:
    """One client of a DISB file. `rate_rps` is 0 for closed-loop clients."""

    name: str
    model: str
    arrivals: Arrivals
    rate_rps: float


def disb_clients(path: str | Path) -> list[DisbClient]:
    """Read a DISB file. Periodic clients have constant gaps, poisson clients a Poisson process; a continuous client
    becomes a closed-loop client."""
    where = Path(path)
    text = "\n".join(line for _, line in _lines(where))
    try:
        tasks = json.loads(text)["tasks"]
    except (ValueError, KeyError, TypeError):
        raise InputError("is not a JSON object with tasks", file=where) from None
    out = []
    for i, task in enumerate(tasks):
        try:
            load, client = task["load"], task.get("client", {})
            kind, name = load["type"], str(task["id"])
            model = str(client.get("model_name", name))
        except (KeyError, TypeError, AttributeError):
            raise InputError("needs id and load.type", file=where, field=f"tasks[{i}]") from None
        if kind in ("periodic", "uniform", "poisson"):
            rate = _finite(load.get("frequency"), where, 0, f"tasks[{i}].load.frequency")
            process = Arrivals("poisson" if kind == "poisson" else "constant")
        elif kind in ("continuous", "closed"):
            rate, process = 0.0, Arrivals("closed", clients=1)
        else:
            raise InputError(f"unknown load type {kind!r}", file=where, field=f"tasks[{i}].load.type")
        out.append(DisbClient(name, model, process, rate))
    return out


def disb_client(path: str | Path, service: str, model: str | None = None) -> DisbClient:
    """Return the first client of a DISB file with the name or the model `service`, or with the model `model`."""
    clients = disb_clients(path)
    for client in clients:
        if service in (client.name, client.model) or model == client.model:
            return client
    names = ", ".join(c.name for c in clients)
    raise InputError(f"no client for service {service}; the file has {names}", file=path, field="arrivals")
