"""HTTP endpoints of a server of language models: OpenAI's API, where the request names the model; live page, metrics
and status; and, if the server's configuration file has services, the endpoints of these services."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import unquote

import orjson

from cotenant.observability.exposition import CONTENT_TYPE
from cotenant.serving.dispatch.calls import Refusal
from cotenant.serving.gateway.http1 import JSON, Exchange, Handler
from cotenant.serving.gateway.pages import Pages, token_in
from cotenant.serving.gateway.tokens import Tokens
from cotenant.serving.llm.dispatch import Dispatch
from cotenant.serving.llm.openai import OpenAIError, model_object, parse, refuse, request_id_of, unknown_model
from cotenant.serving.llm.origins import Origins
from cotenant.serving.llm.tickets import Ticket
from cotenant.serving.llm.usage import is_unasked

TEXT = f"content-type: {CONTENT_TYPE}\r\n".encode()
LOCAL = frozenset({b"/", b"/state.json", b"/events", b"/metrics", b"/cotenant/status"})
OPEN = frozenset({b"/health", b"/v2/health/live", b"/v2/health/ready"})
# paths of OpenAI's API that take POST only; other ones under /v1/ are handed on to the program, too
POSTED = frozenset(
    b"/v1/chat/completions /v1/completions /v1/embeddings /v1/responses /v1/messages /v1/rerank /v1/score".split()
)


def _is_list(path: bytes) -> bool:
    return path == b"/v1/models" or path.startswith(b"/v1/models/")


def _authorization(x: Exchange) -> bytes:
    """Return the client's token as in a header Authorization. Clients of Anthropic's API send it as x-api-key."""
    key = x.headers.get(b"x-api-key")
    return x.headers.get(b"authorization") or (b"" if key is None else b"Bearer " + key)


def _not_allowed(methods: str) -> OpenAIError:
    text = f"this method is not allowed here: use {methods.replace(', ', ' or ')}"
    return OpenAIError(405, text, "method_not_allowed", allow=methods)


class ModelRoutes:
    """Finds the endpoint of an HTTP request. `services` handles the endpoints of the services in models.yaml (None: it
    has no services) and gets every request for a path that is not in LOCAL or OPEN and does not begin with /v1/.
    """

    def __init__(
        self, dispatch: Dispatch, tokens: Tokens, pages: Pages, metrics: Callable[[], str],
        status: Callable[[], object], later: Callable[..., None], services: Handler | None,
        origins: Origins,
    ) -> None:  # fmt: skip
        """`later`: starts a coroutine in the background, which answers a request."""
        self._dispatch, self._tokens, self._pages = dispatch, tokens, pages
        self._metrics, self._status, self._later, self._services = metrics, status, later, services
        self._origins = origins
        self._created = int(time.time())

    def handle(self, x: Exchange) -> None:
        """Answer a request, now or later."""
        path = x.url.partition(b"?")[0]
        path = path.rstrip(b"/") or b"/"
        openai = path.startswith(b"/v1/")
        if not openai and path not in LOCAL and path not in OPEN and self._services is not None:
            self._services(x)
            return
        if openai:
            x.more = self._origins.headers(x)
            if self._origins.asks_first(x):
                self._origins.answer(x)
                return
        try:
            if path in LOCAL and not self._pages.may_see(x):
                raise OpenAIError(403, "this address answers to localhost only")
            if path not in OPEN:
                self._check(x, _authorization(x) or (token_in(x.url) if path in LOCAL else b""))
            if openai and x.method == b"POST" and not _is_list(path):
                self._ask(x, path)
            elif x.method in (b"GET", b"HEAD") or not (openai or path in LOCAL or path in OPEN):
                self._get(x, path)  # a path that does not exist is not found, whatever the method
            else:
                raise _not_allowed("POST" if openai and not _is_list(path) else "GET, HEAD")
        except OpenAIError as error:
            refuse(x, error)

    def _check(self, x: Exchange, authorization: bytes) -> None:
        try:
            self._tokens.check(authorization)
        except Refusal as refusal:
            raise OpenAIError(401, refusal.message, "invalid_api_key") from None

    def _ask(self, x: Exchange, path: bytes) -> None:
        content = parse(x)
        name = content["model"]
        if name not in self._dispatch.models:
            raise unknown_model(name, self._dispatch.models)
        ticket = Ticket(x, name, self._dispatch.over, self._dispatch.again)
        ticket.unasked = is_unasked(path, content)
        try:
            self._dispatch.submit(ticket)
        except OpenAIError as error:
            ticket.done = True
            refuse(x, error, ticket.request_id)

    def _get(self, x: Exchange, path: bytes) -> None:
        if path == b"/v1/models":
            self._json(x, {"object": "list", "data": [model_object(n, self._created) for n in self._dispatch.models]})
        elif path.startswith(b"/v1/models/"):
            name = unquote(path[len(b"/v1/models/") :].decode("latin-1"))
            if name not in self._dispatch.models:
                raise unknown_model(name, self._dispatch.models)
            self._json(x, model_object(name, self._created))
        elif path == b"/":
            self._pages.page(x)
        elif path == b"/events":
            try:
                self._pages.events(x)
            except Refusal as refusal:
                raise OpenAIError(503, refusal.message, retry_s=refusal.retry_s) from None
        elif path == b"/state.json":
            self._later(x, self._pages.state())
        elif path == b"/metrics":
            x.respond(200, self._metrics().encode(), TEXT)
        elif path == b"/cotenant/status":
            self._json(x, self._status())
        elif path in OPEN:
            if self._dispatch.draining:
                raise OpenAIError(503, "the server is shutting down", retry_s=5.0)
            self._json(x, {"status": "ok"})
        elif path in POSTED:
            raise _not_allowed("POST")
        else:
            raise OpenAIError(404, f"there is nothing at {path[:200].decode('latin-1')}", "unknown_url")

    def _json(self, x: Exchange, content: object) -> None:
        x.respond(200, orjson.dumps(content), JSON + b"x-request-id: %s\r\n" % request_id_of(x))
