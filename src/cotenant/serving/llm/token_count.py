"""Counts the tokens of a streamed answer while it is handed on."""

from __future__ import annotations

from typing import Any

import orjson

MOST_LINE = 1 << 20  # bytes; a longer line of a stream is skipped


class TokenCount:
    """Counts the events of a stream that carry a part of the answer, and reads the number of tokens that the engine
    reports. Events with the role, the reason of the end or the usage only carry no part of the answer. An event may
    have several tokens, so without a report their number is too small.
    """

    __slots__ = ("_rest", "_skips", "choices", "events", "faulty", "reported")

    def __init__(self) -> None:
        self.events = 0
        self.faulty = False  # the program reports an error in the stream
        self.reported = 0  # the tokens of all choices, as the engine reports them; 0: it has not
        self.choices = 1  # number of answers in the stream, for requests with n
        self._rest = b""
        self._skips = False  # the present line is over the limit

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far: as many as the engine reports, otherwise one for each event with a part of the
        answer."""
        return self.reported or self.events

    def take(self, data: bytes) -> bool:
        """Process bytes as they came, which may cut events; returns whether they complete events with a part of the
        answer."""
        before = self.events
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        if lines and self._skips:
            del lines[0]
            self._skips = False
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:])
        if len(self._rest) > MOST_LINE or self._skips:
            self._rest, self._skips = b"", True
        return self.events > before

    def _event(self, data: bytes) -> None:
        try:
            content = orjson.loads(data)
        except orjson.JSONDecodeError:  # [DONE] for example
            return
        if not isinstance(content, dict):
            return
        if content.get("error"):
            self.faulty = True
        if _is_part(content):
            self.events += 1
            for choice in content.get("choices") or ():
                if isinstance(choice, dict) and isinstance(index := choice.get("index"), int):
                    self.choices = max(self.choices, index + 1)
        usage = content.get("usage")
        if usage is None and isinstance(response := content.get("response"), dict):
            usage = response.get("usage")  # the last event of /v1/responses
        if isinstance(usage, dict):
            count = usage.get("completion_tokens") or usage.get("output_tokens")
            if isinstance(count, int):
                self.reported = count


def _is_part(content: dict[str, Any]) -> bool:
    """Whether an event carries a part of the answer: text, reasoning or the arguments of a tool."""
    choices = content.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            if choice.get("text") or (isinstance(delta, dict) and any(delta[k] for k in delta if k != "role")):
                return True
        return False
    # /v1/responses has texts as `delta`; /v1/messages has objects whose types end in _delta
    delta = content.get("delta")
    if isinstance(delta, dict):
        return str(delta.get("type")).endswith("_delta")
    return isinstance(delta, str) and delta != ""
