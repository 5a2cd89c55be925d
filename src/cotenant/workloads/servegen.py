"""Reads the files of ServeGen's clients, which send requests: a folder or tar with a file chunk-N-trace.csv for each,
whose rows are windows: start [s], rate, CV, then parameters of fits, which are not used.
"""

from __future__ import annotations

import math
import tarfile
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.core.extras import needs
from cotenant.workloads.downloads import check_text

with needs("sim"):
    import numpy as np

MOST_BYTES = 256 << 20


def step_of(windows: np.ndarray) -> float:
    """Return the length of a client's windows in seconds: the distance between two starts, or 600 if there is only one.
    """
    return float(windows[1][0] - windows[0][0]) if len(windows) > 1 else 600.0


def arrivals(rng: np.random.Generator, start: float, step: float, rate: float, cv: float) -> np.ndarray:
    """Draw the arrival times of requests in a window, with gamma gaps. The window need not begin with an arrival, so
    the first gap is cut at random (renewal process in equilibrium).
    """
    if rate <= 0:
        return np.zeros(0)
    shape = 1.0 / max(cv, 0.05) ** 2
    count = int(rate * step * 1.5 + 10 * max(cv, 1.0) * math.sqrt(rate * step) + 10)
    gaps = rng.gamma(shape, 1.0 / (shape * rate), count)
    times = start + np.cumsum(gaps) - gaps[0] * rng.random()
    kept: np.ndarray = times[times < start + step]
    return kept


def texts_of(path: str, wanted: tuple[str, ...]) -> dict[str, str]:
    """Return the text of each file of a folder or archive whose name ends with one of `wanted`."""
    where = Path(path)
    found: dict[str, str] = {}
    try:
        if where.is_dir():
            for file in where.rglob("*"):
                if file.name.endswith(wanted):
                    text = file.read_bytes().decode("utf-8", errors="replace")
                    found[f"{where.name}/{file.relative_to(where).as_posix()}"] = text
        else:
            with tarfile.open(where) as tar:
                for member in tar:
                    if member.isfile() and member.name.endswith(wanted) and member.size <= MOST_BYTES:
                        taken = tar.extractfile(member)
                        assert taken is not None
                        found[member.name] = taken.read().decode("utf-8", errors="replace")
    except tarfile.ReadError:
        check_text(where)
        raise InputError("is neither a folder nor a whole tar archive", file=path) from None
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"cannot read: {getattr(error, 'strerror', None) or error}", file=path) from None
    if not any(name.endswith("-trace.csv") for name in found):
        raise InputError("has no clients (chunk-N-trace.csv)", file=path)
    return found


def windows_of(path: str, name: str, text: str) -> np.ndarray:
    """Return a client's windows as an array (windows, 3): start s, rate, CV."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.split(",")[:3]
        try:
            row = [float(cell) for cell in cells]
        except ValueError:
            row = []
        if len(row) < 3 or not all(math.isfinite(x) and x >= 0 for x in row):
            raise InputError(
                f"{name}: a row must be start,rate,CV,..., with numbers of at least 0", file=path, line=number
            )
        rows.append(row)
    if len(rows) > 1 and rows[1][0] <= rows[0][0]:
        raise InputError(f"{name}: windows must start one after another", file=path, line=2)
    return np.array(rows).reshape(-1, 3)
