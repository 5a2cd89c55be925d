"""Logging of a process: standard library loggers with one handler on standard error, configured only here.

Modules log to `logging.getLogger(__name__)`. Short commands print sentences; long-running ones print time, level and
module, or one JSON object per line. Users of the library configure their own logging.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import UTC, datetime

from cotenant.core.errors import InputError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# environment variables of these settings, which child processes inherit
FORMAT_VARIABLE, LEVEL_VARIABLE = "COTENANT_LOG_FORMAT", "COTENANT_LOG_LEVEL"


def configure(form: str | None = None, level: str | None = None) -> None:
    """Configure the log of a long-running process and, through the environment, of its child processes. Settings that
    are None come from the environment; the default is text at level info. Raises InputError for unknown values.
    """
    form = form or os.environ.get(FORMAT_VARIABLE) or "text"
    level = level or os.environ.get(LEVEL_VARIABLE) or "info"
    for value, known, option in ((form, FORMATS, "--log-format"), (level, LEVELS, "--log-level")):
        if value not in known:
            raise InputError(f"{value!r} is not {', '.join(known[:-1])} or {known[-1]}", field=option)
    os.environ[FORMAT_VARIABLE], os.environ[LEVEL_VARIABLE] = form, level
    _install(_Json() if form == "json" else _Text(), level)


def configure_short(command: str = "cotenant") -> None:
    """Configure the log of a short command: plain sentences."""
    _install(logging.Formatter(f"{command}: %(message)s"), "info")


class _Handler(logging.Handler):
    """A handler that writes to the current sys.stderr. A full disk or a closed pipe does not end the process."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        line = f"{_time(record)} {record.levelname.lower():7} {record.name.removeprefix('cotenant.')}: {record.message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": _time(record), "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def _install(formatter: logging.Formatter, level: str) -> None:
    handler = _Handler()
    handler.setFormatter(formatter)
    root = logging.getLogger("cotenant")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
