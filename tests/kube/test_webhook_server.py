"""The webhook over TLS: certificates that change, callers that may not, bodies that are too large."""

from __future__ import annotations

import base64
import datetime
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_standin import ApiServer
from pods import decoded, pod, review, share
from ports import reserved_ports
from waiting import wait_for
from webhook_process import NAMES, Webhook, write_pair

from cotenant.core.errors import InputError, WorkError
from cotenant.kube.admission import bootstrap, certificates
from cotenant.kube.admission.review import MAX_BODY_BYTES
from cotenant.kube.client import KubeApi

Start = Callable[..., Webhook]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Webhook] = []

    def begin(*options: str) -> Webhook:
        started.append(Webhook(tmp_path / f"webhook{len(started)}.log", *options))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [f"--cert={tmp_path}/tls.crt", f"--key={tmp_path}/tls.key"]


def test_reviews_over_tls_and_a_certificate_that_changes(start: Start, files: list[str], tmp_path: Path) -> None:
    old = write_pair(tmp_path)
    webhook = start(*files)
    assert decoded(webhook.review(old.ca, review(pod(annotations=share()))))
    standing = webhook.connect(old.ca)

    new = write_pair(tmp_path)
    wait_for(lambda: "new certificates are in use" in webhook.said())
    assert decoded(webhook.review(new.ca, review(pod(annotations=share()))))
    with pytest.raises(ssl.SSLCertVerificationError):
        webhook.review(old.ca, review(pod()))
    standing.request("POST", "/mutate", review(pod()))
    assert standing.getresponse().status == 200, "connections that stand go on"
    standing.close()

    (tmp_path / "tls.crt").write_text("no certificate")
    wait_for(lambda: "not a certificate in PEM form" in webhook.said())
    assert webhook.review(new.ca, review(pod()))["allowed"] is True, "what was in use stays"
    assert "Traceback" not in webhook.said()


def test_a_certificate_and_a_key_that_do_not_belong_together(start: Start, files: list[str], tmp_path: Path) -> None:
    write_pair(tmp_path)
    (tmp_path / "tls.key").write_bytes(certificates.make(NAMES).key)
    webhook = start(*files)
    assert webhook.process.wait(60) == 2
    assert "tls.crt: the key is not that of the certificate" in webhook.said()
    assert "Traceback" not in webhook.said()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give --cert and --key, or --self-signed"),
        (["--cert=x"], "give --cert and --key, or --self-signed"),
        (["--cert=x", "--key=y", "--self-signed"], "give --cert and --key, or --self-signed"),
        (["--cert=/no/such.crt", "--key=/no/such.key"], "/no/such.crt: cannot be read: no such file or directory"),
        (["--cert=x", "--key=y", "--fail=maybe"], "'maybe' is not open or closed"),
        (["--self-signed"], "this is not a pod with a service account; give the API server's address"),
        (["--self-signed", "--api-server=10.0.0.1"], "'10.0.0.1' is not an address such as https://10.0.0.1:443"),
    ],
)
def test_wrong_settings_are_one_sentence(call: Any, options: list[str], sentence: str) -> None:
    code, out, err = call("kube", "webhook", *options)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_who_may_ask(start: Start, files: list[str], tmp_path: Path) -> None:
    found = write_pair(tmp_path)
    token = tmp_path / "token"
    token.write_text("a-secret-token\n")
    webhook = start(*files, f"--token-file={token}")
    body = review(pod(annotations=share()))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "a-secret-token"}):
        status, text = webhook.post(found.ca, body, **headers)
        assert (status, text) == (401, b"the token of this caller is not valid\n")
    assert webhook.post(found.ca, body, Authorization="Bearer a-secret-token")[0] == 200


def test_callers_without_the_right_certificate(start: Start, files: list[str], tmp_path: Path) -> None:
    found = write_pair(tmp_path)
    webhook = start(*files, f"--client-ca={tmp_path}/ca.crt")
    body = review(pod())
    with pytest.raises((ssl.SSLError, ConnectionError)):
        webhook.post(found.ca, body)
    connection = webhook.connect(found.ca, client=(tmp_path / "tls.crt", tmp_path / "tls.key"))

    def ask() -> None:
        connection.request("POST", "/mutate", body)
        connection.getresponse()

    with pytest.raises((ssl.SSLError, ConnectionError)):  # a server certificate is not valid for a client
        ask()


