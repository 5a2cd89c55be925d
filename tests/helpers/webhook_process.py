"""The webhook as a real process, and TLS connections as the API server makes them."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import wait_for

from cotenant.kube.admission import certificates

CODE = "import sys; from cotenant.cli.main import main; sys.argv = ['cotenant', *sys.argv[1:]]; main()"
NAMES = ["cotenant-webhook.cotenant-system.svc", "localhost"]


def write_pair(folder: Path, found: certificates.Certificates | None = None) -> certificates.Certificates:
    """Write a certificate and its key to files, and rename them into place as for a mounted Secret."""
    found = found or certificates.make(NAMES)
    for name, text in (("tls.key", found.key), ("tls.crt", found.certificate), ("ca.crt", found.ca)):
        fresh = folder / f"{name}.new"
        fresh.write_bytes(text)
        fresh.rename(folder / name)
    return found


class Webhook:
    """`cotenant kube webhook` with these options."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        self._file = open(log, "ab")  # noqa: SIM115
        arguments = ["kube", "webhook", "--port=0", *options]
        self.process = subprocess.Popen([sys.executable, "-c", CODE, *arguments], stderr=self._file, stdout=self._file)
        self.port = 0
        ready = re.compile(r"ready on \S+ port (\d+)")
        wait_for(lambda: ready.search(self.said()) or self.process.poll() is not None)
        if match := ready.search(self.said()):
            self.port = int(match.group(1))

    def said(self) -> str:
        return self.log.read_text()

    def connect(
        self, ca: bytes, name: str = NAMES[0], client: tuple[Path, Path] | None = None
    ) -> http.client.HTTPSConnection:
        """A connection as the API server makes it: it trusts only that CA and that host name."""
        context = ssl.create_default_context(cadata=ca.decode())
        if client is not None:
            context.load_cert_chain(*map(str, client))
        connection = _Named("127.0.0.1", self.port, name, context)
        connection.connect()
        return connection

    def post(self, ca: bytes, body: bytes, **headers: str) -> tuple[int, bytes]:
        connection = self.connect(ca)
        try:
            connection.request("POST", "/mutate", body, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def review(self, ca: bytes, body: bytes) -> dict[str, Any]:
        status, text = self.post(ca, body)
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)["response"]
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._file.close()


class _Named(http.client.HTTPSConnection):
    """Connects to an address and expects a certificate for another name."""

    def __init__(self, host: str, port: int, name: str, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=60, context=context)
        self._name, self._own = name, context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._own.wrap_socket(self.sock, server_hostname=self._name)
