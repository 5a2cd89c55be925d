"""Parses requests of OpenAI's API. An invalid request raises `RefusalError`, which has the API's form of errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cotenant.profiles.llm.profile import LlmProfile
from cotenant.workloads.llm.text import count_tokens, digest, prompt_of

CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
DEFAULT_TOKENS = {CHAT: 64, COMPLETION: 16}  # value of max_tokens if a request does not state one
# If a chat request does not state max_tokens, its answer ends after this many tokens with finish_reason stop, before it
# reaches the default of max_tokens.
STOP_TOKENS = 32
DIMENSIONS = 64


class RefusalError(Exception):
    """An error with status 4xx or 5xx that answers a request."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> bytes:
        """Return the error as a JSON body in the form of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True)
class Request:
    """A valid request for one answer. `finish`: the finish_reason of that answer."""

    path: str
    model: str
    name: str  # a digest of the prompt, which each token of the answer contains
    prompt_tokens: int
    output_tokens: int
    finish: str
    stream: bool
    usage: bool  # whether a streamed answer ends with its counts of prompt and answer tokens


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises RefusalError if it is not one."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RefusalError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusalError(400, "the body is not a JSON object")
    return body


def check_model(body: dict[str, Any], served: str) -> None:
    """Raise a RefusalError with status 404 if the request is for another model."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RefusalError(400, "model is missing", param="model")
    if model != served:
        message = f"The model `{model}` does not exist; this engine has `{served}`."
        raise RefusalError(404, message, "model_not_found", "model")


def parse_request(path: str, body: dict[str, Any], profile: LlmProfile) -> Request:
    """Parse a request for a chat or completion answer."""
    check_model(body, profile.name)
    if body.get("n", 1) != 1:
        raise RefusalError(400, "n must be 1", param="n")
    _check_prompt(path, body)
    prompt = prompt_of(body)
    tokens = len(body["prompt"]) if isinstance(body.get("prompt"), list) else count_tokens(prompt)
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool)):
        raise RefusalError(400, f"max_tokens must be a whole number, got {json.dumps(asked)}", param="max_tokens")
    if asked is not None and asked < 1:
        raise RefusalError(400, f"max_tokens must be at least 1, got {asked}", param="max_tokens")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RefusalError(400, f"stream must be true or false, got {json.dumps(stream)}", param="stream")
    most = min(profile.max_context, profile.kv_tokens)
    output = asked if asked is not None else DEFAULT_TOKENS[path]
    finish = "length"
    if asked is None and path == CHAT:
        output, finish = STOP_TOKENS, "stop"
    if tokens + output > most:
        raise RefusalError(
            400, f"This model's maximum context length is {most} tokens. However, the request has {tokens} prompt "
            f"tokens and asks for {output} more.", "context_length_exceeded", "messages" if path == CHAT else "prompt",
        )  # fmt: skip
    options = body.get("stream_options") or {}
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return Request(path, profile.name, digest(prompt), tokens, output, finish, bool(stream), usage)


def _check_prompt(path: str, body: dict[str, Any]) -> None:
    if path == CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise RefusalError(400, "messages must be a list of one message or more", param="messages")
        return
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        body["prompt"] = prompt = prompt[0]
    tokens = isinstance(prompt, list) and prompt and all(isinstance(x, int) for x in prompt)
    if not tokens and (not isinstance(prompt, str) or not prompt):
        raise RefusalError(400, "prompt must be one text or one list of tokens", param="prompt")


def embedding_inputs(body: dict[str, Any], profile: LlmProfile) -> list[str]:
    """Return the texts of a request for embeddings. A list of tokens becomes a text of as many words."""
    check_model(body, profile.name)
    given = body.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise RefusalError(400, "input must be a text, tokens, or a list of them", param="input")
    texts = [x if isinstance(x, str) else " ".join(map(str, x)) for x in given if isinstance(x, str | list)]
    if len(texts) < len(given):
        raise RefusalError(400, "input must be a text, tokens, or a list of them", param="input")
    most = min(profile.max_context, profile.kv_tokens)
    for text in texts:
        if count_tokens(text) + 1 > most:
            message = f"an input of {count_tokens(text)} tokens is more than the model's {most - 1}"
            raise RefusalError(400, message, param="input")
    return texts
