"""Authentication by bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from cotenant.serving.dispatch.calls import Kind, Refusal


class Tokens:
    """Accepted bearer tokens; empty: no authentication. Stored and compared as digests, in constant time."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    @property
    def any(self) -> bool:
        """Whether a token is required."""
        return bool(self._digests)

    def check(self, authorization: bytes) -> None:
        """Raise Refusal unless the header's value contains a valid token."""
        if not self._digests:
            return
        scheme, _, token = authorization.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            raise Refusal(Kind.UNAUTHENTICATED, "a valid bearer token is required")