def test_bodies_that_are_too_large_and_other_paths(start: Start, files: list[str], tmp_path: Path) -> None:
    found = write_pair(tmp_path)
    webhook = start(*files)
    connection = webhook.connect(found.ca)
    connection.putrequest("POST", "/mutate")
    connection.putheader("Content-Length", str(MAX_BODY_BYTES + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (413, b"the review is larger than 8 MiB\n")
    connection.close()

    def parts() -> Iterator[bytes]:
        for _ in range(9):
            yield b" " * (1 << 20)

    connection = webhook.connect(found.ca)
    try:
        connection.request("POST", "/mutate", parts(), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
        assert connection.getresponse().status == 413, "nor in pieces whose sum nobody declared"
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server closed the connection before the last part was sent
    connection = webhook.connect(found.ca)
    for method, path, status in (("GET", "/mutate", 405), ("GET", "/nothing", 404), ("GET", "/healthz", 200)):
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    connection.close()
    assert webhook.review(found.ca, review(pod()))["allowed"] is True


def test_metrics(start: Start, files: list[str], tmp_path: Path) -> None:
    found = write_pair(tmp_path)
    with reserved_ports() as (port,):
        webhook = start(*files, f"--metrics-port={port}")
    webhook.review(found.ca, review(pod(annotations=share())))
    webhook.review(found.ca, review(pod(annotations=share("130%"))))
    webhook.post(found.ca, b"no JSON")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    for outcome, count in (("injected", 1), ("denied", 1), ("rejected", 1), ("failed", 0)):
        assert f'cotenant_webhook_reviews_total{{outcome="{outcome}"}} {count}' in text
    assert "cotenant_webhook_review_seconds_count 3" in text
    if shutil.which("promtool"):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


# -- self-signed -------------------------------------------------------------------------------------------------------

WHERE = bootstrap.Bootstrap("cotenant-system", "cotenant-webhook", "cotenant-webhook-tls", "cotenant")
CONFIGURATION = f"{bootstrap.CONFIGURATIONS}/cotenant"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    server.put(
        CONFIGURATION,
        {"metadata": {"name": "cotenant"}, "webhooks": [{"name": "a", "clientConfig": {}}, {"name": "b"}]},
    )
    yield server
    server.close()


def bundles(api: ApiServer) -> list[bytes]:
    webhooks = api.store[CONFIGURATION]["webhooks"]
    return [base64.b64decode(one.get("clientConfig", {}).get("caBundle", "")) for one in webhooks]


def test_self_signed_certificates_are_kept_trusted_and_used(start: Start, api: ApiServer) -> None:
    webhook = start("--self-signed", f"--api-server={api.url}")
    secret = api.store[WHERE.secret_path]
    assert secret["type"] == "kubernetes.io/tls"
    ca = base64.b64decode(secret["data"]["ca.crt"])
    assert bundles(api) == [ca, ca]
    assert decoded(webhook.review(ca, review(pod(annotations=share()))))
    second = start("--self-signed", f"--api-server={api.url}")
    assert second.review(ca, review(pod()))["allowed"] is True, "another replica takes the same"


def test_replicas_that_start_together_agree(api: ApiServer) -> None:
    import threading

    found: list[certificates.Certificates] = []
    threads = [
        threading.Thread(target=lambda: found.append(bootstrap.ensure(KubeApi(api.url), WHERE))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({one.certificate for one in found}) == 1


@pytest.mark.parametrize(
    ("days", "names", "fault"),
    [
        (20, WHERE.dns_names, "the certificates expire at"),
        (300, ["another.svc"], "the certificate is not for cotenant-webhook"),
        (300, WHERE.dns_names, ""),
    ],
)
def test_certificates_are_renewed_in_time(api: ApiServer, days: int, names: list[str], fault: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    old = certificates.make(names, now, days)
    assert certificates.fault(old, WHERE.dns_names).startswith(fault)
    data = {key: base64.b64encode(value).decode() for key, value in old.as_secret_data().items()}
    api.put(WHERE.secret_path, {"metadata": {"name": WHERE.secret}, "data": data})
    found = bootstrap.ensure(KubeApi(api.url), WHERE)
    assert (found == old) == (not fault)
    assert certificates.fault(found, WHERE.dns_names) == ""
    assert found.ca in bundles(api)[0]
    if fault:
        assert old.ca in bundles(api)[0], "a replica that still has the old certificate is believed"


@pytest.mark.parametrize("data", [None, {}, {"ca.crt": "!", "tls.crt": "!", "tls.key": "!"}, {"tls.crt": "YQ=="}])
def test_a_secret_without_certificates_is_filled(api: ApiServer, data: dict[str, str] | None) -> None:
    api.put(WHERE.secret_path, {"metadata": {"name": WHERE.secret}, "data": data})
    found = bootstrap.ensure(KubeApi(api.url), WHERE)
    assert base64.b64decode(api.store[WHERE.secret_path]["data"]["tls.crt"]) == found.certificate


def test_pairs_that_are_none() -> None:
    one, two = certificates.make(NAMES), certificates.make(NAMES)
    with pytest.raises(InputError, match="not a certificate in PEM form"):
        certificates.check_pair(b"", one.key, "f")
    with pytest.raises(InputError, match="the key is not a private key"):
        certificates.check_pair(one.certificate, b"", "f")
    mixed = certificates.Certificates(two.ca, one.certificate, one.key)
    assert certificates.fault(mixed, NAMES) == "the certificate is not signed by the CA that is stored with it"
    swapped = certificates.Certificates(one.ca, one.certificate, two.key)
    assert certificates.fault(swapped, NAMES) == "the key is not that of the certificate"


# -- the API's client --------------------------------------------------------------------------------------------------


def test_a_token_that_is_not_valid(tmp_path: Path) -> None:
    server = ApiServer(token="right")
    token = tmp_path / "token"
    token.write_text("wrong")
    api = KubeApi(server.url, token)
    with pytest.raises(WorkError, match=r"does not accept the token \(.*/token\)$"):
        api.get("/api/v1/pods")
    token.write_text("right\n")
    assert api.get("/api/v1/pods")["items"] == [], "the token is read again each time"
    token.unlink()
    with pytest.raises(WorkError, match="the token cannot be read: No such file"):
        api.get("/api/v1/pods")
    server.close()


def test_an_api_server_with_a_wrong_certificate(tmp_path: Path) -> None:
    found = write_pair(tmp_path, certificates.make(["127.0.0.1"]))
    server = ApiServer(tls=(tmp_path / "tls.crt", tmp_path / "tls.key"))
    (tmp_path / "other.crt").write_bytes(certificates.make(["x"]).ca)
    with pytest.raises(WorkError, match="its certificate is not valid"):
        KubeApi(server.url, None, tmp_path / "other.crt").get("/api/v1/pods")
    with pytest.raises(InputError, match="not a CA certificate"):
        KubeApi(server.url, None, tmp_path / "none.crt")
    server.close()
    with pytest.raises(WorkError, match="does not answer: Connection refused"):
        KubeApi(server.url.replace("https", "http"), None).get("/api/v1/pods")
    assert found
