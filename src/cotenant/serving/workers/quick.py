"""Short measurement of models on this machine's CPU cores, for a services file without a profile. The result is not
stored."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.core.partial import Partial
from cotenant.core.temporary import temporary_folder
from cotenant.profiles.serving.latency_files import shipped_profiles
from cotenant.serving.config.backends import pretends
from cotenant.serving.config.server import ModelEntry, ServingConfig
from cotenant.serving.worker import LoadError
from cotenant.serving.workers.profiling import (
    OneAtATimeError,
    ProfileRun,
    assemble,
    core_partitions,
    measure,
)
from cotenant.serving.workers.repository import Found, find

LOG = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8)
CELL_S = 0.1


def wanted(config: ServingConfig, profile: str | Path | None) -> bool:
    """Return whether a services file has no profile, and its only GPU stands for this machine's CPU cores, so that the
    models must be measured.
    """
    deployment = config.deployment
    if profile is not None or deployment.profiles or deployment.capabilities.needs_gpu:
        return False
    shipped = {name.upper() for name in shipped_profiles()}
    return len(deployment.gpu_models) == 1 and deployment.gpu_models[0].upper() not in shipped


def measured(config: ServingConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure the models of a services file. Returns a profile as a JSON object, and for each model that could not be
    measured the reason. Such a model is not served, but gets a placeholder of 1 ms in the profile, because applications
    need a time for every stage. Raises InputError if no model can be measured."""
    gpu = config.deployment.gpu_models[0]
    done: dict[str, Any] = {}
    failed: dict[str, InputError] = {}
    entries = {entry.model: entry for entry in sorted(config.models.values(), key=lambda x: x.sample is not None)}
    with temporary_folder("serve") as folder:
        for entry in entries.values():
            try:
                found = _runnable(entry)
            except InputError as error:
                failed[entry.model] = error
                continue
            LOG.info(
                "measuring %s on this machine's cores; `cotenant profile service` would keep the figures", entry.model
            )
            try:
                done = _one(gpu, entry, found, folder, done or None)
            except (InputError, WorkError, LoadError) as error:
                hint = "" if entry.sample is not None else " (set the key sample to a file with a request for it)"
                failed[entry.model] = InputError(f"the model cannot be measured{hint}: {error}")
    if not done:
        name, why = next(iter(failed.items()))
        file, field = why.file or config.deployment.file, why.field or (None if why.file else f"models.{name}")
        raise InputError(why.message, file=file, field=field)
    nothing = {"memory_mb": 0, "latency_ms": {label: {"1": 1.0} for label in done["partitions"]}}
    done["models"] |= dict.fromkeys(failed, nothing)
    return done, {name: str(error) for name, error in failed.items()}


def _runnable(entry: ModelEntry) -> Found:
    """Return the model to measure. Raises InputError if there is none, or if it is a timed model without times."""
    found = find(entry)
    if pretends(found.backend) and not found.config.get("latency_ms"):
        what = "a timed model takes as long as a profile says: give profile:, or latency_ms in its timed.json"
        raise InputError(what, field=f"models.{entry.model}")
    return found


def _one(gpu: str, entry: ModelEntry, found: Found, folder: Path, earlier: dict[str, Any] | None) -> dict[str, Any]:
    model = entry.model
    batches: tuple[int, ...] = BATCHES
    while True:
        run = ProfileRun(model, found, "cores", core_partitions(), batches, CELL_S, gpu=gpu, sample=entry.sample)
        partial = Partial(folder / f"{len(list(folder.iterdir()))}.json", run.key)
        try:
            rows = asyncio.run(measure(run, partial))
        except OneAtATimeError:
            if batches == (1,):
                raise
            batches = (1,)
            continue
        return assemble(run, rows, earlier, time.strftime("%Y-%m-%d"))
