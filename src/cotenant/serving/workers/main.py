"""The worker process: `python -m cotenant.serving.workers.main SOCKET_FD ARENA_FD`, started by local.py.

Messages are packets on a Unix socket: the spec (pickled) and batches come in, load results and finished batches go out.
Tensors are in the arena. One thread, one batch at a time; the process ends with its socket.
"""

from __future__ import annotations

import ctypes
import logging
import marshal
import os
import pickle
import resource
import signal
import socket
import sys
import time
from typing import Any

import numpy as np

from cotenant.core import logs
from cotenant.serving.protocol.tensors import DTYPES, ModelInfo, Tensor
from cotenant.serving.worker import Job, LoadError, Result, WorkerSpec
from cotenant.serving.workers.arena import Arena, aligned
from cotenant.serving.workers.colocation import Turnstile, turnstile
from cotenant.serving.workers.engine import Engine, said

LOG = logging.getLogger("cotenant.serving.workers.main")  # under -m, __name__ is "__main__"

MOST_MESSAGE = 1 << 20
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
DEVICE_LOST = 75  # exit code of a worker whose GPU is lost


def settle(cores: tuple[int, ...]) -> None:
    """Set up the process. It ends with the gateway, has precise timers, writes no core files, runs on the cores of its
    share, and ignores SIGINT and SIGTERM.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # terminals and supervisors often send these signals to the whole process group, but a batch that runs must be
    # finished, so they are ignored
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if cores:
        os.sched_setaffinity(0, cores)


class Loop:
    """The loop of the worker process: reads batches from the socket, runs them, and sends the results."""

    def __init__(
        self, channel: socket.socket, arena: Arena, engine: Engine, infos: dict[str, ModelInfo],
        turnstile: Turnstile | None = None,
    ) -> None:  # fmt: skip
        self.channel, self.arena, self.engine, self.infos = channel, arena, engine, infos
        self.turnstile = turnstile

    def serve(self) -> None:
        """Run batches until the gateway sends `stop` or closes the socket."""
        while True:
            data = self.channel.recv(MOST_MESSAGE)
            if not data:
                return
            message = marshal.loads(data)
            if message[0] == "stop":
                return
            if message[0] == "resize":
                self._resize(message[1])
                continue
            if self.turnstile is not None:
                self.turnstile.enter(message[2])
            answer = self._run(*message[1:])
            if self.turnstile is not None:
                self.turnstile.leave(message[2])
            self.channel.send(marshal.dumps(answer))

    def _resize(self, fraction: float) -> None:
        try:
            why = "" if self.engine.resize(fraction) else "its backend needs a new process for another share"
            self.channel.send(marshal.dumps(("resized", fraction, why)))
        except Exception as error:  # the share cannot be changed, so the worker keeps its old share
            self.channel.send(marshal.dumps(("resized", fraction, said(error))))

    def _run(
        self, number: int, service: str, count: int, stacked: bool, layout: list[Any], end: int, submitted_s: float,
        expected_ms: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.arena.reach(end)
        if stacked:
            began = time.monotonic()
            inputs = []
            for spec, (offset, shape) in zip(self.infos[service].inputs, layout, strict=True):
                size = count
                for dimension in shape:
                    size *= dimension
                flat = np.frombuffer(self.arena.map, DTYPES[spec.datatype], size, offset)
                inputs.append(flat.reshape((count, *shape)))
            try:
                outputs = self.engine.run_stacked(service, inputs, count, submitted_s, expected_ms)
                written, size = self._write(self.infos[service], outputs, end)
                return ("done", number, (time.monotonic() - began) * 1e3, True, written, size)
            except Exception:
                pass  # one item of the batch may have caused the failure, so the items are run one by one below
        units = self._units(service, count, stacked, layout)
        result = self.engine.run(Job(number, service, units, expected_ms, submitted_s))
        if any(isinstance(answer, str) for answer in result.answers) and self.engine.lost():
            LOG.error("the device is lost: %s", result.answers[0])
            os._exit(DEVICE_LOST)  # the gateway then sends the batch to another worker, and starts a new one
        return self._answer(number, result, end)

    def _write(self, info: ModelInfo, outputs: list[np.ndarray], end: int) -> tuple[list[Any], int]:
        """Write outputs into the arena, behind the inputs. Returns [(offset, shape of one item)] and the end offset."""
        layout, at = [], aligned(end)
        for spec, array in zip(info.outputs, outputs, strict=True):
            if spec.datatype == "BYTES" or array.dtype != DTYPES[spec.datatype]:
                raise TypeError(f"the output {spec.name} cannot be copied as an array of {spec.datatype}")
            self.arena.reach(at + array.nbytes)
            target = np.frombuffer(self.arena.map, array.dtype, array.size, at)
            target.reshape(array.shape)[...] = array
            layout.append((at, array.shape[1:]))
            at = aligned(at + array.nbytes)
        return layout, at

    def _units(self, service: str, count: int, stacked: bool, layout: list[Any]) -> list[list[Tensor]]:
        specs = self.infos[service].inputs
        units: list[list[Tensor]] = []
        for i in range(count):
            unit = []
            for k, spec in enumerate(specs):
                if stacked:
                    offset, shape = layout[k]
                    size = DTYPES[spec.datatype].itemsize * int(np.prod(shape))
                    offset += i * size
                else:
                    shape, offset, size = layout[i][k]
                unit.append(Tensor(spec.name, spec.datatype, shape, self.arena.view[offset : offset + size]))
            units.append(unit)
        return units

    def _answer(self, number: int, result: Result, end: int) -> tuple[Any, ...]:
        layout: list[Any] = []
        at = aligned(end)
        for answer in result.answers:
            if isinstance(answer, str):
                layout.append(answer)
                continue
            places = []
            for tensor in answer:
                self.arena.reach(at + len(tensor.data))
                self.arena.view[at : at + len(tensor.data)] = tensor.data
                places.append(((tensor.name, tensor.datatype, tensor.shape), at, len(tensor.data)))
                at = aligned(at + len(tensor.data))
            layout.append(places)
        return ("done", number, result.executed_ms, False, layout, at)


def main() -> int:
    """Load the models, then serve batches."""
    logs.configure()
    channel = socket.socket(fileno=int(sys.argv[1]))
    arena = Arena(int(sys.argv[2]))
    spec, cores = pickle.loads(channel.recv(MOST_MESSAGE))
    assert isinstance(spec, WorkerSpec)
    settle(cores)
    engine = Engine(spec, cores)
    try:
        infos = engine.load(lambda service: void(channel.send(marshal.dumps(("loading", service)))))
    except LoadError as error:
        channel.send(marshal.dumps(("failed", error.service, error.why)))
        return 1
    channel.send(b"\x00" + pickle.dumps(infos))
    try:
        Loop(channel, arena, engine, infos, turnstile(spec.models, engine.resize)).serve()
    except (ConnectionError, BrokenPipeError):
        return 0  # the gateway has ended
    engine.close()
    return 0


def void(sent: int) -> None:
    """Ignore the number of bytes that `send` returns, for a lambda that must return None."""


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # all requests have been answered, so the slow shutdown of the interpreter is skipped
