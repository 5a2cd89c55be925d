"""Workers that share GPUs with best-effort programs: latency-sensitive (LS) workers set the LS-activity flag of their
GPU, and best-effort (BE) workers wait until no such flag is set.

The gateway registers every worker with the node's agent as a tenant: the agent reserves its memory, divides the PCIe
link among tenants' copies by weights, and gives the worker the SMs of the co-location scheme. The worker calls a gate
before and after each batch. The gate sets the flag before an LS batch and clears it afterwards. Before a BE batch, the
gate may wait; after it, the gate does nothing. The gate's parameters are in the worker's environment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.abi.floor import WorkClass
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.core.errors import InputError, WorkError
from cotenant.serving.worker import WorkerSpec

LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from cotenant.agent.gate.client import Floor, Holder
    from cotenant.agent.ipc.client import ControlClient

VARIABLE = "COTENANT_WORKER_FLOOR"
LOOK_S = 0.00005
SIGN_S = 0.1  # interval of the heartbeat while a batch runs: a fifth of the usual heartbeat timeout
KEEP_S = 1.0
# numbers in tenants' names; none is used twice, because a tenant of the previous server in this process may still exist
NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Claim:
    """Resources of a service: memory in bytes (None: not stated), and its weight on the link. `work_class`: the
    resource that limits its kernels, a name of `WORK_CLASSES` in agent/gate/floor.py.
    """

    memory_bytes: int | None = None
    copy_weight: float = 1.0
    work_class: str = "unknown"


def tenant_name(pid: int, number: int, services: Sequence[str]) -> str:
    """A worker's tenant name: server and services, in the characters allowed for names."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", ".".join(services))
    return f"serve-{pid}-{words[:36]}-{number}"


