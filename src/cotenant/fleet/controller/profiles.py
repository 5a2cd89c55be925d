"""Profiles of the fleet's jobs: built-in ones by name, profile files, or a neutral one for jobs without a profile."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.errors import InputError, WorkError
from cotenant.fleet.jobs import JobSpec
from cotenant.profiles.training.tables import ModelProfile, Profiles, load_profiles

PLAIN = "(no profile)"
UNKNOWN_LENGTH_S = 3600.0  # orderings assume this duration for a job that states none


class ProfileBook:
    """Finds the profile of a job, which states its speed; reads each file once. `shared`: profiles that jobs name by
    model alone.
    """

    def __init__(self, shared: Profiles | None = None, default: str | None = None) -> None:
        self.shared = shared or load_profiles()
        if default is not None and default not in self.shared.models:
            raise InputError(
                f"no profile named {default!r}; known: {', '.join(self.shared.models)}", field="default-profile"
            )
        self.default = default
        self._models: dict[str, ModelProfile] = dict(self.shared.models)
        self._keys: dict[tuple[str | None, str], str] = {}
        self._merged: tuple[Any, Profiles] | None = None
        self._missing: dict[tuple[str | None, str], str] = {}

    def key(self, spec: JobSpec) -> str:
        """Name of the job's profile in `merged`. Raises InputError if the profile that the job names does not exist."""
        wanted = (spec.profile, spec.model)
        if wanted not in self._keys:
            self._keys[wanted] = self._find(spec)
        return self._keys[wanted]

    def key_or_plain(self, spec: JobSpec) -> str:
        """Like `key`, but if the profile of a job has disappeared since its admission, the job gets the neutral profile
        and `fault` reports that.
        """
        wanted = (spec.profile, spec.model)
        if wanted in self._missing:
            return PLAIN
        try:
            return self.key(spec)
        except InputError as error:
            self._missing[wanted] = error.message if error.file is None else f"{error.file}: {error.message}"
            return PLAIN

    def fault(self) -> str:
        """Return in one sentence which profiles of queued jobs have disappeared; "" if none has."""
        missing = "; ".join(self._missing.values())
        return f"jobs are planned as if they had no profile: {missing}" if missing else ""

    def _find(self, spec: JobSpec) -> str:
        if spec.profile is None:
            if not spec.model:
                return self.default or PLAIN
            if spec.model in self.shared.models:
                return spec.model
            if self.default is not None:
                return self.default
            raise InputError(
                f"{spec.model!r} has no profile; known: {', '.join(self.shared.models)}; or give a profile "
                "file, or leave the model out",
                field="model",
            )
        found = load_profiles(spec.profile)
        name = spec.model or next(iter(found.models))
        if name not in found.models:
            raise InputError(f"{spec.profile} has no model {name!r}; it has {', '.join(found.models)}", field="model")
        key = f"{spec.profile}:{name}"
        self._models[key] = found.models[name]
        self._merged = None
        return key

    def length(self, spec: JobSpec) -> tuple[float, float]:
        """Return (duration in seconds, iterations) of a job. A value that the job does not state is NaN, but if it
        states neither, the duration is UNKNOWN_LENGTH_S.
        """
        if spec.duration_s is not None:
            return spec.duration_s, math.nan if spec.iterations is None else spec.iterations
        if spec.iterations is not None:
            return math.nan, spec.iterations
        return UNKNOWN_LENGTH_S, math.nan

    def merged(self, base: tuple[float, float]) -> Profiles:
        """All profiles of the fleet's jobs in one set. `base`: cores and GB per GPU for jobs without a profile."""
        if self._merged is None or self._merged[0] != base:
            models = self._models | {PLAIN: _plain(*base)}
            self._merged = (base, Profiles("fleet", "fleet", models))
        return self._merged[1]


def keep_profiles(specs: Iterable[JobSpec], folder: Path) -> list[JobSpec]:
    """Copy the profile files of jobs into `folder`, and return the jobs with the paths of the copies. A job may wait
    longer than the original file exists.

    Raises InputError for a file that cannot be read, WorkError if the folder cannot be written.
    """
    copies: dict[str, str] = {}
    found = []
    for spec in specs:
        if spec.profile is None:
            found.append(spec)
            continue
        if spec.profile not in copies:
            copies[spec.profile] = str(_copy(Path(spec.profile), folder))
        found.append(dataclasses.replace(spec, profile=copies[spec.profile]))
    return found


def _copy(file: Path, folder: Path) -> Path:
    """Copy a file under a name made of its name and a hash of its content; write it only once."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", file=file) from None
    if file.parent == folder:
        return file
    copy = folder / f"{file.stem[:40]}-{hashlib.sha256(raw).hexdigest()[:12]}.json"
    if copy.exists():
        return copy
    try:
        folder.mkdir(exist_ok=True)
        half = copy.with_suffix(f".{os.getpid()}")
        half.write_bytes(raw)
        half.replace(copy)
    except OSError as error:
        raise WorkError(f"{copy}: cannot be written: {(error.strerror or str(error)).lower()}") from None
    return copy


def _plain(cpus: float, memory_gb: float) -> ModelProfile:
    """Neutral profile: the same speed with any CPU and memory."""
    return ModelProfile(
        name=PLAIN,
        family="other",
        iteration_s=1.0,
        cpus_per_gpu=np.array([1e-3]),
        memory_gb_per_gpu=np.array([1e-3]),
        throughput=np.ones((1, 1)),
        ideal_cpus_per_gpu=cpus,
        ideal_memory_gb_per_gpu=memory_gb,
    )
