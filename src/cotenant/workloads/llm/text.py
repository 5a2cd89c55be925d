"""Texts of a known number of tokens, and the answers of timed engines, which name model and prompt in every token."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

# words that are one token in the vocabularies of common models, with the space before them
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
    """`tokens` words, drawn from a seed: different seeds share no prefix that an engine could have in its cache."""
    return " ".join(random.Random(seed).choices(WORDS, k=tokens))


def digest(prompt: str) -> str:
    """Short name of a prompt."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def prompt_of(body: dict[str, Any]) -> str:
    """What a request asks, as one text: the contents of its messages, its prompt or its input."""
    if "messages" in body:
        return "\n".join(_content(message.get("content")) for message in body["messages"])
    prompt = body.get("prompt", body.get("input", ""))
    return prompt if isinstance(prompt, str) else " ".join(str(x) for x in prompt)


def _content(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return " ".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def count_tokens(prompt: str) -> int:
    """Tokens of a prompt as a timed engine counts them: its words, one at least."""
    return max(1, len(prompt.split()))


def answer_token(model: str, name: str, index: int) -> str:
    """Token `index`, from 0, of the answer of `model` to the prompt with the digest `name`."""
    return f"{' ' if index else ''}{model}/{name}:{index}"


def answer_text(model: str, prompt: str, tokens: int) -> str:
    """The whole answer."""
    name = digest(prompt)
    return "".join(answer_token(model, name, index) for index in range(tokens))


def fault_of(model: str, prompt: str, text: str) -> str | None:
    """The fault of an answer or its beginning; None where a timed engine of this model gives it to this prompt."""
    name = digest(prompt)
    for index, token in enumerate(text.split(" ") if text else ()):
        if token != f"{model}/{name}:{index}":
            return f"token {index} is {token[:60]!r}, not {f'{model}/{name}:{index}'!r}"
    return None
