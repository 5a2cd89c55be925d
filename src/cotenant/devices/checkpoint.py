"""Checkpoints and restores processes by the CUDA driver: `python -m cotenant.devices.checkpoint LIBRARY` executes one
order per line of its input.

This module runs as a process of its own, because a call of the driver may take long, hang, or crash the process. Orders
and answers are JSON objects, see `Driver.run`. `Checkpointer` is the agent's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.core.lines import encode, serve_pipe

STATES = {0: "running", 1: "locked", 2: "checkpointed", 3: "failed"}
CALLS = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
INVALID_VALUE = 1
# For a restore onto another GPU, the driver needs a map: pairs of a GPU and the GPU that takes its place. The process's
# GPU and the target GPU exchange their places. For some processes the map must have all GPUs of the machine (the others
# keep their places), for other processes only these two, or only the pair from the process's GPU to the target.
MAPS = ("all GPUs", "two GPUs", "one GPU")
OLDEST_DRIVER = 12080  # first driver version that has the calls for checkpoints (release 570)
# what the driver's error codes mean for the checkpoint calls
MEANINGS = {
    1: "the driver knows no such CUDA process, or one that it cannot handle",
    2: "there was not enough memory",
    3: "the driver is not initialized",
    201: "the process has no CUDA context",
    304: "the operating system refused the call: the agent must run as the process's user, or as root",
    401: "the process is not in a state that allows this call",
    500: "this driver cannot checkpoint processes",
    600: "the GPU work of the process did not end in time",
    800: "the driver does not permit this call",
    801: "the driver does not support this call for the process (managed memory, IPC, MPS or MIG)",
}


class Driver:
    """Calls the checkpoint functions of a driver library."""

    def __init__(self, library: str) -> None:
        self._cuda = ctypes.CDLL(library)
        self._ready = False

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute an order to the driver {"op", "pid", ...}. The answer is {"code", "seconds"}, with {"state"} for the
        op `state` and {"version"} for `version`. `code`: the driver's error code, 0 for success.
        """
        began = time.monotonic()
        code = 0
        if not self._ready:
            code = self._cuda.cuInit(0)
            self._ready = code == 0
        answer: dict[str, Any] = {}
        if code == 0 and order["op"] == "version":
            version = ctypes.c_int()
            code = self._cuda.cuDriverGetVersion(ctypes.byref(version))
            answer["version"] = version.value
        elif code == 0 and order["op"] == "state":
            state = ctypes.c_int()
            code = self._call("cuCheckpointProcessGetState", order["pid"], ctypes.byref(state))
            answer["state"] = STATES.get(state.value, "unknown") if code == 0 else "unknown"
        elif code == 0:
            code = self._call(CALLS[order["op"]], order["pid"], self._arguments(order))
        return answer | {"code": code, "seconds": time.monotonic() - began}

    def _call(self, name: str, pid: int, argument: Any) -> int:
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            return 500
        return int(function(ctypes.c_int(pid), argument))

    def _arguments(self, order: dict[str, Any]) -> Any:
        """The argument structure of a call (driver API 13.0). It has the size of the largest one, with zero in fields
        that the order does not give.
        """
        raw = (ctypes.c_uint8 * 128)()
        if order["op"] == "lock":
            ctypes.c_uint32.from_buffer(raw, 0).value = int(order.get("timeout_ms", 0))
        if order["op"] == "restore" and order.get("onto"):
            home, target = map(bytes.fromhex, order["onto"])
            pairs = self._exchanged(home, target, order.get("map", MAPS[0]))
            both = b"".join(old + new for old, new in pairs)
            self._pairs = ctypes.create_string_buffer(both, len(both))
            ctypes.c_void_p.from_buffer(raw, 0).value = ctypes.addressof(self._pairs)
            ctypes.c_uint32.from_buffer(raw, 8).value = len(pairs)
        return raw

    def _exchanged(self, home: bytes, target: bytes, named: str) -> list[tuple[bytes, bytes]]:
        """Pairs (old UUID, new UUID) that exchange two GPUs. `named`: which GPUs are listed, one of MAPS. If a process
        sees all GPUs of the machine, the driver requires all of them.
        """
        if named != MAPS[0]:
            return [(home, target), (target, home)][: 2 if named == MAPS[1] else 1]
        count = ctypes.c_int()
        self._cuda.cuDeviceGetCount(ctypes.byref(count))
        places = {home: target, target: home}
        pairs = []
        for index in range(count.value):
            uuid = (ctypes.c_uint8 * 16)()
            self._cuda.cuDeviceGetUuid_v2(uuid, index)
            pairs.append((bytes(uuid), places.get(bytes(uuid), bytes(uuid))))
        return pairs


def main() -> int:
    """Execute orders for the driver, one per line of standard input, until the input is closed."""
    serve_pipe(lambda: Driver(sys.argv[1]).run)
    return 0


class CheckpointError(Exception):
    """Raised if a call of the driver failed. `code`: the driver's error code; 0 if the driver returned none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Checkpointer:
    """The agent's side of checkpoints. The driver is called by a separate process, which executes one order at a time.
    The agent starts this process at the first order, and restarts it if it hangs.
    """

    def __init__(self, library: Callable[[], Path]) -> None:
        """`library` returns the path of the driver library; it is called at the first order."""
        self._library = library
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Id of the process that calls the driver; None if there is none."""
        return self._process.pid if self._process is not None else None

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            library = self._library()
        except WorkError as error:
            raise CheckpointError(str(error)) from None
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD")}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cotenant.devices.checkpoint",
            str(library),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"PYTHONPATH": path},
        )

    async def order(self, op: str, pid: int = 0, *, within_s: float = 60.0, **more: Any) -> dict[str, Any]:
        """Execute an order in the process that calls the driver. Raises CheckpointError if the driver refuses or does
        not answer within `within_s`.
        """
        what = f"{op} of process {pid}" if pid else f"the driver's {op}"
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            silence = "the process that calls the driver has ended (see the agent's log)"
            try:
                process.stdin.write(encode({"op": op, "pid": pid} | more))
                await process.stdin.drain()
                line = await asyncio.wait_for(process.stdout.readline(), within_s)
            except TimeoutError:
                line, silence = b"", f"no answer within {within_s:.0f} s"
            except ConnectionError:
                line = b""
            if not line:
                await self._stop(process)
                raise CheckpointError(f"{what}: {silence}")
        answer: dict[str, Any] = json.loads(line)
        if answer["code"] != 0:
            meaning = MEANINGS.get(answer["code"], "the driver gave no reason")
            raise CheckpointError(f"{what}: {meaning} (code {answer['code']})", answer["code"])
        return answer

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def close(self) -> None:
        """End the process that calls the driver."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


if __name__ == "__main__":
    sys.exit(main())
