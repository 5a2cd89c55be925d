"""The HTTP endpoints: Open Inference Protocol v2, Triton's repository extension, metrics, and the server's own
endpoints.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import unquote

import orjson

from cotenant.core.units import number_or_nan
from cotenant.observability.exposition import CONTENT_TYPE
from cotenant.observability.feed import Feed
from cotenant.serving.dispatch.calls import Kind, Refusal
from cotenant.serving.gateway.http1 import JSON, Exchange
from cotenant.serving.gateway.live_rows import Got, exposition, rows
from cotenant.serving.gateway.management import NO_CUDA_MEMORY, Api
from cotenant.serving.gateway.pages import Pages, token_in
from cotenant.serving.protocol.oip import InferAnswer, InferRequest, WireError, decode_request, encode_answer
from cotenant.serving.protocol.openapi import document

TEXT = f"content-type: {CONTENT_TYPE}\r\n".encode()
BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
TIMES = b"cotenant-queued-ms: %.3f\r\ncotenant-executed-ms: %.3f\r\ncotenant-batch: %d\r\n"
OPEN = frozenset({"/v2/health/live", "/v2/health/ready"})  # probes use these paths, and send no token
KNOWN_PATHS, KNOWN_BYTES = 2048, 512
LOCAL_PAGES = frozenset({"/", "/state.json", "/events", "/metrics", "/cotenant/status", "/cotenant/plan"})

Endpoint = Callable[[Exchange, str, str], None]
# what was found for a path: (handlers by HTTP method, model's name, model's version, needs a token, is a page)
Found = tuple[dict[bytes, Endpoint], str, str, bool, bool]


def error_body(message: str) -> bytes:
    """The body of an error in the protocol's form."""
    return orjson.dumps({"error": message})


