"""Builds the parts of a server from its configuration."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.serving.config.backends import pretends
from cotenant.serving.config.planning import Problem
from cotenant.serving.config.server import ListenEntry, ModelEntry, ServingConfig
from cotenant.serving.gateway.http1 import HttpLimits
from cotenant.serving.worker import WorkerFactory
from cotenant.serving.workers.repository import find


def http_limits(listen: ListenEntry) -> HttpLimits:
    """Limits of the endpoints from the setting `listen`."""
    return HttpLimits(
        listen.max_body, listen.read_timeout, listen.write_timeout, listen.idle_timeout, listen.max_connections
    )


def local_factory(config: ServingConfig, problem: Problem, agent: Path | None) -> WorkerFactory:
    """Create the factory of worker processes on this machine, with GPUs for models that need one. `agent`: folder of
    the node's agent.
    """
    from cotenant.serving.workers.local import LocalWorkers

    timed = all(_only_takes_time(entry) for entry in config.models.values())
    mechanism = config.deployment.mechanism
    limit_s = config.entry.load_timeout
    colocation = None
    if config.deployment.colocation is not None:
        from cotenant.core.folders import agent_folder
        from cotenant.serving.workers.colocation import Claim, Colocation

        raw = config.deployment.raw
        services = raw.services if raw is not None else ()
        claims = {s.name: Claim(s.memory, s.copy_weight, s.work_class) for s in services}
        needs_none = timed or not config.deployment.capabilities.needs_gpu
        folder = agent or agent_folder()
        colocation = Colocation(config.deployment.colocation, folder, claims, timed=needs_none)
    return LocalWorkers(mechanism, len(problem.gpus), timed=timed, load_limit_s=limit_s, colocation=colocation)


def _only_takes_time(entry: ModelEntry) -> bool:
    """Whether a model needs no device; also true for a model that is not found."""
    try:
        return pretends(find(entry).backend)
    except InputError:
        return True


def is_compiled(*, plans: bool) -> bool:
    """Whether the compiled code of the dispatcher (and, with `plans`, of the planner) is cached from an earlier
    start.
    """
    from cotenant.policy.compiled import CACHED, cache_folder

    kernels = ("dispatch_kernel.offer", *(("adjust.widen",) if plans else ()))
    return CACHED and all(any(cache_folder().rglob(f"{kernel}*.nbc")) for kernel in kernels)


def raise_file_limit() -> None:
    """Raise the limit on open files to the system's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
