"""Who may ask: bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from cotenant.serving.dispatch.calls import Kind, Refusal


class Tokens:
    """Bearer tokens that may ask; none: everybody may. Kept and compared as digests, in constant time."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    @property
    def any(self) -> bool:
        """Whether tokens are asked for."""
        return bool(self._digests)

    def check(self, authorization: bytes) -> None:
        """Refusal unless the header's value carries a known token."""
        if not self._digests:
            return
        scheme, _, token = authorization.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            raise Refusal(Kind.UNAUTHENTICATED, "needs a bearer token that this server knows")