class Colocation:
    """Co-location in the gateway. Raises WorkError if no agent runs in `folder`, InputError for an unknown scheme."""

    def __init__(
        self,
        scheme: str,
        folder: Path,
        claims: Mapping[str, Claim],
        *,
        timed: bool = False,
    ) -> None:
        """`timed`: workers only sleep; they are tenants and obey the LS gate, but need no device."""
        from cotenant.agent.ipc.client import ControlClient
        from cotenant.policy.colocation import scheme_named

        self.scheme = scheme_named(scheme)
        self.folder, self.timed = folder, timed
        self._claims = claims
        self._clients: dict[str, ControlClient] = {}
        self._names: dict[str, str] = {}
        self._sensitive: dict[str, tuple[str, int]] = {}  # name of each LS worker -> its GPU and pid
        self._floors: dict[str, Floor] = {}
        self._keeper = ControlClient(folder)  # the agent uses this scheme as long as the connection is open
        self.beside = float(self._keeper.call("colocation", scheme=scheme, while_connected=True)["overlap"])
        self.gpus: list[dict[str, Any]] = self._keeper.call("status")["gpus"]
        on = ", ".join(f"GPU {number} ({gpu['name']})" for number, gpu in enumerate(self.gpus))
        LOG.info("co-location: %s on %s of the agent in %s", scheme, on, folder)
        if min(self.scheme.ls_sms, self.scheme.be_sms) < 1.0:
            LOG.info(
                f"scheme {scheme}: a latency-sensitive gpulet may use {self.scheme.ls_sms:.0%} of the SMs "
                f"that it has in the plan, a best-effort one {self.scheme.be_sms:.0%}; "
                "the plan's capacities assume that each gpulet uses all of its SMs"
            )
        self._over = threading.Event()
        self._keeping = threading.Thread(target=self._keep, name="colocation", daemon=True)
        self._keeping.start()

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """Register a worker as a tenant of the agent, and return the environment of the worker's process. The tenant
        exists until `released` is called.
        """
        uuid = self._gpu(spec)
        best_effort = all(not model.latency_sensitive for model in spec.models)
        if not best_effort and not all(model.latency_sensitive for model in spec.models):
            names = " and ".join(model.service for model in spec.models if not model.latency_sensitive)
            LOG.warning(
                f"best-effort work of {names} shares a process with a latency-sensitive service, so it waits for "
                "latency-sensitive work only between batches, not before each kernel"
            )
        # elastic: the worker uses green contexts and can change its SMs between two batches. In other best-effort
        # workers, the shim (a library between the process and the CUDA driver) delays kernels as the scheme requires
        elastic = mechanisms.find(spec.mechanism).capabilities.worker_resizes
        if elastic and best_effort:
            names = " and ".join(model.service for model in spec.models)
            LOG.warning(
                "best-effort work of %s runs on green contexts, so it waits for latency-sensitive work only between "
                "batches; with mechanism mps it would wait before each kernel",
                names,
            )
        told = {
            "folder": str(self.folder),
            "gpu": uuid,
            "gated": best_effort and not self.timed and not elastic,
            "beside": self.beside if elastic else 0.0,
            "whole": spec.fraction,
            "classes": {m.service: self._claims.get(m.service, Claim()).work_class for m in spec.models},
        }
        answer = self._register(spec, uuid, best_effort, elastic)
        variable = {VARIABLE: json.dumps(told)}
        if self.timed:
            return variable
        from cotenant.agent.tenants.launcher import program_environment

        return dict(program_environment(answer)) | variable

    def _register(self, spec: WorkerSpec, uuid: str, best_effort: bool, elastic: bool) -> dict[str, Any]:
        from cotenant.agent.config.files import TenantSpec
        from cotenant.agent.ipc.client import ControlClient
        from cotenant.agent.tenants.launcher import Launch, register

        claims = [self._claims.get(model.service, Claim()) for model in spec.models]
        memory = [claim.memory_bytes for claim in claims if claim.memory_bytes is not None]
        silent = [m.service for m, c in zip(spec.models, claims, strict=True) if c.memory_bytes is None]
        if memory and silent:
            mine = " and ".join(m.service for m in spec.models if m.service not in silent)
            LOG.warning(
                f"no memory is reserved for {mine}: the same process runs {' and '.join(silent)}, for which the "
                "services file states no memory"
            )
        part = self.scheme.be_sms if best_effort else self.scheme.ls_sms
        tenant = TenantSpec(
            name=tenant_name(os.getpid(), next(NUMBERS), [model.service for model in spec.models]),
            limit=1.0 if elastic else part * (spec.fraction if self.scheme.together else 1.0),
            memory_bytes=sum(memory) if len(memory) == len(claims) else None,
            priority=-1 if best_effort and self.scheme.be_below else 0,
            gpus=(uuid,),
            mechanism=mechanisms.choose(Use.TENANT, concurrent=self.scheme.together),
            best_effort=best_effort and not elastic,
            copy_weight=max(claim.copy_weight for claim in claims),
            latency_sensitive=not best_effort,
            work_class=claims[0].work_class if len({claim.work_class for claim in claims}) == 1 else "unknown",
        )
        client = ControlClient(self.folder)  # the tenant exists as long as this connection is open
        self._clients[spec.name], self._names[spec.name] = client, tenant.name
        try:
            return register(client, Launch(self.folder, tenant, [spec.name]))
        except InputError as error:
            if error.field != "--mechanism":
                raise
            told = f"{self.scheme.name} runs its workers under the mechanism {tenant.mechanism}: {error.message}"
            raise InputError(told, field="colocation") from None

    def started(self, spec: WorkerSpec, pid: int) -> None:
        """Called when the process of a worker has started: tells the agent the pid."""
        client = self._clients.get(spec.name)
        if client is not None:
            client.call("started", name=self._names[spec.name], pid=pid)
        if any(model.latency_sensitive for model in spec.models):
            gpu = self._gpu(spec)
            self._sensitive[spec.name] = gpu, pid
            self._join(gpu)

    def _join(self, gpu: str) -> None:
        from cotenant.agent.gate.client import join_floor

        # if the gateway cannot join the LS gate here, the flag is set only when the worker has received the batch, not
        # already while the gateway sends it (see `coming`)
        with contextlib.suppress(WorkError):
            if gpu not in self._floors:
                floor = join_floor(self.folder, gpu)
                # another thread may have joined the LS gate of the same GPU, since workers are started concurrently
                if self._floors.setdefault(gpu, floor) is not floor:
                    floor.close()

    def coming(self, spec: WorkerSpec, service: str) -> None:
        """Called while a batch is being sent to a worker, which takes tens of microseconds. Sets the LS-activity flag
        already now, so that best-effort work in flight ends meanwhile. The worker sets the flag again, and clears it
        after the batch.
        """
        gpu, pid = self._sensitive.get(spec.name, ("", 0))
        if gpu in self._floors and _sensitive(spec, service):
            name = self._claims.get(service, Claim()).work_class
            self._floors[gpu].raise_for(pid, WorkClass[name.upper()])

    def _gpu(self, spec: WorkerSpec) -> str:
        return str(self.gpus[spec.gpu % len(self.gpus)]["uuid"])

    def released(self, spec: WorkerSpec) -> None:
        """Called when a worker has ended: ends its tenant."""
        client = self._clients.pop(spec.name, None)
        if client is not None:
            client.close()
        gpu, _ = self._sensitive.pop(spec.name, ("", 0))
        if gpu in self._floors and all(gpu != other for other, _ in self._sensitive.values()):
            # no latency-sensitive worker is left on that GPU, so the gateway leaves the GPU's LS gate
            self._floors.pop(gpu).close()

    def close(self) -> None:
        """Called when all workers have ended."""
        for floor in self._floors.values():
            floor.close()
        self._floors.clear()
        self._sensitive.clear()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._over.set()
        self._keeping.join(KEEP_S + 5.0)
        self._keeper.close()

    def _keep(self) -> None:
        """Set the scheme again when another agent has replaced the present one."""
        from cotenant.agent.ipc.client import ControlClient

        while not self._over.wait(KEEP_S):
            try:
                self._keeper.call("colocation")
            except (WorkError, InputError, OSError, ValueError):
                with contextlib.suppress(WorkError, InputError, OSError, ValueError):
                    fresh, stale = ControlClient(self.folder, timeout_s=5.0), self._keeper
                    fresh.call("colocation", scheme=self.scheme.name, while_connected=True)
                    self._keeper = fresh
                    stale.close()
                    LOG.warning(
                        f"co-location: the agent in {self.folder} was restarted; its scheme is set to "
                        f"{self.scheme.name} again"
                    )


