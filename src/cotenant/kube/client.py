"""A minimal client of the Kubernetes API: JSON over HTTPS with a service account's token."""

from __future__ import annotations

import functools
import http.client
import json
import os
import ssl
import threading
import urllib.parse
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
MOST_ANSWER = 64 << 20


class ApiError(WorkError):
    """Raised if the API server refused a request or could not be reached. `status`: its HTTP status; 0 if it could not
    be reached."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class KubeApi:
    """Client of one API server. Thread-safe. Every failure is an ApiError with one sentence."""

    def __init__(self, url: str, token_file: Path | None = None, ca_file: Path | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError:  # an IPv6 address without its bracket, or a port that is not a number
            parts, port = urllib.parse.urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url!r} is not an address such as https://10.0.0.1:443", field="--api-server")
        self.url = url.rstrip("/")
        self._token_file = token_file
        address = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._open = functools.partial(http.client.HTTPConnection, *address)
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
            except (OSError, ssl.SSLError) as error:
                raise InputError(f"not a CA certificate: {error}", file=ca_file) from None
            self._open = functools.partial(http.client.HTTPSConnection, *address, context=context)
        self._local = threading.local()

    # -- verbs -----------------------------------------------------------------------------------------------------

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Read one object of the API, or a list of objects."""
        asked = f"?{urllib.parse.urlencode(query)}" if query else ""
        return self.call("GET", path + asked)

    def find(self, path: str) -> dict[str, Any] | None:
        """Read one object of the API; None if it does not exist."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def create(self, path: str, thing: dict[str, Any]) -> dict[str, Any]:
        """Create an object in a collection."""
        return self.call("POST", path, thing)

    def replace(self, path: str, thing: dict[str, Any]) -> dict[str, Any]:
        """Replace an object of the API; its resourceVersion, if it has one, must be current (else ApiError 409)."""
        return self.call("PUT", path, thing)

    def delete(self, path: str) -> dict[str, Any]:
        """Delete an object of the API."""
        return self.call("DELETE", path)

    # -- transport -------------------------------------------------------------------------------------------------

    def call(self, verb: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send one request to the API server. If the server has closed the connection meanwhile, connect again once."""
        headers = {"Accept": "application/json"} | self._authorization()
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        for attempt in (1, 2):
            fresh = getattr(self._local, "connection", None) is None
            connection = self._connection()
            try:
                connection.request(verb, path, data, headers)
                response = connection.getresponse()
                text = response.read(MOST_ANSWER)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if fresh or attempt == 2:
                    raise ApiError(0, f"the API server at {self.url} does not answer: {_reason(error)}") from None
                continue
            if response.will_close:
                self._drop()
            return self._answer(verb, path, response.status, text)
        raise AssertionError("unreachable")

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._open(timeout=TIMEOUT_S)
        return connection

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            connection.close()

    def _authorization(self) -> dict[str, str]:
        """Header with the token, which is read each time because the kubelet replaces it."""
        if self._token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        except OSError as error:
            raise ApiError(0, f"{self._token_file}: the token cannot be read: {error.strerror}") from None

    def _answer(self, verb: str, path: str, status: int, text: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(text) if text else {}
        except ValueError:
            parsed = None
        if 200 <= status < 300 and isinstance(parsed, dict):
            return parsed
        said = parsed.get("message", "") if isinstance(parsed, dict) else ""
        where = path.partition("?")[0]
        if status == 401:
            raise ApiError(401, f"the API server at {self.url} does not accept the token ({self._token_file})")
        if status == 403:
            raise ApiError(403, f"the API server forbids {verb} {where}: {said or 'the account lacks the permission'}")
        raise ApiError(
            status, f"the API server answered {verb} {where} with {status}: {str(said)[:300] or 'no reason'}"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def in_cluster() -> KubeApi:
    """The API server of the cluster in which this process runs. Raises InputError outside of one."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (ACCOUNT / "token").exists():
        raise InputError(
            "this is not a pod with a service account; give the API server's address", field="--api-server"
        )
    host = f"[{host}]" if ":" in host else host
    return KubeApi(f"https://{host}:{port}", ACCOUNT / "token", ACCOUNT / "ca.crt")


def connect(url: str | None, token_file: Path | None, ca_file: Path | None) -> KubeApi:
    """The API server of the command line's options, otherwise the cluster's own."""
    return KubeApi(url, token_file, ca_file) if url else in_cluster()
