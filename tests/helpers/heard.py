"""Captures what the package logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _List(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.lines.append(f"{text}: {record.exc_info[1]!r}" if record.exc_info else text)


@contextmanager
def heard(level: int = logging.INFO) -> Iterator[list[str]]:
    """The messages logged inside the block, as they come. A message about an exception is followed by the exception."""
    logger, handler = logging.getLogger("cotenant"), _List()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
