"""Runs the driver's checkpoints of processes: `python -m cotenant.devices.checkpoint LIBRARY` executes one order per
line.

It is a separate process, because a driver call may take long, hang, or crash its process; the agent only talks to it.
Orders and answers are JSON objects, see `Driver.run`. `Checkpointer` is the agent's side.
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
# the GPUs that a map may name, with the two that are exchanged: all of the machine; the two; the one alone
MAPS = ("all GPUs", "two GPUs", "one GPU")
OLDEST_DRIVER = 12080  # first driver version with these calls (release 570)
# meanings of the driver's error codes for these calls
MEANINGS = {
    1: "the driver knows no such CUDA process, or one that it cannot handle",
    2: "there was not enough memory",
    3: "the driver is not there",
    201: "the process has no CUDA context",
    304: "the operating system refused it: the agent must be the process's user, or root",
    401: "the process is not in a state that allows it",
    500: "this driver cannot checkpoint processes",
    600: "its GPU work did not end in time",
    800: "the driver does not permit it",
    801: "the driver does not support it for this process (managed memory, IPC, MPS or MIG)",
}


class Driver:
    """The calls on a loaded driver library."""

    def __init__(self, library: str) -> None:
        self._cuda = ctypes.CDLL(library)
        self._ready = False

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """{"op", "pid", ...} -> {"code", "seconds"}; `state` answers {"state"}, `version` {"version"}."""
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
        """The argument structures, with the size of the largest, and zero in fields that are not given (driver API
        13.0).
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
        """Pairs (old, new) that exchange two GPUs: for every GPU of the machine, as a driver requires whose
        process sees all of them, or for fewer.
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
    """Execute orders from standard input until it is closed."""
    serve_pipe(lambda: Driver(sys.argv[1]).run)
    return 0


class CheckpointError(Exception):
    """A call failed; the text says which and why, `code` what the driver returned (0: nothing)."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Checkpointer:
    """The agent's side: starts the process when it is needed, sends one order at a time, and restarts it when it
    hangs.
    """

    def __init__(self, library: Callable[[], Path]) -> None:
        """`library`: finds the driver at the first use."""
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
        """Execute an order. CheckpointError if the driver refuses or does not answer within `within_s`."""
        what = f"{op} of process {pid}" if pid else f"the driver's {op}"
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            silence = "the process that calls the driver has ended (the agent's log has its last words)"
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
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


if __name__ == "__main__":
    sys.exit(main())
