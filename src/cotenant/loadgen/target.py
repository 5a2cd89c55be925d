"""The server under load: its address, its TLS settings, single requests to it."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cotenant.core.errors import InputError, WorkError

ASK_WITHIN_S = 10.0


@dataclass(frozen=True)
class Target:
    """A server and how to connect to it. `scheme`: http, https, grpc or grpcs; `prefix`: what precedes the path of
    every request; `token`: bearer token; `cafile`: CA certificates to trust; `insecure`: the server's certificate is
    not checked."""

    scheme: str
    host: str
    port: int
    prefix: str = ""
    token: str | None = None
    cafile: str | None = None
    insecure: bool = False

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """Return the address as HOST:PORT. An IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_grpc(self) -> bool:
        return self.scheme.startswith("grpc")

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for https and grpcs; None for other schemes."""
        if self.scheme not in ("https", "grpcs"):
            return None
        try:
            context = ssl.create_default_context(cafile=self.cafile)
        except OSError as error:
            raise InputError(f"cannot read certificates: {error.strerror or error}", file=self.cafile) from None
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def ask(self, path: str) -> tuple[int, Any]:
        """Get a JSON object from the server; return status and content (None if it is not JSON)."""
        context = self.ssl_context()
        made: http.client.HTTPConnection = (
            http.client.HTTPConnection(self.host, self.port, timeout=ASK_WITHIN_S)
            if context is None
            else http.client.HTTPSConnection(self.host, self.port, timeout=ASK_WITHIN_S, context=context)
        )
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        try:
            made.request("GET", self.prefix + path, headers=headers)
            answer = made.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise WorkError(f"cannot reach {self}: {getattr(error, 'strerror', None) or error}") from None
        finally:
            made.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, None


def parse_target(url: str, token: str | None = None, cafile: str | None = None, insecure: bool = False) -> Target:
    """Parse an address: http://host:port, https://..., grpc://host:port, grpcs://...; host:port alone means http."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:  # the address has an IPv6 address without its bracket, or a port that is not a number
        parts, port = urlsplit(""), -1
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname or port == -1:
        raise InputError(f"{url!r} is not an address; write http://HOST:PORT or grpc://HOST:PORT", field="url")
    if not (url + (token or "")).isprintable() or " " in url + (token or ""):
        raise InputError("an address or token contains spaces or control characters", field="url")
    default = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}[parts.scheme]
    return Target(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"), token, cafile, insecure)
