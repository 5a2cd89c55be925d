"""Steps of many cases: what is found is written down as it comes, and a case that fails or hangs costs only itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

Keep = Callable[[Any], None]  # takes what is known so far


def keeper(path: Path) -> Keep:
    """What writes it to a file, whole or not at all."""

    def keep(found: Any) -> None:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(found, indent=1, default=str))
        os.replace(fresh, path)

    return keep


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread after that long."""

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
    """What is kept of a case that failed; its notes hold what the agent said."""
    return {"error": repr(error)[-1500:], "notes": [note[-1500:] for note in getattr(error, "__notes__", [])]}


def each(cases: Mapping[str, Callable[[Keep], Any]], keep: Keep, limit_s: float) -> dict[str, Any]:
    """Every case's result by name, each within the limit; of one that fails, its error and what it had kept."""
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
