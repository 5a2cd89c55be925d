"""Prompts with a known number of tokens, and the answers of timed engines.

A timed engine serves a language model's API without a model: it takes the time that a model would take. Each token of
its answer contains the model's name and a digest of the prompt, so that a client can check that the answer is its own.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

# each of these words with the space before it is one token in the vocabularies of common models
_LIST = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher
"""
WORDS = tuple(_LIST.split())


def prompt_text(tokens: int, seed: str) -> str:
    """Return a prompt of `tokens` random words. Texts of different seeds have no common prefix that an engine could
    have cached.
    """
    return " ".join(random.Random(seed).choices(WORDS, k=tokens))


def digest(prompt: str) -> str:
    """Return a short digest of a prompt, by which a timed engine's answers name it."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def prompt_of(body: dict[str, Any]) -> str:
    """Return the prompt of a request as one text: the contents of its messages, its prompt or its input."""
    if "messages" in body:
        return "\n".join(_content(message.get("content")) for message in body["messages"])
    prompt = body.get("prompt", body.get("input", ""))
    return prompt if isinstance(prompt, str) else " ".join(str(x) for x in prompt)


def _content(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return " ".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def count_tokens(prompt: str) -> int:
    """Return the number of tokens of a prompt as a timed engine counts them: its words, at least 1."""
    return max(1, len(prompt.split()))


def answer_token(model: str, name: str, index: int) -> str:
    """Return token number `index`, from 0, of a timed engine's answer to the prompt with digest `name`."""
    return f"{' ' if index else ''}{model}/{name}:{index}"


def fault_of(model: str, prompt: str, text: str) -> str | None:
    """Compare an answer, or the beginning of one, with that of a timed engine. Returns the difference, or None."""
    name = digest(prompt)
    for index, token in enumerate(text.split(" ") if text else ()):
        if token != f"{model}/{name}:{index}":
            return f"token {index} is {token[:60]!r}, not {f'{model}/{name}:{index}'!r}"
    return None
