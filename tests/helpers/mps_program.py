"""A program that is a client of the stand-in for MPS, without a GPU: what it would see is what the server answers."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

WHOLE_GPU = "no server: the whole GPU, and no error"


class Program:
    """Connects as libcuda does: by the socket of its pipe folder, and without a word past it where there is none."""

    def __init__(self, environment: Mapping[str, str], *devices: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        variables = [f"{k}={v}" for k, v in environment.items() if k.startswith("CUDA_MPS_") and "DIRECTORY" not in k]
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        try:
            self.socket.connect(str(Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")) / "control"))
        except OSError:
            self.answer = WHOLE_GPU
            return
        self.socket.sendall(f"client visible={visible} {' '.join(variables)}\n".encode())
        self.answer = self.hear()
        for device in devices:
            self.socket.sendall(f"device {device}\n".encode())

    def hear(self) -> str:
        """The next line."""
        return self.socket.recv(256).decode().strip()

    @property
    def sms(self) -> int:
        """SMs that it sees."""
        return int(self.answer.split()[1])

    @property
    def memory(self) -> int:
        """Most bytes that it can have by the server; 0: no limit."""
        return int(self.answer.split()[2])

    def close(self) -> None:
        """The end of the process."""
        self.socket.close()
