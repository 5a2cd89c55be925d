"""Shows several components (agents, servers) on one live page: fetches their rows over HTTP and merges them."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from cotenant.core.errors import InputError
from cotenant.observability.feed import SECTIONS, Row

FETCH_WITHIN_S = 3.0
MOST_BYTES = 64 << 20


class Remote:
    """The live page of a component at a URL. While it cannot be reached, its last rows are shown and marked as old.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:  # the URL has an IPv6 address without its bracket, or a port that is not a number
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
            raise InputError(f"{url!r} is not the address of a live page, such as http://127.0.0.1:9400", field="URL")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._parts = parts
        self._port = port
        self._token = token
        self._last: dict[str, list[dict[str, Any]]] = {}
        self._fault = "not reached yet"

    def fetch(self) -> None:
        """Fetch the component's rows once, blocking. A failure is recorded and shown with the rows."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._port, timeout=FETCH_WITHIN_S)
        try:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connection.request("GET", "/state.json", headers=headers)
            answer = connection.getresponse()
            body = answer.read(MOST_BYTES)
            if answer.status != 200:
                self._fault = f"answered {answer.status}"
                return
            self._last = json.loads(body)
            self._fault = ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._fault = str(error) or type(error).__name__
        finally:
            connection.close()

    def rows(self, prefix: str) -> list[Row]:
        """Return the component's rows. Keys and references to GPUs get the prefix, so that the rows of two nodes
        differ.
        """
        found: list[Row] = []
        for section in SECTIONS:
            for row in self._last.get(section, []):
                fields = {key: value for key, value in row.items() if key != "key"}
                if section in ("shares", "models") and fields.get("gpu") is not None:
                    fields["gpu"] = f"{prefix}{fields['gpu']}"
                if section == "sources" and self._fault:
                    fields |= {"ok": False, "note": self._fault}
                key = row["key"] if section in ("services", "jobs") and not prefix else f"{prefix}{row['key']}"
                found.append((section, key, fields))
        if not self._last.get("sources"):
            found.append(
                ("sources", f"{prefix}source", {"name": self.url, "kind": "", "ok": False, "note": self._fault})
            )
        return found


class Merged:
    """The rows of several components, which are fetched in parallel threads at most once per `period_s`."""

    def __init__(self, remotes: list[Remote], period_s: float = 0.4) -> None:
        self.remotes = remotes
        self._period_s = period_s
        self._asked_s = float("-inf")

    async def __call__(self) -> AsyncIterator[Row]:
        if time.monotonic() - self._asked_s >= self._period_s:
            self._asked_s = time.monotonic()
            await asyncio.gather(*(asyncio.to_thread(remote.fetch) for remote in self.remotes))
        for number, remote in enumerate(self.remotes):
            for row in remote.rows("" if len(self.remotes) == 1 else f"{number}/"):
                yield row
