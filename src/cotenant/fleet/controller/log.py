"""The controller's log: lines on standard error, which `cotenant fleet up` keeps in controller.log."""

from __future__ import annotations

import sys
from contextlib import suppress


def log_to_stderr(text: str) -> None:
    """One line; none where the log's disk is full, for that must not end the controller."""
    with suppress(OSError):
        print(f"cotenant fleet: {text}", file=sys.stderr, flush=True)
