"""The worker manager: changes the workers to match a plan (keeps, resizes, loads, drains), and replaces workers that
die.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cotenant.core.background import spawn
from cotenant.core.errors import InputError
from cotenant.core.serving import Gpulet, ServingPlan
from cotenant.core.units import counted
from cotenant.policy.serving.dispatch import Dispatcher
from cotenant.policy.serving.packing.replan import moves
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.serving.config.server import ServingConfig
from cotenant.serving.dispatch.lets import Let, Loaded
from cotenant.serving.dispatch.pool import Pool
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.protocol.tensors import ModelInfo
from cotenant.serving.worker import LoadError, ModelSpec, UnavailableError, Worker, WorkerFactory, WorkerSpec
from cotenant.serving.workers.repository import Found, find

RESTARTS = 3  # after this many successive failures to start its worker, a service counts as failed
BACKOFF_S = (0.0, 0.5, 2.0)
UNAVAILABLE_S = 0.5
DRAIN_S = 60.0


class ApplyError(Exception):
    """A plan could not be applied. `failed`: the services whose models cannot be loaded, with the reasons."""

    def __init__(self, failed: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in failed.items()))
        self.failed = dict(failed)


@dataclass
class _Model:
    """The model to load for a service. `generation` distinguishes reloads; `why`: why the model is not ready;
    `previous`: the older model, which serves while a new generation is loaded; `fault`: why the new generation could
    not be loaded.
    """

    found: Found | None = None
    generation: int = 0
    why: str = "loading"
    previous: tuple[Found, int] | None = None
    fault: str = ""


@dataclass
class _New:
    """A gpulet (a part of a GPU) whose worker is being created."""

    let: Let
    worker: Worker
    infos: dict[str, ModelInfo] = field(default_factory=dict)


class Say(Protocol):
    """Function that takes a sentence for the log and the live page."""

    def __call__(self, text: str, level: int = logging.INFO) -> None:
        """Log `text` at a level of the logging module."""


class Crew:
    """Creates and replaces the workers of the current plan. `want_plan` is called when services fail or GPUs are
    lost."""

    def __init__(
        self, config: ServingConfig, profiles: Mapping[str, ServingProfile], pool: Pool, stats: Stats,
        factory: WorkerFactory, say: Say,
    ) -> None:  # fmt: skip
        self.config, self.profiles, self.pool, self.stats = config, profiles, pool, stats
        self.factory, self.say = factory, say
        self.want_plan: Callable[[], None] = lambda: None
        self.models = {name: _Model() for name in pool.service}
        self.lock = asyncio.Lock()
        self._keys: dict[Worker, frozenset[tuple[str, int]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        # service that could not be measured, so that no plan can include it -> reason
        self.unmeasured: dict[str, str] = {}
        self._count = self._generations = 0
        self._best_effort = {s.name for s in config.deployment.services if not s.latency_sensitive}

    # ---- models ----

    def resolve(self, service: str) -> None:
        """Find a service's model on disk. If that fails, the error is stored as the reason why the service is not
        ready."""
        model = self.models[service]
        try:
            model.found = self._find(service)
            model.why = "loading"
        except InputError as error:
            model.found, model.why = None, str(error)

    def _find(self, service: str, config: dict[str, Any] | None = None) -> Found:
        if service in self.unmeasured:
            raise InputError(self.unmeasured[service])
        return find(self.config.models[service], config)

    def max_batch(self, service: str) -> int:
        """The largest batch that a plan may use for a service: from the model's configuration, else from the profile,
        else, for a fixed plan without a profile, from that plan.
        """
        found = self.models[service].found
        configured = None if found is None else found.config.get("max_batch_size")
        if isinstance(configured, int) and configured > 0:
            return configured
        model = self.pool.service[service].model
        known = [p for p in self.profiles.values() if model in p.models]
        seats = [s.batch for let in self.pool.plan.gpulets for s in let.seats if s.service == service]
        return max([1, *(p.max_batch(model, size.label) for p in known for size in p.partitions), *seats])

    def ready_services(self) -> list[str]:
        """Services that a plan may include: those whose model was found and has not failed."""
        return [name for name, model in self.models.items() if model.why in ("", "loading")]

    def why_not(self, service: str) -> str:
        """Why a service cannot answer now; "" if it can."""
        model = self.models.get(service)
        if model is None:
            return "unknown"
        placed = self.pool.serves(service)
        if model.why and (model.why != "loading" or placed or not self.pool.lets):
            return model.why
        if placed:
            return ""
        usable = self.factory.gpus()
        if usable is not None and not usable:
            return "no GPU can be used now"
        if not self.pool.plan.gpulets and not self.pool.plan.left_out:
            return "a plan for the GPUs that can be used is being made"
        why = next((x.reason for x in self.pool.plan.left_out if x.service == service), "the GPUs do not suffice")
        return f"the plan has no place for the service: {why}"

    # ---- plans ----

    async def apply(self, plan: ServingPlan) -> None:
        """Apply a plan: load new workers in the background, switch to the plan, and drain the workers that it does not
        use. After an ApplyError nothing has changed.
        """
        async with self.lock:
            lets, fresh = self._match(plan)
            if not fresh and not self.pool.hold and self.pool.adjust(plan):
                return
            results = await asyncio.gather(*(self._start(new) for new in fresh), return_exceptions=True)
            if self.closing or any(isinstance(result, BaseException) for result in results):
                await asyncio.gather(*(new.worker.stop(1.0) for new in fresh))
                for result in results:
                    if isinstance(result, UnavailableError | InputError):
                        raise result
                failed = self._blamed(fresh, results)
                for name, why in failed.items():
                    self._failed(name, why)
                raise ApplyError(failed)
            for new in fresh:
                new.let.worker = new.worker
                self._loaded(new)
            await self._resized(plan, lets)
            self.stats.switches += 1
            # building the dispatcher's tables takes milliseconds, so it is done in a thread, and requests need not wait
            desk = await asyncio.to_thread(
                Dispatcher, plan, self.pool.services, self.profiles, self.pool.hold
            )  # fmt: skip
            steps = Counter(step.kind for step in moves(self.pool.plan, plan))
            gone = self.pool.switch(plan, lets, desk)
        if disrupting := ", ".join(f"{kind} {count}" for kind, count in steps.items() if kind != "rebatch"):
            size = f"{counted(len(plan.gpulets), 'gpulet')} on {counted(plan.gpus_used, 'GPU')}"
            self.say(f"a new plan: {size} ({disrupting})")
        for let in gone:
            spawn(self._tasks, self._retire(let))

    def _blamed(self, fresh: Sequence[_New], results: Sequence[object]) -> dict[str, str]:
        """Return the services whose models could not be loaded, with reasons. Failures because a GPU has disappeared
        are not counted.
        """
        usable = self.factory.gpus()
        failed: dict[str, str] = {}
        for new, result in zip(fresh, results, strict=True):
            if not isinstance(result, BaseException) or (usable is not None and new.let.spec.gpu not in usable):
                continue
            named = result.service if isinstance(result, LoadError) else ""
            names = [named] if named else [model.service for model in new.worker.spec.models]
            failed.update(dict.fromkeys(names, str(result)))
        return failed

    def _failed(self, name: str, why: str) -> None:
        self.say(f"{name} cannot be loaded: {why}", logging.WARNING)
        model = self.models[name]
        model.fault = why
        if model.previous is None:
            model.why = why
        else:
            model.found, model.generation = model.previous
            model.previous = None

    def _match(self, plan: ServingPlan) -> tuple[list[Let], list[_New]]:
        """For each gpulet of the plan, find an existing gpulet that matches, or create a new worker."""
        # A worker is reused only if the server may still serve all models in the worker. If one of them is outdated,
        # has been unloaded from the server, or has failed, a reused worker would still keep it in memory.
        ready = {(name, self.models[name].generation) for name in self.ready_services()}
        free = [let for let in self.pool.lets if let.worker is not None and self._keys[let.worker] <= ready]
        lets: list[Let] = []
        fresh: list[_New] = []
        for let in plan.gpulets:
            wanted = self._key(let)
            keeps = [
                x for x in free
                if x.spec.gpu == let.gpu and x.worker is not None and wanted <= self._keys[x.worker]
                and (x.spec.partition == let.partition or self.config.deployment.capabilities.worker_resizes)
            ]  # fmt: skip
            if keeps:
                kept = min(keeps, key=lambda x: (x.spec.partition != let.partition, len(self._keys[x.worker])))  # type: ignore[index]
                free.remove(kept)
                lets.append(kept)
                continue
            new = Let(let, None)
            worker = self.factory.create(self._spec(let, plan), self.pool)
            self._keys[worker] = wanted
            lets.append(new)
            fresh.append(_New(new, worker))
        return lets, fresh

    async def _resized(self, plan: ServingPlan, lets: Sequence[Let]) -> None:
        for now, let in zip(plan.gpulets, lets, strict=True):
            resize = getattr(let.worker, "resize", None)
            if let.spec.partition == now.partition or resize is None:
                continue
            why = await resize(now.percent / 100)
            if why:
                self.say(
                    f"gpulet {let.spec.name} keeps the partition {let.spec.partition}, since its size could not be "
                    f"changed: {why}"
                )

    def _key(self, let: Gpulet) -> frozenset[tuple[str, int]]:
        return frozenset((seat.service, self.models[seat.service].generation) for seat in let.seats)

    def _spec(self, let: Gpulet, plan: ServingPlan | None = None) -> WorkerSpec:
        every = (plan or self.pool.plan).gpulets
        start = sum(x.percent for x in every if x.gpu == let.gpu and x.slot < let.slot) / 100
        profile = self.profiles[let.gpu_model]
        models = []
        for seat in let.seats:
            found = self.models[seat.service].found
            assert found is not None
            # the worker prepares the model for the largest batch of any later plan, so that a new plan needs no new
            # worker
            most = max(seat.batch, profile.max_batch(seat.model, let.partition))
            sensitive = seat.service not in self._best_effort
            spec = (seat.service, seat.model, found.backend, found.path, found.version, most, found.config, sensitive)
            models.append(ModelSpec(*spec))
        self._count += 1
        return WorkerSpec(
            f"{let.name}#{self._count}", let.gpu, let.gpu_model, let.partition, let.percent / 100,
            self.config.deployment.mechanism, tuple(models), start,
        )  # fmt: skip

    async def _start(self, new: _New) -> None:
        new.infos = await new.worker.start()
        self.stats.models_loaded += len(new.infos)

    def _loaded(self, new: _New) -> None:
        for name, info in new.infos.items():
            model = self.models[name]
            model.why = model.fault = ""
            model.previous = None
            assert model.found is not None
            self.pool.loaded[name] = Loaded(info, model.found.version)

    async def _retire(self, let: Let) -> None:
        """Wait until a gpulet that is not in the new plan has finished its batch, then stop its worker."""
        try:
            await asyncio.wait_for(self.pool.drained(let), DRAIN_S)
        except TimeoutError:
            self.say(f"{let.spec.name} did not finish its batch within {DRAIN_S:g} s", logging.WARNING)
        worker = let.worker
        if worker is not None:
            self._keys.pop(worker, None)
            await worker.stop(5.0)

    # ---- deaths ----

    def lost(self, let: Let, why: str) -> None:
        """Create another worker for a gpulet whose worker has ended."""
        if self.closing or let.index < 0:
            return
        self.say(f"the worker of {let.spec.name} {why}; starting another one", logging.WARNING)
        spawn(self._tasks, self._restart(let))

    async def _restart(self, let: Let) -> None:
        attempt, pause_s, said = 0, BACKOFF_S[0], ""
        while attempt < RESTARTS:
            await asyncio.sleep(pause_s)
            usable = self.factory.gpus()
            if let.index < 0 or self.closing:
                return
            if usable is not None and let.spec.gpu not in usable:
                self.want_plan()
                return
            worker = self.factory.create(self._spec(let.spec), self.pool)
            self._keys[worker] = self._key(let.spec)
            try:
                infos = await worker.start()
            # starting the worker is tried again without a limit on attempts, since the models did not cause this
            # failure
            except (UnavailableError, InputError) as error:
                self._keys.pop(worker, None)
                if not said:
                    self.say(f"{let.spec.name} waits for its worker: {error}", logging.WARNING)
                pause_s, said = UNAVAILABLE_S, str(error)
                continue
            except LoadError as error:
                self._keys.pop(worker, None)
                await worker.stop(1.0)
                last = error
                attempt += 1
                pause_s = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
                continue
            if let.index < 0 or self.closing or self._keys[worker] != self._key(let.spec):
                # while the worker loaded its models, a newer plan removed this gpulet or changed its services
                self._keys.pop(worker, None)
                await worker.stop(1.0)
                if let.index >= 0 and not self.closing:
                    pause_s = BACKOFF_S[0]
                    continue
                return
            self.stats.models_loaded += len(infos)
            self.pool.attach(let, worker)
            return
        for name in [last.service] if last.service else sorted(let.seats):
            failed = f"{RESTARTS} attempts to load the model in a worker failed"
            self.models[name].why = f"{failed}, the last one with: {last.why}"
            self.pool.abandon_service(name, f"model {name!r} is not ready: {last.why}")
            self.say(f"{name} has failed: {last.why}", logging.WARNING)
        self.want_plan()

    # ---- models that change ----

    def reload(self, service: str, config: dict[str, Any] | None = None) -> None:
        """Load the newest files of the service's model with the next plan that is applied, with `config` instead of the
        files' configuration. Raises InputError if there are no files.
        """
        found = self._find(service, config)
        model = self.models[service]
        model.fault = ""
        if model.why:
            model.why, model.previous = "loading", None
        elif model.previous is None and model.found is not None:
            model.previous = model.found, model.generation
        self._generations += 1
        model.found, model.generation = found, self._generations

    def unload(self, service: str) -> None:
        """Exclude a service from plans from now on."""
        self.models[service].why = "the model has been unloaded"
        self.pool.abandon_service(service, f"model {service!r} has been unloaded")

    # ---- the end ----

    async def close(self, grace_s: float) -> None:
        """Stop all workers of the server."""
        self.closing = True
        lets: Sequence[Let] = [*self.pool.lets, *self.pool.leaving]
        workers = [let.worker for let in lets if let.worker is not None]
        for let in lets:
            let.index = -1
        await asyncio.gather(*(worker.stop(grace_s) for worker in workers))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.factory.close()
