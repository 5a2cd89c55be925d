"""Functions that wait for other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WITHIN_S = 60.0  # long, because a machine under load is many times slower; only a test that fails waits this long


def wait_for(check: Callable[[], Any], seconds: float = WITHIN_S, what: str = "") -> Any:
    """Poll until `check` is true; returns its value."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or check}"
        time.sleep(0.01)


def stays(check: Callable[[], Any], seconds: float = 0.3, what: str = "") -> None:
    """Assert that `check` stays true for `seconds`. A slow machine only checks less often."""
    end = time.monotonic() + seconds
    while True:
        assert check(), f"not all of {seconds} s: {what or check}"
        if time.monotonic() >= end:
            return
        time.sleep(0.01)
