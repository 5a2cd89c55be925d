"""Management operations of the server, independent of the protocol: metadata, repository, status, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from importlib.metadata import version
from typing import Any

from cotenant.core.background import spawn
from cotenant.core.errors import InputError, WorkError
from cotenant.serving.dispatch.calls import Kind, Refusal
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.gateway.pages import Decisions
from cotenant.serving.gateway.requests import Gateway
from cotenant.serving.gateway.tokens import Tokens
from cotenant.serving.planning.crew import ApplyError, Crew
from cotenant.serving.planning.replanner import Replanner
from cotenant.serving.protocol.shared_memory import Regions
from cotenant.serving.protocol.tensors import ModelInfo, TensorError, TensorSpec
from cotenant.serving.workers.repository import config_override

EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "statistics",
    "system_shared_memory",
]


NO_CUDA_MEMORY = "CUDA shared memory is not supported: use system shared memory"


class Api:
    """The management operations of one server."""

    def __init__(
        self, gateway: Gateway, crew: Crew, replanner: Replanner, stats: Stats, tokens: Tokens, body_limit: int,
        regions: Regions,
    ) -> None:  # fmt: skip
        self.gateway, self.crew, self.replanner, self.stats = gateway, crew, replanner, stats
        self.tokens, self.body_limit, self.regions = tokens, body_limit, regions
        self.pool = gateway.admission.pool
        self.decisions = Decisions()
        self._tasks: set[asyncio.Task[None]] = set()

    def guard(self, authorization: bytes) -> tuple[int, str] | None:
        """Check a gRPC call's token. Returns the status for a caller that is not authorised, otherwise None."""
        try:
            self.tokens.check(authorization)
        except Refusal as refusal:
            return refusal.kind.value[1], refusal.message
        return None

    # ---- the protocol ----

    def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        return {"name": "cotenant", "version": version("cotenant"), "extensions": EXTENSIONS}

    def not_ready(self) -> str:
        """Return why the server is not ready to serve everything that it should; "" if it is ready."""
        if self.gateway.draining:
            return "the server is shutting down"
        for name in self.pool.service:
            why = self.crew.why_not(name)
            if why and why != "the model has been unloaded":
                return f"{name}: {why}"
        return ""

    def model_info(self, name: str, wanted: str) -> tuple[ModelInfo, str]:
        """Return the description and the version of a loaded model. Raises Refusal if the model is unknown or not
        ready.
        """
        if name in self.gateway.applications.names:
            if wanted not in ("", "1"):
                raise Refusal(Kind.UNKNOWN, f"application {name!r} has no versions")
            return self.gateway.applications.info(name), "1"
        loaded = self.gateway.admission.ready(name, wanted)
        return loaded.info, loaded.version

    def model_metadata(self, name: str, wanted: str) -> dict[str, Any]:
        """Metadata of a model or application: its inputs and outputs."""
        info, number = self.model_info(name, wanted)

        def one(spec: TensorSpec) -> dict[str, Any]:
            shape = [-1, *spec.shape] if info.batchable else list(spec.shape)
            return {"name": spec.name, "datatype": spec.datatype, "shape": shape}

        return {
            "name": name, "versions": [number], "platform": info.platform,
            "inputs": [one(x) for x in info.inputs], "outputs": [one(x) for x in info.outputs],
        }  # fmt: skip

    def model_config(self, name: str, wanted: str) -> dict[str, Any]:
        """Return a model's configuration in Triton's form, with those fields that have a meaning in this server."""
        info, _ = self.model_info(name, wanted)
        batch = 1 if name in self.gateway.applications.names else self.crew.max_batch(name)

        def one(spec: TensorSpec) -> dict[str, Any]:
            kind = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
            return {"name": spec.name, "data_type": kind, "dims": list(spec.shape)}

        found = {
            "name": name, "platform": info.platform, "max_batch_size": batch if info.batchable else 0,
            "input": [one(x) for x in info.inputs], "output": [one(x) for x in info.outputs],
        }  # fmt: skip
        own = self.crew.models[name].found if name in self.crew.models else None
        if own is not None and (parameters := own.config.get("parameters")):
            found["parameters"] = parameters
        return found

    def index(self, only_ready: bool) -> list[dict[str, str]]:
        """All models with their state, and applications as models of version 1."""
        known = []
        for name in self.pool.service:
            loaded = self.pool.loaded.get(name)
            known.append((name, loaded.version if loaded else "", self.crew.why_not(name)))
        for name in self.gateway.applications.names:
            try:
                self.gateway.applications.info(name)
                known.append((name, "1", ""))
            except Refusal as refusal:
                known.append((name, "1", refusal.message))
        return [
            {"name": name, "version": version, "state": "UNAVAILABLE" if why else "READY", "reason": why}
            for name, version, why in known if not (why and only_ready)
        ]  # fmt: skip

    def statistics(self, name: str, wanted: str) -> dict[str, Any]:
        """Return the counts and times of models under the names of Triton's statistics extension."""
        if name:
            self.model_info(name, wanted)
        rows = []
        for own_name, own in self.stats.services.items():
            if name not in ("", own_name):
                continue
            loaded = self.pool.loaded.get(own_name)
            rows.append({"name": own_name, "version": loaded.version if loaded else "1", **own.requests.shown()})
        return {"model_stats": rows}

    # ---- shared memory ----

    def register_memory(self, name: str, key: Any, offset: Any, byte_size: Any) -> None:
        """Register a region of the system's shared memory."""
        try:
            self.regions.register(name, key, offset, byte_size)
        except TensorError as error:
            raise Refusal(Kind.WRONG, str(error)) from None

    def memory(self, name: str) -> list[dict[str, Any]]:
        """All registered regions of shared memory, or the one with the given name."""
        try:
            return self.regions.status(name)
        except TensorError as error:
            raise Refusal(Kind.UNKNOWN, str(error)) from None

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load (or reload) a model's newest files, and replan with it. Parameter `config` (JSON) overrides the files'
        configuration until the next load.
        """
        self._known(name)
        config = None
        for key, value in parameters.items():
            if key.startswith("file:"):
                what = "files are not accepted over the network, since loading them may execute code"
                raise Refusal(Kind.WRONG, f"{key}: {what}; put it into the model's folder and load again")
            if key != "config" or not isinstance(value, str):
                raise Refusal(Kind.WRONG, f"load takes one parameter, config: JSON in a string; got {key[:200]!r}")
        try:
            if "config" in parameters:
                config = config_override(parameters["config"], name)
            self.crew.reload(name, config)
        except InputError as error:
            raise Refusal(Kind.WRONG, str(error)) from None
        await self._replan()
        model = self.crew.models[name]
        if model.fault or model.why:
            raise Refusal(Kind.WRONG, f"{name} cannot be loaded: {model.fault or model.why}")

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Stop serving a model and free its resources."""
        self._known(name)
        wrong = next((k for k, v in parameters.items() if k != "unload_dependents" or not isinstance(v, bool)), None)
        if wrong is not None:
            raise Refusal(Kind.WRONG, f"unload takes one parameter, unload_dependents: a boolean; got {wrong[:200]!r}")
        self.crew.unload(name)
        await self._replan()

    def _known(self, name: str) -> None:
        if name in self.gateway.applications.names:
            raise Refusal(
                Kind.WRONG,
                f"{name!r} is an application, which has no files of its own: unload its stages, {name}:STAGE",
            )
        if name not in self.pool.service:
            raise Refusal(Kind.UNKNOWN, f"{name[:200]!r} is not a service of this server's file")

    async def _replan(self) -> None:
        try:
            await self.replanner.make()
        except (WorkError, InputError, ApplyError) as error:
            raise Refusal(Kind.UNAVAILABLE, f"no new plan: {error}") from None

    def later(self, work: Coroutine[Any, Any, None], done: Callable[[Refusal | None], None]) -> None:
        """Run slow work while the server answers other requests; `done` gets the outcome of the work."""

        async def run() -> None:
            try:
                await work
            except Refusal as refusal:
                done(refusal)
            except Exception as error:
                done(Refusal(Kind.FAILED, f"the server failed: {type(error).__name__}"))
                raise
            else:
                done(None)

        spawn(self._tasks, run())

    # ---- plan and statistics ----

    def status(self) -> dict[str, Any]:
        """Everything that `cotenant top` shows."""
        plan, now = self.pool.plan, self.pool.now_ms()
        capacities = plan.capacities()
        services = []
        for name, own in self.stats.services.items():
            apps = self.gateway.applications
            staged = name in apps.names
            asked = apps.first_stage(name) if staged else name
            services.append(
                {
                    "name": name, "application": staged, "part_of": apps.application_of(name),
                    "slo_ms": own.slo_ms, "received": own.received,
                    "outcomes": {outcome.value: count for outcome, count in own.outcomes.items()},
                    "rate_rps": self.replanner.measured.get(asked), "capacity_rps": capacities.get(name),
                    "planned_rps": plan.rates_rps.get(name),
                    "waiting": 0 if staged else self.pool.waiting(name),
                    "p50_ms": own.percentile(0.5), "p99_ms": own.percentile(0.99),
                    "not_ready": "" if staged else self.crew.why_not(name),
                }
            )  # fmt: skip
        gpulets = [
            {
                "name": let.spec.name, "gpu": let.spec.gpu, "partition": let.spec.partition,
                "duty_ms": let.spec.duty_ms,
                "pid": None if let.worker is None else let.worker.pid,
                "state": "starting" if let.worker is None else "draining" if let.index < 0 else "serving",
                "busy": min(1.0, let.busy_ms / max(1.0, now)),
                "seats": [{"service": s.service, "batch": s.batch, "rate_rps": s.rate_rps} for s in let.spec.seats],
            }
            for let in [*self.pool.lets, *self.pool.leaving]
        ]  # fmt: skip
        return {
            "uptime_s": time.monotonic() - self.stats.began, "gpus": plan.gpus, "gpus_in_use": plan.gpus_used,
            "gpus_held": self.replanner.held, "planner": plan.planner, "note": self.replanner.note,
            "replans": self.stats.replans, "switches": self.stats.switches, "worker_deaths": self.stats.worker_deaths,
            "draining": self.gateway.draining, "in_flight": self.gateway.open,
            "decisions": [{"time_s": at, "text": text} for _, at, text in self.decisions.rows],
            "services": services, "gpulets": gpulets,
        }  # fmt: skip