class Routes:
    """Finds the endpoint to which an HTTP request belongs, and answers the request."""

    def __init__(
        self, api: Api, connections: Callable[[], Mapping[str, tuple[int, int]]], address: Callable[[], str]
    ) -> None:
        """`connections`: open and refused connections by endpoint, and `address`: the address of this endpoint, both
        for the live page and the metrics.
        """
        self.api = api
        self._connections = connections
        self._address = address
        got = Got()
        self.rows = lambda: rows(api, address(), got)
        self.pages = Pages(Feed(self.rows), address)
        self._found: dict[bytes, Found] = {}
        self._fixed: dict[str, dict[bytes, Endpoint]] = {
            "/v2": {b"GET": lambda x, n, v: self._json(x, api.server_metadata())},
            "/v2/health/live": {b"GET": lambda x, n, v: self._json(x, {"live": True})},
            "/v2/health/ready": {b"GET": self._ready},
            "/v2/models/stats": {b"GET": lambda x, n, v: self._json(x, api.statistics("", ""))},
            "/v2/repository/index": {b"POST": self._index},
            "/": {b"GET": lambda x, n, v: self.pages.page(x)},
            "/state.json": {b"GET": lambda x, n, v: self._later(x, self.pages.state())},
            "/events": {b"GET": lambda x, n, v: self.pages.events(x)},
            "/metrics": {b"GET": lambda x, n, v: x.respond(200, self.metrics().encode(), TEXT)},
            "/cotenant/status": {b"GET": lambda x, n, v: self._json(x, api.status())},
            "/cotenant/plan": {b"GET": lambda x, n, v: self._json(x, api.pool.plan.to_dict())},
            "/openapi.json": {b"GET": lambda x, n, v: self._json(x, document())},
        }
        self._of_model: dict[str, dict[bytes, Endpoint]] = {
            "": {b"GET": lambda x, n, v: self._json(x, api.model_metadata(n, v))},
            "ready": {b"GET": self._model_ready},
            "config": {b"GET": lambda x, n, v: self._json(x, api.model_config(n, v))},
            "stats": {b"GET": lambda x, n, v: self._json(x, api.statistics(n, v))},
            "infer": {b"POST": self.infer},
        }
        self._memory: dict[str, dict[bytes, Endpoint]] = {
            "status": {b"GET": lambda x, n, v: self._json(x, api.memory(n) if v == "system" else [])},
            "register": {b"POST": self._register},
            "unregister": {b"POST": self._unregister},
        }
        self._of_repository: dict[str, dict[bytes, Endpoint]] = {
            "load": {b"POST": lambda x, n, v: self._act(x, api.load(n, _parameters(x)))},
            "unload": {b"POST": lambda x, n, v: self._act(x, api.unload(n, _parameters(x)))},
        }

    def handle(self, x: Exchange) -> None:
        """Answer an HTTP request, now or later."""
        found = self._found.get(x.url)
        try:
            if found is None:
                found = self._look_up(x.url)
            methods, name, version, guarded, is_page = found
            if is_page and not self.pages.may_see(x):
                x.respond(403, error_body("this address answers to localhost only"))
                return
            if guarded:
                self.api.tokens.check(x.headers.get(b"authorization") or (token_in(x.url) if is_page else b""))
            endpoint = methods.get(x.method) or (methods.get(b"GET") if x.method == b"HEAD" else None)
            if endpoint is None:
                allowed = b"allow: %s\r\n" % b", ".join(methods)
                x.respond(405, error_body("this method is not allowed; use one of the Allow header"), JSON + allowed)
                return
            if b"origin" in x.headers and x.method == b"POST" and endpoint != self.infer:
                raise Refusal(Kind.WRONG, "requests from pages of other sites are not allowed")
            endpoint(x, name, version)
        except Refusal as refusal:
            self._refuse(x, refusal)

    def _look_up(self, url: bytes) -> Found:
        raw = url.partition(b"?")[0].decode("latin-1")
        path = raw.rstrip("/") or "/"
        methods, name, version = self._fixed.get(path), "", ""
        if methods is None:
            parts = [unquote(part, errors="replace") for part in path.split("/")[1:]]
            methods, name, version = self._model_path(parts)
        if methods is None:
            raise Refusal(Kind.UNKNOWN, f"there is nothing at {path[:200]}")
        found = (methods, name, version, path not in OPEN, path in LOCAL_PAGES)
        if len(self._found) < KNOWN_PATHS and len(url) <= KNOWN_BYTES:
            self._found[url] = found
        return found

    def _model_path(self, parts: list[str]) -> tuple[dict[bytes, Endpoint] | None, str, str]:
        if len(parts) >= 3 and parts[:2] == ["v2", "models"]:
            name, rest, version = parts[2], parts[3:], ""
            if len(rest) >= 2 and rest[0] == "versions":
                version, rest = rest[1], rest[2:]
            if len(rest) <= 1:
                return self._of_model.get(rest[0] if rest else ""), name, version
        if len(parts) == 5 and parts[:3] == ["v2", "repository", "models"]:
            return self._of_repository.get(parts[4]), parts[3], ""
        if len(parts) >= 3 and parts[0] == "v2" and parts[1] in ("systemsharedmemory", "cudasharedmemory"):
            name, rest = (parts[3], parts[4:]) if parts[2] == "region" and len(parts) > 4 else ("", parts[2:])
            if len(rest) == 1 and (name or rest[0] != "register"):
                return self._memory.get(rest[0]), name, parts[1].removesuffix("sharedmemory")
        return None, "", ""

    # ---- inference ----

    def infer(self, x: Exchange, name: str, version: str) -> None:
        """Handle an inference request that came over HTTP."""
        headers = x.headers
        length = headers.get(b"inference-header-content-length")
        body = x.body
        try:
            if b"content-encoding" in headers:
                body = _inflated(body, headers[b"content-encoding"], self.api.body_limit)
            request = decode_request(
                name, version, body, None if length is None else length.decode("latin-1"), self.api.regions
            )
            deadline = headers.get(b"cotenant-deadline-ms")
            if deadline is not None:
                request.timeout_ms = _milliseconds(deadline)
        except WireError as error:
            self._refuse(x, self.api.gateway.wrong(name, version, str(error)))
            return
        x.withdraw = self.api.gateway.infer(request, lambda answer: self._answer(x, request, answer))

    def _answer(self, x: Exchange, request: InferRequest, answer: InferAnswer | Refusal) -> None:
        if isinstance(answer, Refusal):
            self._refuse(x, answer)
            return
        try:
            body, header_length = encode_answer(request, answer)
        except WireError as error:
            self._refuse(x, Refusal(Kind.WRONG, str(error)))
            return
        times = TIMES % (answer.queued_ms, answer.executed_ms, answer.batch)
        x.respond(200, body, (JSON if header_length is None else BINARY % header_length) + times)

    # ---- answers ----

    def _refuse(self, x: Exchange, refusal: Refusal) -> None:
        status, _, word = refusal.kind.value
        headers = JSON + b"cotenant-outcome: %s\r\n" % word.encode()
        if refusal.retry_s is not None:
            headers += b"retry-after: %d\r\n" % max(1, round(refusal.retry_s))
        if refusal.kind is Kind.UNAUTHENTICATED:
            headers += b"www-authenticate: Bearer\r\n"
        x.respond(status, error_body(refusal.message), headers)

    def _json(self, x: Exchange, content: Any) -> None:
        x.respond(200, orjson.dumps(content))

    # ---- the live page ----

    def metrics(self) -> str:
        """The metrics page for Prometheus."""
        return exposition(self.api, self._connections())

    def _later(self, x: Exchange, work: Coroutine[Any, Any, bytes]) -> None:
        async def run() -> None:
            x.respond(200, await work)

        self.api.later(run(), lambda refusal: None if refusal is None else self._refuse(x, refusal))

    # ---- health, models and memory regions ----

    def _ready(self, x: Exchange, name: str, version: str) -> None:
        why = self.api.not_ready()
        if why:
            raise Refusal(Kind.UNAVAILABLE, why, 1.0)
        self._json(x, {"ready": True})

    def _model_ready(self, x: Exchange, name: str, version: str) -> None:
        self.api.model_info(name, version)
        self._json(x, {"name": name, "ready": True})

    def _index(self, x: Exchange, name: str, version: str) -> None:
        wanted = _object(x)
        if wanted is None or not isinstance(wanted.get("ready", False), bool):
            raise Refusal(Kind.WRONG, 'the body must be {} or {"ready": true}')
        self._json(x, self.api.index(bool(wanted.get("ready", False))))

    def _register(self, x: Exchange, name: str, kind: str) -> None:
        content = _object(x)
        if kind != "system":
            raise Refusal(Kind.WRONG, NO_CUDA_MEMORY)
        if content is None or content.keys() - {"key", "offset", "byte_size"}:
            raise Refusal(Kind.WRONG, 'the body must be {"key": "/NAME", "offset": 0, "byte_size": BYTES}')
        self.api.register_memory(name, content.get("key"), content.get("offset", 0), content.get("byte_size"))
        x.respond(200)

    def _unregister(self, x: Exchange, name: str, kind: str) -> None:
        if kind == "system":
            self.api.regions.unregister(name)
        x.respond(200)

    def _act(self, x: Exchange, work: Coroutine[Any, Any, None]) -> None:
        self.api.later(work, lambda error: x.respond(200) if error is None else self._refuse(x, error))


