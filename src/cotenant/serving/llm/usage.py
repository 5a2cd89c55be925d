"""Asks programs for the number of tokens of a streamed answer, and keeps it from clients that did not ask for it."""

from __future__ import annotations

import re
from typing import Any

import orjson

STREAMS = frozenset({b"/v1/chat/completions", b"/v1/completions"})  # paths with the option stream_options
END = re.compile(rb"\r?\n\r?\n")  # end of an event
NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
MOST_HELD = 1 << 16  # bytes; an event of which more has come is no report of tokens


def is_unasked(path: bytes, content: dict[str, Any]) -> bool:
    """Whether a request is for a stream that does not end with the number of its tokens."""
    options = content.get("stream_options")
    if path not in STREAMS or content.get("stream") is not True or not isinstance(options, dict | None):
        return False
    return "include_usage" not in (options or {})


def asking(content: dict[str, Any]) -> dict[str, Any]:
    """Return a request that also asks for the number of tokens."""
    return content | {"stream_options": (content.get("stream_options") or {}) | {"include_usage": True}}


class Unasked:
    """Removes the event of a stream that has the number of its tokens and no part of the answer. The stream may be cut
    into pieces anywhere."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of an event
        self._large = False  # the present event is too large to be held

    def take(self, data: bytes) -> bytes:
        """Process a piece of the stream. The beginning of an event at its end is held back until the next piece."""
        if not self._rest and not self._large and data.endswith(b"\n\n") and not NO_CHOICES.search(data):
            return data
        data = self._rest + data
        kept, start = [], 0
        for end in END.finditer(data):
            event, start = data[start : end.end()], end.end()
            if self._large or not _is_report(event):
                kept.append(event)
            self._large = False
        self._rest = data[start:]
        if self._large or len(self._rest) > MOST_HELD:
            self._large = True
            passed = len(self._rest.rstrip(b"\r\n"))  # a line's end may be the first half of the event's end
            kept.append(self._rest[:passed])
            self._rest = self._rest[passed:]
        return b"".join(kept)

    def end(self) -> bytes:
        """Return the bytes that were held back at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest


def _is_report(event: bytes) -> bool:
    if not event.startswith(b"data:") or not NO_CHOICES.search(event):
        return False
    try:
        content = orjson.loads(event[5:])
    except orjson.JSONDecodeError:
        return False
    return isinstance(content, dict) and content.get("choices") == [] and isinstance(content.get("usage"), dict)
