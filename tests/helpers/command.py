"""The command line in tests: in this process (fast), or as a process of its own (signals, start-up time)."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from cotenant.cli.main import main


@dataclass(frozen=True)
class Result:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


def cotenant(*args: object) -> Result:
    """Run `cotenant ARGS` in this process; an exception that would be a traceback for the user is raised."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["cotenant", *map(str, args)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    return Result(code, out.getvalue(), err.getvalue())


def command(*args: object) -> list[str]:
    """The command line that runs `cotenant ARGS` as a process of its own."""
    return [sys.executable, "-m", "cotenant.cli.main", *map(str, args)]


def cotenant_process(*args: object, timeout_s: float = 120) -> Result:
    """Run `cotenant ARGS` as a process of its own."""
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=timeout_s, check=False)
    return Result(done.returncode, done.stdout, done.stderr)
