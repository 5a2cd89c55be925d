"""A client of the HTTP/2 port that sends raw frames."""

from __future__ import annotations

import socket
import struct

import numpy as np
from server_thread import Running

from cotenant.bench.gateway_grpc import PREFACE, SETTINGS, frame
from cotenant.serving.protocol.messages import classes


class Peer:
    """A client that sends any frames, valid or not."""

    def __init__(self, server: Running, settings_frame: bytes = b"", *, greet: bool = True) -> None:
        host, port = server.grpc_address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(60)
        self.buffer = b""
        if greet:
            self.socket.sendall(PREFACE + (settings_frame or frame(SETTINGS, 0, 0, b"")))

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def read(self) -> tuple[int, int, int, bytes] | None:
        """(kind, flags, stream, payload) of the next frame, None at the end."""
        while True:
            if len(self.buffer) >= 9:
                size = int.from_bytes(self.buffer[:3], "big")
                if len(self.buffer) >= 9 + size:
                    kind, flags = self.buffer[3], self.buffer[4]
                    stream = int.from_bytes(self.buffer[5:9], "big")
                    payload, self.buffer = self.buffer[9 : 9 + size], self.buffer[9 + size :]
                    return kind, flags, stream, payload
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.buffer += data

    def until(self, wanted: int) -> tuple[int, int, int, bytes]:
        """The next frame of a kind."""
        while True:
            found = self.read()
            assert found is not None, "the connection has ended"
            if found[0] == wanted:
                return found


def message(values: np.ndarray) -> bytes:
    made = classes()["ModelInferRequest"](model_name="a")
    made.inputs.add(name="INPUT", datatype="FP32", shape=list(values.shape))
    made.raw_input_contents.append(values.astype(np.float32).tobytes())
    data: bytes = made.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data
