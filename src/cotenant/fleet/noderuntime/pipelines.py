"""Finds programs that read what another program of their job prints, such as `tee` in `python train.py | tee log`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


def fed(pid: int, family: Iterable[int]) -> bool:
    """Return whether the standard input of a process is a pipe that another process of `family` has open as standard
    output or error. Such a process ends by itself when the other one has ended; if it ends first, the other one loses
    what it prints, or its life.
    """
    pipe = _target(pid, 0)
    return pipe.startswith("pipe:") and any(
        pipe in (_target(other, 1), _target(other, 2)) for other in family if other != pid
    )


def _target(pid: int, descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    return ""
