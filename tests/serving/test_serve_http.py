"""The HTTP door: the protocol's forms, wrong requests, limits, tokens, TLS."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve_setup import ask, deployment, infer, plan, tensor
from server_thread import Running, running

from cotenant.serving.backends.timed import offset


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("http")
    version = folder / "models" / "typed" / "3"
    version.mkdir(parents=True)
    inputs = [{"name": "N", "datatype": "INT8", "shape": [2]}, {"name": "S", "datatype": "BYTES", "shape": [1]}]
    (version.parent / "config.pbtxt").write_text("max_batch_size: 5\n")
    (version / "timed.json").write_text(json.dumps({"inputs": inputs, "output": "M", "latency_ms": {"1": 1.0}}))
    services = deployment(
        [{"name": "a", "slo_ms": 60_000}, {"name": "b", "model": str(folder / "models" / "typed"), "slo_ms": 60_000}],
        folder, listen={"max_body": "64KiB"},
    )  # fmt: skip
    with running(services, plan=plan({"a": 4, "b": 4})) as found:
        yield found


def test_lists_in_lists_out(server: Running) -> None:
    status, headers, body = ask(
        server.http_url, "/v2/models/a/infer",
        {"id": "42", "inputs": [{"name": "INPUT", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [3, -4]]}]},
    )  # fmt: skip
    assert status == 200
    add = offset("a")
    assert body == {
        "model_name": "a",
        "model_version": "1",
        "id": "42",
        "outputs": [
            {"name": "OUTPUT", "datatype": "FP32", "shape": [2, 2], "data": [1 + add, 2.5 + add, 3 + add, add - 4]}
        ],
    }
    assert float(headers["cotenant-executed-ms"]) > 0
    assert int(headers["cotenant-batch"]) in (1, 2)


def test_binary_tensors_and_chosen_outputs(server: Running) -> None:
    x = np.array([[1, -2]], np.float32)
    head = {
        "inputs": [{"name": "INPUT", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}],
        "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(head).encode()
    request = urllib.request.Request(
        server.http_url + "/v2/models/a/versions/1/infer", data=text + x.tobytes(),
        headers={"Inference-Header-Content-Length": str(len(text))},
    )  # fmt: skip
    with urllib.request.urlopen(request) as answer:
        length = int(answer.headers["inference-header-content-length"])
        data = answer.read()
    assert json.loads(data[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    np.testing.assert_array_equal(np.frombuffer(data[length:], np.float32), x[0] + np.float32(offset("a")))


def test_a_compressed_body(server: Running) -> None:
    body = gzip.compress(json.dumps({"inputs": [tensor([1.0, 2.0])]}).encode())
    assert ask(server.http_url, "/v2/models/a/infer", body, headers={"content-encoding": "gzip"})[0] == 200
    bomb = gzip.compress(b" " * 10_000_000)
    assert len(bomb) < 60_000
    assert ask(server.http_url, "/v2/models/a/infer", bomb, headers={"content-encoding": "gzip"})[0] == 413
    assert ask(server.http_url, "/v2/models/a/infer", body[:-9], headers={"content-encoding": "gzip"})[0] == 400


def test_types_of_json_and_strings(server: Running) -> None:
    good = [{"name": "S", "shape": [1, 1], "datatype": "BYTES", "data": ["ä"]},
            {"name": "N", "shape": [1, 2], "datatype": "INT8", "data": [-128, 127]}]  # fmt: skip
    status, _, body = ask(server.http_url, "/v2/models/b/versions/3/infer", {"inputs": good})
    assert status == 200, body
    assert body["outputs"][0]["name"] == "M"
    assert body["outputs"][0]["datatype"] == "INT8"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"[]", "needs an object with inputs"),
        ({"inputs": []}, "inputs must be a list of tensors"),
        ({"inputs": [tensor([1.0], 1) | {"name": "WRONG"}]}, "input 'INPUT' is missing"),
        ({"inputs": [tensor([1.0], 1) | {"datatype": "FP64"}]}, "input 'INPUT' must be FP32, not FP64"),
        ({"inputs": [tensor([1.0], 1) | {"datatype": "FLOAT"}]}, "unknown data type 'FLOAT'"),
        ({"inputs": [tensor([1.0], 1) | {"shape": [1]}]}, "input 'INPUT' has shape [1]; the model takes [-1, -1]"),
        ({"inputs": [tensor([1.0], 1) | {"shape": [1, 2]}]}, "has 1 elements; its shape says 2"),
        ({"inputs": [tensor([1.0], 1) | {"shape": [1, -1]}]}, "which is not a valid size"),
        ({"inputs": [tensor([1.0], 1) | {"shape": [0, 1], "data": []}]}, "needs at least one item"),
        ({"inputs": [tensor([1.0], 1) | {"data": ["1"]}]}, "elements that are not FP32"),
        ({"inputs": [tensor([1.0], 1) | {"data": [[1, 2], [3]], "shape": [1, 3]}]}, "not a rectangular list"),
        ({"inputs": [tensor([1.0], 1), tensor([1.0], 1)]}, "takes 1 inputs"),
        ({"inputs": [tensor([1.0], 1)], "outputs": [{"name": "X"}]}, "has no output 'X'"),
        ({"inputs": [tensor([1.0] * 2000, 2000)]}, "at most 1000 items, not 2000"),
        ({"inputs": [tensor([1.0])], "parameters": {"priority": "high"}}, "priority must be an integer"),
        ({"inputs": [tensor([1.0])], "parameters": {"priority": 1.5}}, "priority must be an integer"),
        ({"inputs": [tensor([1.0])], "parameters": {"priority": True}}, "priority must be an integer"),
    ],
)
def test_what_does_not_fit_is_400_and_says_why(server: Running, body: Any, said: str) -> None:
    status, headers, answer = ask(server.http_url, "/v2/models/a/infer", body)
    assert status == 400
    assert said in answer["error"]
    assert headers["cotenant-outcome"] == "wrong"


def test_numbers_that_do_not_fit_their_type(server: Running) -> None:
    strings = {"name": "S", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]}
    wrong: list[tuple[Any, str]] = [([300, 1], "outside INT8"), ([1.5, 1], "not INT8"), ([2**70, 1], "not INT8")]
    for data, said in wrong:
        number = {"name": "N", "shape": [1, 2], "datatype": "INT8", "data": data}
        status, _, body = ask(server.http_url, "/v2/models/b/infer", {"inputs": [number, strings]})
        assert status == 400
        assert said in body["error"]
    # 1e39 is infinite as FP32
    status, _, body = ask(server.http_url, "/v2/models/a/infer", {"inputs": [tensor([1e39])]})
    assert (status, "outside FP32" in body["error"]) == (400, True)


def test_unknown_things_are_404_and_other_methods_405(server: Running) -> None:
    assert infer(server.http_url, "nobody")[0] == 404
    assert ask(server.http_url, "/v2/models/a/versions/9/infer", {"inputs": [tensor([1.0])]})[0] == 404
    assert ask(server.http_url, "/v2/models/a/versions/9")[0] == 404
    assert ask(server.http_url, "/nowhere")[0] == 404
    for verb in ("load", "unload"):
        status, headers, body = ask(server.http_url, f"/v2/repository/models/nobody/{verb}", {}, "POST")
        assert (status, headers["cotenant-outcome"]) == (404, "unknown")
        assert body == {"error": "'nobody' is not a service of this server's file"}
    status, headers, _ = ask(server.http_url, "/v2/models/a/infer")
    assert (status, headers["allow"]) == (405, "POST")


def test_the_configuration_does_not_change_with_the_plan(server: Running) -> None:
    """`a` has batches of 4 in the plan; a client that sizes its requests by the configuration must not see that."""
    assert ask(server.http_url, "/v2/models/a/config")[2]["max_batch_size"] == 8  # the largest batch of the profile
    assert ask(server.http_url, "/v2/models/b/config")[2]["max_batch_size"] == 5  # the value of its config.pbtxt


def test_bodies_over_the_limit_are_413(server: Running) -> None:
    big = json.dumps({"inputs": [tensor([0.5] * 30_000)]}).encode()
    assert len(big) > 65536
    host, port = "127.0.0.1", int(server.http_url.rsplit(":", 1)[1])
    head = b"POST /v2/models/a/infer HTTP/1.1\r\nhost: x\r\n"
    for headers, body in (
        (b"content-length: %d\r\n\r\n" % len(big), b""),
        (b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(big), big)),
    ):
        with socket.create_connection((host, port)) as client:
            client.sendall(head + headers + body)
            client.settimeout(60)
            assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_pipelined_requests_are_answered_in_their_order(server: Running) -> None:
    bodies = [json.dumps({"id": str(i), "inputs": [tensor([float(i)])]}).encode() for i in range(12)]
    stream = (
        b"".join(
            b"POST /v2/models/a/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(b), b) for b in bodies
        )
        + b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.http_url.rsplit(":", 1)[1]))) as client:
        client.sendall(stream)
        data = b"".join(iter(lambda: client.recv(65536), b""))
    found = [json.loads(part.split(b"\r\n\r\n", 1)[1])["id"] for part in data.split(b"HTTP/1.1 200 OK")[1:-1]]
    assert found == [str(i) for i in range(12)]


@pytest.mark.parametrize(
    "raw",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -4\r\n\r\n",
     b"POST / HTTP/1.1\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_http_is_refused_and_closed(server: Running, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(server.http_url.rsplit(":", 1)[1]))) as client:
        client.sendall(raw)
        client.settimeout(60)
        data = b"".join(iter(lambda: client.recv(65536), b""))
    assert data.startswith(b"HTTP/1.1 400 ")


def test_endless_headers_and_long_urls_are_refused(server: Running) -> None:
    for stream, code in (
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(150)) + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nh: " + b"x" * 40_000 + b"\r\n\r\n", b"431"),
    ):
        with socket.create_connection(("127.0.0.1", int(server.http_url.rsplit(":", 1)[1]))) as client:
            client.sendall(stream)
            client.settimeout(60)
            assert client.recv(4096).split(b" ")[1] == code


def test_metrics_status_and_plan(server: Running) -> None:
    infer(server.http_url, "a")
    text = ask(server.http_url, "/metrics")[2].decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    answered = float(lines['cotenant_server_requests_total{service="a",outcome="ok"}'])
    assert answered >= 1
    assert float(lines['cotenant_server_request_seconds_count{service="a"}']) == answered
    assert float(lines["cotenant_server_gpus_in_use"]) == 1
    state = ask(server.http_url, "/state.json")[2]
    assert [(row["key"], row["state"]) for row in state["services"]] == [("a", "ready"), ("b", "ready")]
    assert b"<html" in ask(server.http_url, "/")[2]
    with urllib.request.urlopen(server.http_url + "/events", timeout=60) as events:
        assert events.readline() == b"event: all\n"
    assert ask(server.http_url, "/cotenant/plan")[2]["gpulets"][0]["seats"][0]["batch"] == 4
    status = ask(server.http_url, "/cotenant/status")[2]
    assert [x["name"] for x in status["services"]] == ["a", "b"]


def test_pages_are_not_for_sites_that_point_a_name_here(server: Running) -> None:
    for path in ("/cotenant/status", "/cotenant/status?x", "/?x=1", "/metrics/?x"):
        assert ask(server.http_url, path, headers={"host": "evil.example"})[0] == 403, path
    assert ask(server.http_url, "/", headers={"host": "[::"})[0] == 403
    assert ask(server.http_url, "/cotenant/status", headers={"host": "localhost:1"})[0] == 200


TOKEN = "a-token-of-some-length"


def test_tokens_and_tls(tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "tokens").write_text(f"# who may ask\n{TOKEN}\n")
    listen = {"tls_certificate": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem"),
              "tokens": str(tmp_path / "tokens")}  # fmt: skip
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path, listen=listen)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    with running(services, plan=plan({"a": 8}), grpc="127.0.0.1:0") as server:
        url = server.http_url.replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusted))
        assert opener.open(url + "/v2/health/live").status == 200  # health probes need no token
        for given, code in ((None, 401), ("Bearer nope", 401), (f"Basic {TOKEN}", 401), (f"Bearer {TOKEN}", 200)):
            headers = {} if given is None else {"authorization": given}
            try:
                found = opener.open(urllib.request.Request(url + "/v2", headers=headers)).status
            except urllib.error.HTTPError as error:
                found = error.code
            assert found == code
        for path, code in (
            (f"/?token={TOKEN}", 200), (f"/state.json?token={TOKEN}", 200), ("/?token=nope", 401), ("/", 401),
            (f"/v2?token={TOKEN}", 401),  # only the address of a page may contain the token; requests must use a header
        ):  # fmt: skip
            try:
                found = opener.open(url + path).status
            except urllib.error.HTTPError as error:
                found = error.code
            assert found == code, path
        _grpc_with_token(server.grpc_address.replace("127.0.0.1", "localhost"), tmp_path)


def _grpc_with_token(address: str, folder: Path) -> None:
    import tritonclient.grpc as client
    from tritonclient.utils import InferenceServerException

    secure = client.InferenceServerClient(address, ssl=True, root_certificates=str(folder / "cert.pem"))
    assert secure.is_server_live()
    with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
        secure.get_server_metadata()
    assert secure.get_server_metadata(headers={"authorization": f"Bearer {TOKEN}"}).name == "cotenant"


def certificate(folder: Path) -> None:
    """A certificate for localhost that signs itself."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1)).add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(key, hashes.SHA256())
    )  # fmt: skip
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
