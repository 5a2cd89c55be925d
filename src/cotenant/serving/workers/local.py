"""Workers as processes of this machine. Each has a share, a socket for messages, and shared memory for tensors."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.background import spawn
from cotenant.core.errors import InputError, WorkError
from cotenant.serving.protocol.tensors import DTYPES, ModelInfo, Tensor
from cotenant.serving.worker import Job, LoadError, Result, UnavailableError, Worker, WorkerListener, WorkerSpec
from cotenant.serving.workers.arena import Arena, aligned
from cotenant.serving.workers.main import MOST_MESSAGE

if TYPE_CHECKING:
    from cotenant.serving.workers.colocation import Colocation
    from cotenant.serving.workers.devices import Devices

LOAD_LIMIT_S = 300.0
REAP_S = 2.0
RESIZE_WITHIN_S = 10.0


class LocalWorker:
    """One worker process. See Worker."""

    def __init__(
        self, spec: WorkerSpec, listener: WorkerListener, cores: tuple[int, ...], environment: Mapping[str, str],
        load_limit_s: float,
    ) -> None:  # fmt: skip
        self.spec, self.cores = spec, cores
        self.pid: int | None = None
        # computes further environment variables for the worker; called in a thread, since it may be slow
        self.prepare: Callable[[], Mapping[str, str]] | None = None
        self.on_start: Callable[[int], None] | None = None  # called in a thread, since it may be slow
        self.on_submit: Callable[[str], None] = lambda service: None
        self._listener, self._environment, self._limit_s = listener, environment, load_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._arena: Arena | None = None
        self._job: Job | None = None
        self._infos: dict[str, ModelInfo] = {}
        self._loading = ""
        self._ready: asyncio.Future[dict[str, ModelInfo]] | None = None
        self._gone: asyncio.Event = asyncio.Event()
        self._stopping = False
        self._resized: asyncio.Future[str] | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def ended(self) -> bool:
        """Whether the worker's process has ended."""
        return self._gone.is_set()

    async def start(self) -> dict[str, ModelInfo]:
        loop = asyncio.get_running_loop()
        if self.prepare is not None:
            try:
                self._environment = {**self._environment, **await _elsewhere(self.prepare)}
            except (UnavailableError, InputError):
                self._gone.set()
                raise
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_MESSAGE)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_MESSAGE)
        self._channel = ours
        self._arena = Arena.create("worker")
        numbers = (theirs.fileno(), self._arena.fd)
        with theirs:
            # The worker is started from the loop's own thread, because it dies together with the thread that started it
            # (see main.settle). Its output goes to standard error, so that it does not mix with the gateway's standard
            # output.
            prints = sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cotenant.serving.workers.main", *map(str, numbers)],
                pass_fds=numbers, env=os.environ | self._environment, stdin=subprocess.DEVNULL, stdout=prints,
            )  # fmt: skip
        self.pid = self._process.pid
        ours.setblocking(False)
        loop.add_reader(ours.fileno(), self._readable)
        try:
            if self.on_start is not None:
                await _elsewhere(self.on_start, self.pid)
            # if the process has ended, the thread that reads the socket notices that
            with contextlib.suppress(OSError):
                ours.send(pickle.dumps((self.spec, self.cores)))
            return await asyncio.wait_for(self._ready, self._limit_s)
        except (UnavailableError, InputError):
            self._stopping = True
            self._ready.cancel()
            self.kill()
            await self._gone.wait()
            raise
        except TimeoutError:
            self._stopping = True
            self.kill()
            await self._gone.wait()
            raise LoadError(self._loading, f"loading took longer than {self._limit_s:g} s") from None
        except asyncio.CancelledError:
            self._stopping = True
            self.kill()
            raise

    def submit(self, job: Job) -> None:
        """Run a job (see Worker). Inputs are written into the arena, stacked if all items have the same shape."""
        assert self._channel is not None
        assert self._arena is not None
        self._job = job
        units, count = job.units, len(job.units)
        first = units[0]
        stacked = all(t.datatype != "BYTES" for t in first) and (count == 1 or _same_shapes(units))
        layout: list[Any]
        if stacked:
            layout, at = [], 0
            for tensor in first:
                layout.append((at, tensor.shape))
                at = aligned(at + count * len(tensor.data))
        else:
            layout, at = _separate(units)
        self._arena.reach(at)
        view = self._arena.view
        if stacked:
            for k, (offset, _) in enumerate(layout):
                for unit in units:
                    data = unit[k].data
                    end = offset + len(data)
                    view[offset:end] = data
                    offset = end
        else:
            for places, unit in zip(layout, units, strict=True):
                for (_, offset, size), tensor in zip(places, unit, strict=True):
                    view[offset : offset + size] = tensor.data
        job.submitted_s = time.monotonic()
        what = ("run", job.number, job.service, count, stacked, layout, at, job.submitted_s, job.expected_ms)
        message = marshal.dumps(what)
        self.on_submit(job.service)
        with contextlib.suppress(OSError):  # if the process has ended, the thread that reads the socket notices that
            self._channel.send(message)

    def _readable(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(MOST_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._closed()
            return
        if data[0] == 0:
            self._infos = pickle.loads(data[1:])
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(self._infos)
            return
        message = marshal.loads(data)
        if message[0] == "done":
            job, self._job = self._job, None
            if job is not None and job.number == message[1]:
                self._listener.finished(self, job, self._result(job, *message[2:]))
        elif message[0] == "loading":
            self._loading = message[1]
        elif message[0] == "failed":
            self._stopping = True
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(LoadError(message[1], message[2]))
        elif message[0] == "resized" and self._resized is not None and not self._resized.done():
            self._resized.set_result(message[2])

    def _result(self, job: Job, executed_ms: float, stacked: bool, layout: list[Any], end: int) -> Result:
        """Copy the answers out of the arena, which the next batch overwrites."""
        assert self._arena is not None
        self._arena.reach(end)
        view = self._arena.view
        answers: list[list[Tensor] | str] = []
        if not stacked:
            for places in layout:
                if isinstance(places, str):
                    answers.append(places)
                    continue
                answers.append([Tensor(n, d, s, bytes(view[at : at + size])) for (n, d, s), at, size in places])
            return Result(executed_ms, answers)
        count = len(job.units)
        specs = self._infos[job.service].outputs
        sizes = []
        for spec, (_, shape) in zip(specs, layout, strict=True):
            size = DTYPES[spec.datatype].itemsize
            for dimension in shape:
                size *= dimension
            sizes.append(size)
        for i in range(count):
            answers.append([
                Tensor(spec.name, spec.datatype, shape, bytes(view[at + i * size : at + (i + 1) * size]))
                for spec, (at, shape), size in zip(specs, layout, sizes, strict=True)
            ])  # fmt: skip
        return Result(executed_ms, answers)

    def _closed(self) -> None:
        """Called when the socket to the worker was closed. Waits for the worker's process to end, and reports its end.
        """
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel.fileno())
        self._channel.close()
        spawn(self._background, self._reap())

    async def _reap(self) -> None:
        process = self._process
        assert process is not None
        await _ended(process, REAP_S)
        why = _how(process.returncode)
        if self._arena is not None:
            self._arena.close()
        self._gone.set()
        if self._ready is not None and not self._ready.done():
            self._stopping = True
            self._ready.set_exception(LoadError(self._loading, f"the worker {why} while it loaded"))
        if not self._stopping:
            self._listener.died(self, why)

    async def resize(self, fraction: float) -> str:
        """Ask the worker to use another share of the GPU from the next batch on. Returns "", or why it does not: for
        example, because the worker has just ended, or runs a long batch and does not answer in time.
        """
        assert self._channel is not None
        self._resized = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(marshal.dumps(("resize", fraction)))
            return await asyncio.wait_for(self._resized, RESIZE_WITHIN_S)
        except TimeoutError:
            return f"the worker did not answer within {RESIZE_WITHIN_S:g} s"
        except OSError:
            return "the worker has ended"

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        if self._process is None or self._gone.is_set():
            return
        with contextlib.suppress(OSError):
            assert self._channel is not None
            self._channel.send(marshal.dumps(("stop",)))
        try:
            await asyncio.wait_for(self._gone.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._gone.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)


async def _elsewhere(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run `call`, which calls the agent, in a thread, since an agent that hangs must not block the gateway. Raises
    UnavailableError if the agent cannot be reached or reports a failure, InputError if it rejects a setting.
    """
    try:
        return await asyncio.to_thread(call, *arguments)
    except (WorkError, OSError) as error:
        raise UnavailableError(str(error)) from None


def _same_shapes(units: Sequence[Sequence[Tensor]]) -> bool:
    shapes = [t.shape for t in units[0]]
    return all(t.shape == shape for unit in units for t, shape in zip(unit, shapes, strict=True))


def _separate(units: Sequence[Sequence[Tensor]]) -> tuple[list[Any], int]:
    layout, at = [], 0
    for unit in units:
        places = []
        for tensor in unit:
            places.append((tensor.shape, at, len(tensor.data)))
            at = aligned(at + len(tensor.data))
        layout.append(places)
    return layout, at


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


async def _ended(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait until a process has ended; kill it after `limit_s`."""
    end = time.monotonic() + limit_s
    pause = 0.001
    while process.poll() is None:
        if time.monotonic() > end:
            process.send_signal(signal.SIGKILL)
        await asyncio.sleep(pause)
        pause = min(0.05, pause * 2)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


class LocalWorkers:
    """A WorkerFactory of processes with a share each: CPU cores, or a GPU with enforcement of its fraction."""

    def __init__(
        self, mechanism: str, gpus: int, *, timed: bool = False, load_limit_s: float = LOAD_LIMIT_S,
        colocation: Colocation | None = None,
    ) -> None:  # fmt: skip
        """`timed`: all models only sleep, so that no device is needed. `colocation`, if given, assigns the GPUs."""
        self._colocation = colocation
        self._devices: Devices | Colocation | None = colocation
        if colocation is None and mechanisms.find(mechanism).capabilities.needs_gpu and not timed:
            from cotenant.serving.workers.devices import Devices

            self._devices = Devices(mechanism, gpus)
        self.mechanism, self.count, self.load_limit_s = mechanism, gpus, load_limit_s
        self._cores = sorted(os.sched_getaffinity(0))
        self._made: list[LocalWorker] = []

    def gpus(self) -> Sequence[int] | None:
        return None

    def create(self, spec: WorkerSpec, listener: WorkerListener) -> Worker:
        needs_gpu = mechanisms.find(spec.mechanism).capabilities.needs_gpu
        cores = () if needs_gpu else self._cores_for(spec)
        environment = {"OMP_NUM_THREADS": str(max(1, len(cores)))}
        if self._devices is not None and self._colocation is None:
            environment.update(self._devices.environment(spec))
        worker = LocalWorker(spec, listener, cores, environment, self.load_limit_s)
        if self._colocation is not None:
            worker.prepare = partial(self._colocation.environment, spec)
            worker.on_start = partial(self._colocation.started, spec)
            worker.on_submit = partial(self._colocation.coming, spec)
        for ended in [w for w in self._made if w.ended]:
            self._made.remove(ended)
            if self._devices is not None:
                self._devices.released(ended.spec)
        self._made.append(worker)
        return worker

    def cores_of_gpu(self, gpu: int) -> list[int]:
        """The CPU cores that stand in for a GPU: an equal part of this machine's cores."""
        per = max(1, len(self._cores) // self.count)
        first = (gpu * per) % len(self._cores)
        return [self._cores[(first + i) % len(self._cores)] for i in range(per)]

    def _cores_for(self, spec: WorkerSpec) -> tuple[int, ...]:
        """The whole cores on which a worker runs; cores with the fewest workers are chosen first."""
        mine = self.cores_of_gpu(spec.gpu)
        wanted = max(1, round(spec.fraction * len(mine)))
        load = {core: sum(core in w.cores for w in self._made if not w.ended) for core in mine}
        return tuple(sorted(sorted(mine, key=lambda core: (load[core], core))[:wanted]))

    async def close(self) -> None:
        if self._devices is not None:
            self._devices.close()
