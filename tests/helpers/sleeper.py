"""A stand-in for the sleep mode of vLLM's server: `python -m sleeper PORT`.

It answers `one two` to each request while it is awake with weights and KV cache, and 503 otherwise. After level 2 its
weights have to be read again, after they have been given memory.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WHOLE = frozenset({"weights", "loaded", "kv_cache"})
has = set(WHOLE)


class Handler(BaseHTTPRequestHandler):
    """The server's endpoints."""

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer(200, b'{"data": []}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path, _, query = self.path.partition("?")
        if path == "/sleep":
            has.intersection_update({"loaded"} if query == "level=1" else ())
        elif path == "/wake_up":
            has.update({query.partition("=")[2]} if query else WHOLE - {"loaded"})
        elif path == "/collective_rpc":
            has.update({"loaded"} if json.loads(body)["method"] == "reload_weights" and "weights" in has else ())
        elif has == WHOLE:
            pieces = [{"choices": [{"delta": {"content": word}}]} for word in ("one ", "two")]
            return self._answer(200, b"".join(b"data: %b\n\n" % json.dumps(piece).encode() for piece in pieces))
        else:
            return self._answer(503)
        return self._answer(200)

    def log_message(self, *_: object) -> None:
        return


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
