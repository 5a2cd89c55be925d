"""The actor on each node of a Ray cluster: starts and calls local workers by name, for the server."""

from __future__ import annotations

import asyncio

from cotenant.core.errors import InputError, WorkError
from cotenant.serving.protocol.tensors import ModelInfo
from cotenant.serving.worker import Job, LoadError, Result, Worker, WorkerSpec
from cotenant.serving.workers.local import LocalWorkers

END_S = 1.0
GONE = "has been removed"


class NodeHost:
    """The workers of a node. A life is the time from the server's connection to this node until the server lost the
    node. The server numbers the lives, and each call has the number of its life (`life`). A call of an earlier life,
    which arrives late, has no effect."""

    def __init__(self, mechanism: str, gpus: int, timed: bool, load_limit_s: float) -> None:
        self._factory = LocalWorkers(mechanism, gpus, timed=timed, load_limit_s=load_limit_s)
        self._life = 0
        self._workers: dict[str, Worker] = {}
        self._answers: dict[str, asyncio.Future[Result | str]] = {}
        self._dead: dict[str, str] = {}

    async def begin(self, life: int) -> None:
        """Start the life with number `life`, and end all workers of the previous life. Does nothing if `life` is not
        above the number of the current life."""
        if life <= self._life:
            return
        self._life = life
        workers, self._workers = list(self._workers.values()), {}
        answers, self._answers, self._dead = list(self._answers.values()), {}, {}
        # waiting calls are answered although their callers are gone, since an actor can run only a limited number of
        # calls at a time
        for answer in answers:
            if not answer.done():
                answer.set_result(GONE)
        await asyncio.gather(*(worker.stop(0.0) for worker in workers))

    async def ping(self, life: int) -> dict[str, str]:
        """Return the names of the workers that have died since the last call, each with the reason. The death of a
        worker during a batch is the result of `run` instead."""
        if life != self._life:
            return {}
        dead, self._dead = self._dead, {}
        return dead

    async def start(self, life: int, spec: WorkerSpec) -> tuple[int | None, dict[str, ModelInfo] | tuple[str, str]]:
        """Start a worker. On success, returns its process id and the facts about its models by service. On failure,
        returns None and a pair: the service whose model was at fault ("" if none was), and the reason."""
        if life != self._life:
            return None, ("", "the node was lost")
        worker = self._workers[spec.name] = self._factory.create(spec, self)
        try:
            found = await worker.start()
        except (LoadError, InputError, WorkError) as error:
            self._forget(worker)
            return None, (error.service, error.why) if isinstance(error, LoadError) else ("", str(error))
        if life != self._life:  # the node was lost in the meantime, so no later call would end this worker
            await worker.stop(0.0)
            return None, ("", "the node was lost")
        return worker.pid, found

    async def run(self, life: int, name: str, job: Job) -> Result | str:
        """Run a batch. Returns its result, or the reason why the worker died during it."""
        worker = self._workers.get(name)
        if worker is None or life != self._life:
            return GONE
        future: asyncio.Future[Result | str] = asyncio.get_running_loop().create_future()
        self._answers[name] = future
        worker.submit(job)
        return await future

    async def stop(self, life: int, name: str, grace_s: float) -> None:
        """End a worker after its batch."""
        if life == self._life and name in self._workers:
            await self._workers.pop(name).stop(grace_s)

    async def kill(self, life: int, name: str) -> None:
        """End a worker at once."""
        if life == self._life and name in self._workers:
            self._workers[name].kill()

    async def close(self) -> None:
        """End every worker of the node."""
        self._life = -1
        await asyncio.gather(*(worker.stop(END_S) for worker in self._workers.values()))
        self._workers.clear()
        await self._factory.close()

    def finished(self, worker: Worker, job: Job, result: Result) -> None:
        """See WorkerListener."""
        future = self._answers.pop(worker.spec.name, None)
        if future is not None and not future.done():
            future.set_result(result)

    def died(self, worker: Worker, why: str) -> None:
        """See WorkerListener."""
        name = worker.spec.name
        if not self._forget(worker):
            return
        future = self._answers.pop(name, None)
        if future is not None and not future.done():
            future.set_result(why)
        else:
            self._dead[name] = why

    def _forget(self, worker: Worker) -> bool:
        """Remove a worker from the present life. Returns whether the worker belonged to it."""
        if self._workers.get(worker.spec.name) is not worker:
            return False
        del self._workers[worker.spec.name]
        return True