def _object(x: Exchange) -> dict[str, Any] | None:
    """Return a request's body as a JSON object: {} if it is empty, None if it is not a JSON object."""
    try:
        content = orjson.loads(x.body) if x.body else {}
    except orjson.JSONDecodeError:
        return None
    return content if isinstance(content, dict) else None


def _parameters(x: Exchange) -> dict[str, Any]:
    content = _object(x)
    found = None if content is None else content.get("parameters", {})
    unknown = (content or {}).keys() - {"parameters"}
    if not isinstance(found, dict) or unknown:
        raise Refusal(Kind.WRONG, 'the body must be {} or {"parameters": {...}}')
    return found


def _milliseconds(text: bytes) -> float:
    value = number_or_nan(text)
    if not 0 <= value < 1e9:
        raise WireError("cotenant-deadline-ms must be a number of milliseconds")
    return value


def _inflated(body: bytes, encoding: bytes, limit: int) -> bytes:
    kind = encoding.strip().lower()
    if kind == b"identity":
        return body
    if kind not in (b"gzip", b"deflate"):
        raise WireError("content-encoding must be gzip, deflate or absent")
    inflater = zlib.decompressobj(wbits=47 if kind == b"gzip" else 15)
    try:
        out = inflater.decompress(body, limit + 1)
    except zlib.error:
        raise WireError(f"the body is not {kind.decode()}") from None
    if len(out) > limit:
        raise Refusal(Kind.TOO_LARGE, f"the body is over the limit of {limit} bytes")
    if not inflater.eof:
        raise WireError(f"the body is truncated {kind.decode()}")
    return out
