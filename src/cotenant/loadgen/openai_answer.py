"""Reads a streamed answer of the OpenAI API while it is received."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httptools
import orjson

MOST_EVENT = 1 << 20


class Answer:
    """Parser callbacks for a response; httptools calls them by name."""

    def __init__(self, token: Callable[[str], None]) -> None:
        self._token = token
        self._rest = b""
        self.done = self.ended = False
        self.cut = False  # the answer ends because it has the most tokens that the request allows
        self.usage: Mapping[str, Any] = {}
        self.error = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        """Handle a received part of the response's body."""
        if self.parser.get_status_code() != 200:
            self.error += data[:300]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_EVENT:
            raise ValueError("an event without an end")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        content = orjson.loads(data)
        if "error" in content:
            self.error = data[:300]
            return
        if content.get("usage"):
            self.usage = content["usage"]
        for choice in content.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or choice.get("text")
            if text:
                self._token(text)
            self.cut = self.cut or choice.get("finish_reason") == "length"

    def on_message_complete(self) -> None:
        """Handle the end of the response to the connection's request."""
        self.ended = True


def sentence(raw: bytes) -> str:
    """Return the message of an error in OpenAI's form; the beginning of the text if it is not one."""
    try:
        return str(orjson.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:100].decode(errors="replace")
