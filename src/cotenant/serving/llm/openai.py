"""The parts of OpenAI's HTTP API that the server handles itself: errors, headers, the list of models. The models'
programs do the rest.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Any

import orjson

from cotenant.serving.gateway.http1 import JSON, Exchange

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# headers of a request that are not forwarded: hop-by-hop headers, and those that the gateway sets itself
NOT_ASKED = frozenset(
    b"host connection keep-alive proxy-connection transfer-encoding te trailer upgrade expect content-length"
    b" authorization x-api-key accept-encoding x-request-id origin".split()
)
NOT_ANSWERED = frozenset(
    b"connection keep-alive transfer-encoding trailer upgrade content-length date server x-request-id"
    b" access-control-allow-origin access-control-allow-credentials access-control-expose-headers".split()
)


class OpenAIError(Exception):
    """A request that is answered by an error in OpenAI's form. `retry_s`: time after which a retry makes sense;
    `allow`: the methods that may be used instead, for status 405.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, *, param: str | None = None,
        retry_s: float | None = None, allow: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.allow = allow
        self.status, self.message, self.code, self.param, self.retry_s = status, message, code, param, retry_s

    @property
    def body(self) -> bytes:
        """The error in OpenAI's form."""
        kind = (
            "authentication_error" if self.status == 401 else "rate_limit_error" if self.status == 429
            else "invalid_request_error" if self.status < 500 else "server_error"
        )  # fmt: skip
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    @property
    def headers(self) -> bytes:
        """Return the headers of the answer, with Allow and Retry-After if `allow` and `retry_s` are given."""
        found = JSON + b"allow: %s\r\n" % self.allow.encode() if self.allow else JSON
        if self.retry_s is None:
            return found
        return found + b"retry-after: %d\r\n" % max(1, min(600, round(self.retry_s + 0.49)))


def error_body(status: int, why: str) -> bytes:
    """The answer to a request that is not valid HTTP, or is over a limit."""
    return OpenAIError(status, why).body


def refuse(x: Exchange, error: OpenAIError, request_id: bytes = b"") -> None:
    """Answer a request with an error in OpenAI's form."""
    known = b"x-request-id: %s\r\n" % (request_id or request_id_of(x))
    more = b"www-authenticate: Bearer\r\n" if error.status == 401 else b""
    x.respond(error.status, error.body, error.headers + known + more)


def request_id_of(x: Exchange) -> bytes:
    """Return the id that the client gave its request, unchanged. If it gave none or an invalid one, return a new id: a
    UUID, since llama.cpp's server accepts no other form."""
    given = x.headers.get(b"x-request-id", b"")
    return given if REQUEST_ID.fullmatch(given) else str(uuid.uuid4()).encode()


def parse(x: Exchange) -> dict[str, Any]:
    """Parse the body of a request, which names the model."""
    if b"content-encoding" in x.headers:
        raise OpenAIError(415, "send the body without content-encoding", "unsupported_encoding")
    if x.headers.get(b"content-type", b"").lower().startswith(b"multipart/"):
        raise OpenAIError(415, "send the body as JSON: forms, such as those with files, are not taken", "invalid_json")
    try:
        content = orjson.loads(x.body)
    except orjson.JSONDecodeError as error:
        raise OpenAIError(400, f"the body is not JSON: {_why_no_json(x.body, error)}", "invalid_json") from None
    if not isinstance(content, dict):
        raise OpenAIError(400, "the body is not a JSON object", "invalid_json")
    if not isinstance(content.get("model"), str):
        raise OpenAIError(400, "the body must name a model", "missing_model", param="model")
    return content


def _why_no_json(body: bytes, error: orjson.JSONDecodeError) -> str:
    if not body:
        return "it is empty"
    try:
        body.decode()
    except UnicodeDecodeError as bad:
        return f"byte {bad.start} is not UTF-8"
    return f"{error.msg}, in line {error.lineno}, column {error.colno}"


def unknown_model(name: str, known: Iterable[str]) -> OpenAIError:
    """The error for an unknown model name."""
    names = list(known)
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    text = f"The model {name[:100]!r} does not exist; the models are: {shown}"
    return OpenAIError(404, text, "model_not_found", param="model")


def model_object(name: str, created: int) -> dict[str, Any]:
    """One row of /v1/models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "cotenant"}


def request_bytes(x: Exchange, host: bytes, request_id: bytes, body: bytes) -> bytes:
    """Return the client's request in the form in which it is sent to the program."""
    # programs answer paths that end in a slash with 404, or redirect clients to addresses that only the server reaches
    path, mark, query = x.url.partition(b"?")
    parts = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (x.method, path.rstrip(b"/") + mark + query, host)]
    parts += [b"%s: %s\r\n" % pair for pair in x.headers.items() if pair[0] not in NOT_ASKED]
    parts.append(b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (request_id, len(body)))
    parts.append(body)
    return b"".join(parts)


def answer_headers(headers: Iterable[tuple[bytes, bytes]], request_id: bytes, queued_s: float) -> bytes:
    """The headers of the answer to the client: the program's headers without hop-by-hop ones, and the endpoint's
    own."""
    kept = b"".join([b"%s: %s\r\n" % pair for pair in headers if pair[0] not in NOT_ANSWERED])
    return kept + b"x-request-id: %s\r\ncotenant-queued-ms: %.3f\r\n" % (request_id, queued_s * 1e3)


class Renamed:
    """Replaces a model's name in a program's answer (`theirs`) by the model's public name (`ours`). The name is also
    found if it is divided between two chunks of the answer."""

    def __init__(self, theirs: str, ours: str) -> None:
        self._pairs = [
            (b'"model":%s%s' % (space, orjson.dumps(name)), b'"model":%s%s' % (space, orjson.dumps(ours)))
            for space in (b"", b" ")
            for name in (theirs, f"{theirs}@main")  # `transformers serve` 5.17 appends the model's revision to the name
        ]
        self._longest = max(len(old) for old, _ in self._pairs)
        self._rest = b""

    def take(self, data: bytes) -> bytes:
        """Process a chunk. Bytes at its end that may be the beginning of the name are held back until the next
        chunk."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        for old, new in self._pairs:
            data = data.replace(old, new)
        start = data.rfind(b'"model"', max(0, len(data) - self._longest))
        if start < 0:
            tail = data[-6:]
            start = next((len(data) - n for n in range(len(tail), 0, -1) if b'"model'.startswith(tail[-n:])), -1)
        if start >= 0 and any(old.startswith(data[start:]) for old, _ in self._pairs):
            data, self._rest = data[:start], data[start:]
        return data

    def end(self) -> bytes:
        """Return the bytes that were held back at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest
