"""Runs a step of many cases. Results are saved as they come, and a case that fails or hangs does not stop the
others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

Keep = Callable[[Any], None]  # saves the results so far


def keeper(path: Path) -> Keep:
    """A function that writes results to a JSON file, atomically."""

    def keep(found: Any) -> None:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(found, indent=1, default=str))
        os.replace(fresh, path)

    return keep


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread if the block takes longer than `seconds`."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def failure(error: BaseException) -> dict[str, Any]:
    """The result of a failed case: its error, and the notes of the exception, which hold the agent's log."""
    return {"error": repr(error)[-1500:], "notes": [note[-1500:] for note in getattr(error, "__notes__", [])]}


def each(cases: Mapping[str, Callable[[Keep], Any]], keep: Keep, limit_s: float) -> dict[str, Any]:
    """Run every case within `limit_s`. Returns the results by name; for a case that fails, its error and what it had
    saved."""
    found: dict[str, Any] = {}
    for name, case in cases.items():

        def part(value: Any, name: str = name) -> None:
            found[name] = value
            keep(found)

        try:
            with within(limit_s):
                found[name] = case(part)
        except Exception as error:
            had = {"until then": found[name]} if name in found else {}
            found[name] = failure(error) | had
        keep(found)
    return found
