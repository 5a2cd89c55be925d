"""The HTTP/2 door by raw frames: flow control, what a peer may not do, and garbage, on this door and the other."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from http2_peer import Peer, message
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_setup import deployment, infer, plan
from server_thread import Running, running
from waiting import wait_for

from cotenant.bench.gateway_grpc import DATA, HEADERS, PATH, PREFACE, SETTINGS, WINDOW_UPDATE, frame, headers
from cotenant.serving.backends.timed import offset
from cotenant.serving.protocol.messages import classes

PRIORITY, RST_STREAM, PING, GOAWAY, CONTINUATION, PUSH_PROMISE = 2, 3, 6, 7, 9, 5
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR, CALM = 1, 3, 6, 9, 11


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path_factory.mktemp("http2"))
    with running(services, plan=plan({"a": 8}), grpc="127.0.0.1:0") as found:
        yield found


def output(data: bytes) -> np.ndarray:
    assert data[0] == 0
    assert int.from_bytes(data[1:5], "big") == len(data) - 5
    answer = classes()["ModelInferResponse"].FromString(data[5:])
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


def test_answers_wait_for_the_client_s_windows(server: Running) -> None:
    """A client with a window of 10 bytes gets 10 bytes, and the rest as it opens it."""
    peer = Peer(server, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)))
    x = np.arange(64, dtype=np.float32).reshape(1, 64)
    peer.send(frame(HEADERS, 0x4, 1, headers()), frame(DATA, 0x1, 1, message(x)))
    got = peer.until(DATA)[3]
    assert len(got) == 10
    peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 7)))
    got += peer.until(DATA)[3]
    assert len(got) == 17
    # a larger initial window counts also for open streams
    peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100_000)))
    got += peer.until(DATA)[3]
    kind, flags, stream, block = peer.until(HEADERS)
    assert (kind, flags & 1, stream) == (HEADERS, 1, 1)
    assert b"grpc-status\x010" in block
    np.testing.assert_array_equal(output(got), x[0] + np.float32(offset("a")))


def test_split_padded_and_prioritised_frames(server: Running) -> None:
    peer = Peer(server)
    x = np.ones((1, 3), np.float32)
    block, body = headers(), message(x)
    peer.send(
        frame(HEADERS, 0x8 | 0x20, 1, b"\x02" + bytes(5) + block[:9] + b"\0\0"),
        frame(CONTINUATION, 0, 1, block[9:20]), frame(CONTINUATION, 0x4, 1, block[20:]),
        frame(DATA, 0x8, 1, b"\x03" + body[:4] + b"\0\0\0"), frame(DATA, 0, 1, body[4:20]), frame(DATA, 0, 1, b""),
        frame(DATA, 0x1, 1, body[20:]), frame(PING, 0, 0, b"12345678"), frame(0xEE, 0, 0, b"what is this"),
    )  # fmt: skip
    np.testing.assert_array_equal(output(peer.until(DATA)[3]), x[0] + np.float32(offset("a")))
    peer.send(frame(PING, 0, 0, b"abcdefgh"))
    assert peer.until(PING)[1:] == (1, 0, b"abcdefgh")


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([frame(DATA, 0, 5, b"x")], PROTOCOL_ERROR),  # data for stream 5, which is not open
        ([frame(HEADERS, 0x4, 2, headers())], PROTOCOL_ERROR),  # an even stream number
        # a stream number below the last one
        ([frame(HEADERS, 0x4, 3, headers()), frame(HEADERS, 0x4, 1, headers())], PROTOCOL_ERROR),
        # a header block that another frame interrupts
        ([frame(HEADERS, 0, 1, headers()), frame(PING, 0, 0, bytes(8))], PROTOCOL_ERROR),
        ([frame(CONTINUATION, 0x4, 1, b"")], PROTOCOL_ERROR),
        ([frame(PUSH_PROMISE, 0, 1, b"")], PROTOCOL_ERROR),
        ([frame(PING, 0, 0, b"short")], FRAME_SIZE_ERROR),
        ([b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"], FRAME_SIZE_ERROR),
        ([frame(HEADERS, 0x4, 1, b"\xff\xff\xff\xff\xff\xff\xff")], COMPRESSION_ERROR),
        ([frame(HEADERS, 0x4, 1, b"\xbf")], COMPRESSION_ERROR),  # an index that is not in the header table
        ([frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1))] * 2, FLOW_CONTROL_ERROR),
        ([frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**32 - 1))], FLOW_CONTROL_ERROR),
        ([frame(WINDOW_UPDATE, 0, 0, bytes(4))], PROTOCOL_ERROR),  # an increment of 0
        ([frame(SETTINGS, 0, 0, b"")] * 10_001, CALM),
        ([frame(SETTINGS, 1, 0, b"")] * 10_001, CALM),  # acknowledgements of settings that were never sent
        ([frame(PING, 1, 0, bytes(8))] * 10_001, CALM),
        ([frame(PRIORITY, 0, 1, bytes(5))] * 10_001, CALM),
        ([frame(0x42, 0, 1, b"")] * 10_001, CALM),  # frames of an unknown type
        # a window update for a stream that is not open
        ([frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1))] * 10_001, CALM),
        ([frame(HEADERS, 0, 1, b"\x00\x01a\x00" * 4000), *[frame(CONTINUATION, 0, 1, bytes(16_000))] * 4], CALM),
        ([frame(HEADERS, 0x8 | 0x4, 1, b"\xff" + b"x")], PROTOCOL_ERROR),  # more padding than the frame is long
    ],
)  # fmt: skip
def test_what_a_peer_may_not_do_ends_its_connection(server: Running, frames: list[bytes], code: int) -> None:
    peer = Peer(server)
    peer.send(*frames)
    payload = peer.until(GOAWAY)[3]
    assert struct.unpack_from(">I", payload, 4)[0] == code
    while peer.read() is not None:
        pass
    assert infer(server.http_url, "a")[0] == 200


def test_a_long_stream_is_not_closed_for_the_pings_of_its_client(server: Running) -> None:
    """Clients of gRPC measure the bandwidth by a ping with each answer that they get, for as long as the stream is."""
    peer = Peer(server)
    path = b"/inference.GRPCInferenceService/ModelStreamInfer"
    peer.send(frame(HEADERS, 0x4, 1, headers().replace(bytes([len(PATH)]) + PATH, bytes([len(path)]) + path)))
    for k in range(30):
        peer.send(*[frame(PING, 0, 0, bytes(8))] * 500, frame(DATA, 0, 1, message(np.full((1, 1), k, np.float32))))
        assert peer.until(DATA)[2] == 1
    peer.send(frame(DATA, 1, 1, b""))
    assert b"grpc-status\x010" in peer.until(HEADERS)[3]


def test_calls_that_are_no_grpc_or_end_early(server: Running) -> None:
    peer = Peer(server)
    get = b"\x82\x86\x84"  # GET over http for the path /
    peer.send(frame(HEADERS, 0x5, 1, get))
    assert peer.until(HEADERS)[3] == b"\x8d"  # status 404
    peer.send(frame(HEADERS, 0x5, 3, headers()))  # a call without any message
    assert b"grpc-status\x0213" in peer.until(HEADERS)[3]
    # the stream ends inside a message
    peer.send(frame(HEADERS, 0x4, 5, headers()), frame(DATA, 0x1, 5, b"\0\0\0\0\x09abc"))
    assert b"grpc-status\x0213" in peer.until(HEADERS)[3]
    # the length announced is 4 GiB
    peer.send(frame(HEADERS, 0x4, 7, headers()), frame(DATA, 0, 7, b"\0\xff\xff\xff\xff"))
    assert b"grpc-status\x018" in peer.until(HEADERS)[3]
    peer.send(frame(HEADERS, 0x4, 9, headers()), frame(DATA, 0x1, 9, struct.pack(">BI", 0, 3) + b"\xff\xff\xff"))
    assert b"grpc-status\x013" in peer.until(HEADERS)[3]
    peer.send(frame(HEADERS, 0x4, 11, headers()), frame(RST_STREAM, 0, 11, bytes(4)))
    x = np.zeros((1, 2), np.float32)
    peer.send(frame(HEADERS, 0x4, 13, headers()), frame(DATA, 0x1, 13, message(x)))
    assert output(peer.until(DATA)[3]).tolist() == [offset("a")] * 2


def test_a_message_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    """Its server is not that of the other tests, whose clients may be as slow as this machine is."""
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path, listen={"read_timeout": 5.0})
    with running(services, plan=plan({"a": 8}), grpc="127.0.0.1:0") as server:
        peer = Peer(server)
        peer.send(frame(HEADERS, 0x4, 1, headers()), frame(DATA, 0, 1, b"\0\0\0\0\x09a"))
        assert b"did not arrive in time" in peer.until(HEADERS)[3]


def test_a_client_that_gives_up_leaves_nothing_behind(server: Running) -> None:
    x = np.zeros((1, 2), np.float32)
    for _ in range(5):
        peer = Peer(server)
        for stream in range(1, 41, 2):
            peer.send(frame(HEADERS, 0x4, stream, headers()), frame(DATA, 0x1, stream, message(x)))
            peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        peer.socket.close()
    assert infer(server.http_url, "a")[0] == 200
    wait_for(lambda: not server.status()["in_flight"])


@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=300), after=st.booleans(), door=st.sampled_from(["http", "grpc"]))
def test_garbage_ends_its_own_connection_at_most(server: Running, data: bytes, after: bool, door: str) -> None:
    host, port = (server.grpc_address if door == "grpc" else server.http_url.removeprefix("http://")).rsplit(":", 1)
    with socket.create_connection((host, int(port))) as peer:
        start = PREFACE if door == "grpc" else b"POST /v2/models/a/infer HTTP/1.1\r\nhost: localhost\r\n"
        peer.sendall((start if after else b"") + data)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(60)
        while peer.recv(65536):
            pass
    assert server.status()["draining"] is False
