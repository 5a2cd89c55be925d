"""A stand-in for the API server with what the webhook and the device plugin need: objects by path, versions, tokens."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Thing = dict[str, Any]


class ApiServer:
    """Listens on the loopback interface. `store`: path of an object -> the object. `down`: every request is answered by
    status 503."""

    def __init__(self, token: str = "", tls: tuple[Path, Path] | None = None) -> None:
        self.store: dict[str, Thing] = {}
        self.token = token
        self.down = False
        self.dropped: tuple[str, ...] = ()  # fields of disabled features, which a real server would drop from objects
        self.calls: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        self._version = 1
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, answer = api.answer(self.command, self.path, body, self.headers)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*map(str, tls))
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # -- objects ---------------------------------------------------------------------------------------------------

    def put(self, path: str, thing: Thing) -> Thing:
        with self.lock:
            self._version += 1
            thing = json.loads(json.dumps(thing), object_hook=lambda o: {k: o[k] for k in o if k not in self.dropped})
            thing.setdefault("metadata", {})["resourceVersion"] = str(self._version)
            self.store[path] = thing
            return thing

    def put_pod(self, pod: Thing) -> Thing:
        meta = pod["metadata"]
        return self.put(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", pod)

    def drop_pod(self, pod: Thing) -> None:
        meta = pod["metadata"]
        with self.lock:
            self.store.pop(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", None)

    def events(self, pod: Thing | None = None) -> list[tuple[str, str]]:
        """(reason, message) of all events, or of those of one pod."""
        with self.lock:
            return [
                (thing["reason"], thing["message"])
                for path, thing in self.store.items()
                if "/events/" in path and (pod is None or thing["involvedObject"]["uid"] == pod["metadata"]["uid"])
            ]

    # -- answers ---------------------------------------------------------------------------------------------------

    def answer(self, verb: str, target: str, body: Thing | None, headers: Any) -> tuple[int, Thing]:
        path, _, query = target.partition("?")
        asked = dict(urllib.parse.parse_qsl(query))
        with self.lock:
            self.calls.append((verb, path))
            if self.down:
                return 503, {"message": "the server is not ready"}
            if self.token and headers.get("Authorization") != f"Bearer {self.token}":
                return 401, {"message": "Unauthorized"}
            if verb == "GET":
                return self._get(path, asked)
            if verb == "POST":
                assert body is not None
                full = f"{path}/{body['metadata']['name']}"
                if full in self.store:
                    return 409, {"message": f"{full} already exists"}
                return 201, self.put(full, body)
            if path not in self.store:
                return 404, {"message": f"{path} not found"}
            return self._change(verb, path, body)

    def _get(self, path: str, asked: dict[str, str]) -> tuple[int, Thing]:
        if path in self.store:
            return 200, self.store[path]
        if path == "/api/v1/pods":
            node = asked.get("fieldSelector", "").removeprefix("spec.nodeName=")
            pods = [p for k, p in self.store.items() if "/pods/" in k and p["spec"].get("nodeName") == node]
            return 200, {"kind": "PodList", "items": pods}
        return 404, {"message": f"{path} not found"}

    def _change(self, verb: str, path: str, body: Thing | None) -> tuple[int, Thing]:
        before = self.store[path]
        if verb == "DELETE":
            return 200, self.store.pop(path)
        assert body is not None
        given = body.get("metadata", {}).get("resourceVersion")
        if given is not None and given != before["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        return 200, self.put(path, body if verb == "PUT" else merge(before, body))


def merge(before: Any, change: Any) -> Any:
    """RFC 7396."""
    if not isinstance(change, dict):
        return change
    found = dict(before) if isinstance(before, dict) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merge(found.get(key), value)
    return found
