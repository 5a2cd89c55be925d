"""A program that connects to the stand-in for MPS, without a GPU. It sees what the server answers."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

WHOLE_GPU = "no server: the whole GPU, and no error"


class Program:
    """Connects as libcuda does: through the socket in its pipe folder. If there is no socket, it runs without MPS."""

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
        """Read the next line of the answer."""
        return self.socket.recv(256).decode().strip()

    @property
    def sms(self) -> int:
        """Number of SMs that the program sees."""
        return int(self.answer.split()[1])

    @property
    def memory(self) -> int:
        """Memory limit that the server sets, in bytes; 0: no limit."""
        return int(self.answer.split()[2])

    def close(self) -> None:
        """Disconnect, as at the end of the process."""
        self.socket.close()