def _sensitive(spec: WorkerSpec, service: str) -> bool:
    return any(model.latency_sensitive for model in spec.models if model.service == service)


class Turnstile:
    """The worker's gate. The worker calls `enter` before and `leave` after each batch. Before a BE batch:

    - if `beside` is above 0, the batch does not wait: the process runs it on the fraction `beside` of the SMs while LS
      work is active, otherwise on the fraction `whole`. `resize` changes the fraction.
    - otherwise, if `gated`, the batch does not wait here, because the shim (a library between this process and
      the CUDA driver) delays kernels as the scheme requires.
    - otherwise, the batch waits until no LS work is active.

    `classes`: work class that is reported to the agent while a service's batch runs; `unknown` for services that are
    not listed.
    """

    def __init__(
        self,
        floor: Holder,
        best_effort: frozenset[str],
        *,
        gated: bool,
        beside: float = 0.0,
        whole: float = 1.0,
        resize: Callable[[float], object] = lambda fraction: None,
        classes: Mapping[str, WorkClass] | None = None,
    ) -> None:
        self._classes = classes or {}
        self._floor, self._best_effort, self._gated = floor, best_effort, gated
        self._beside, self._whole, self._resize = beside, whole, resize
        self._now = whole
        self._runs: WorkClass | None = None  # resource that limits the LS batch that runs now; None if no LS batch runs
        self._lock = threading.Lock()
        threading.Thread(target=self._show_signs, name="signs", daemon=True).start()

    def enter(self, service: str) -> None:
        """Called before a batch. An LS batch sets the LS-activity flag; a BE batch may wait here."""
        if service not in self._best_effort:
            with self._lock:
                self._runs = self._classes.get(service, WorkClass.UNKNOWN)
                self._floor.raise_(self._runs)
            return
        if self._beside > 0:
            self._step(self._beside if self._floor.others_up() else self._whole)
            return
        while not self._gated and self._floor.others_up():
            time.sleep(LOOK_S)

    def _step(self, fraction: float) -> None:
        if fraction != self._now:
            self._resize(fraction)
            self._now = fraction

    def leave(self, service: str) -> None:
        """Called after a batch, when its requests have been answered: an LS batch clears the LS-activity flag."""
        if service not in self._best_effort:
            with self._lock:
                self._runs = None
                self._floor.lower()

    def _show_signs(self) -> None:
        """Send heartbeats while an LS batch runs, since a batch may take longer than the heartbeat timeout. Best-effort
        work does not wait forever: the gateway ends a batch that hangs, and a suspended process sends no heartbeats.
        """
        while True:
            time.sleep(SIGN_S)
            with self._lock:
                if self._runs is not None:
                    self._floor.raise_(self._runs)


def turnstile(models: Sequence[Any], resize: Callable[[float], object]) -> Turnstile | None:
    """The gate of this worker process; None without co-location. The gate changes the process's SMs by `resize`."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    from cotenant.agent.gate.client import join_floor

    told = json.loads(text)
    best_effort = frozenset(model.service for model in models if not model.latency_sensitive)
    floor = join_floor(Path(told["folder"]), told["gpu"])
    classes = {service: WorkClass[name.upper()] for service, name in told["classes"].items()}
    return Turnstile(
        floor,
        best_effort,
        gated=told["gated"],
        beside=told["beside"],
        whole=told["whole"],
        resize=resize,
        classes=classes,
    )
