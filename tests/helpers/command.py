"""The command line in tests: in this process (fast), or as a process of its own (signals, start-up time)."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from cotenant.cli.main import main

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Result:
    """Exit code of a command, and its output."""

    code: int
    out: str
    err: str


def cotenant(*args: object) -> Result:
    """Run `cotenant ARGS` in this process. An exception that the user would see as a traceback is raised."""
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


def python_for_all() -> tuple[str, bool]:
    """A Python with this one's packages, as words of a shell, and whether every user can run it."""
    own = sys.executable
    for python, path in ((own, f"{SOURCE}"), ("/usr/bin/python3", f"{SOURCE}:{sysconfig.get_path('purelib')}")):
        command = ["env", f"PYTHONPATH={path}", python, "-c", "import cotenant.cli.main"]
        if subprocess.run(command, user=65534, cwd="/", capture_output=True, check=False).returncode == 0:
            return f"PYTHONPATH={path} exec {python}", True
    return f"PYTHONPATH={SOURCE} exec {own}", False
