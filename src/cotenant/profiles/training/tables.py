"""Sensitivity tables: a training job's throughput as a function of CPU cores and memory per GPU."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.jsonfile import read_json
from cotenant.core.units import number_or_nan

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TwoSpeed:
    """A training job's two speeds on nodes with one ratio of CPUs to GPUs. `iteration_s`: seconds per iteration if each
    GPU has its proportional share of the node's CPU cores and memory. `speedup`: the factor by which the job is faster
    with the cores and memory that it ideally needs; `cpus_per_gpu`: the cores among these.
    """

    iteration_s: float
    speedup: float
    cpus_per_gpu: float


@dataclass(frozen=True)
class ModelProfile:
    """The sensitivity of one model's training to CPU cores and memory.

    `throughput[c, m]`: throughput per GPU with `cpus_per_gpu[c]` cores and `memory_gb_per_gpu[m]` GB per GPU, relative
    to the *base point*, the cores and memory at which `iteration_s` was measured. `iteration_s`: seconds per iteration
    at the base point, on the *reference GPU*: the GPU model to which the trace refers, by default that of the cluster's
    first node. `ideal_*`: per GPU, the least that gives full speed. `multi_node_factor`: speed of a gang (a job on
    several GPUs) that spans nodes, as a fraction of its speed on one node. `gpu_speed`: measured speeds by GPU model;
    only their ratios count.
    """

    name: str
    family: str
    iteration_s: float
    cpus_per_gpu: Floats
    memory_gb_per_gpu: Floats
    throughput: Floats
    ideal_cpus_per_gpu: float
    ideal_memory_gb_per_gpu: float
    multi_node_factor: float = 1.0
    two_speed: dict[float, TwoSpeed] = field(default_factory=dict)
    gpu_speed: dict[str, float] = field(default_factory=dict)

    def speed(self, cpus_per_gpu: float, memory_gb_per_gpu: float) -> float:
        """Return the throughput relative to the base point with any number of cores and any memory. It is interpolated
        inside the table. Beyond an edge it is that at the edge, but below the table's smallest number of cores it is
        proportional to the cores, because half the cores prepare at most half as much data.
        """
        c = float(np.clip(cpus_per_gpu, self.cpus_per_gpu[0], self.cpus_per_gpu[-1]))
        m = float(np.clip(memory_gb_per_gpu, self.memory_gb_per_gpu[0], self.memory_gb_per_gpu[-1]))
        i, u = _cell(self.cpus_per_gpu, c)
        j, v = _cell(self.memory_gb_per_gpu, m)
        t = self.throughput
        i1, j1 = min(i + 1, t.shape[0] - 1), min(j + 1, t.shape[1] - 1)
        low = t[i, j] * (1 - v) + t[i, j1] * v
        high = t[i1, j] * (1 - v) + t[i1, j1] * v
        value = low * (1 - u) + high * u
        return float(value * min(1.0, cpus_per_gpu / self.cpus_per_gpu[0]))

    def two_speed_at(self, cpus_per_gpu: float, memory_gb_per_gpu: float) -> TwoSpeed:
        """Return the model's seconds per iteration with this proportional share of CPU and memory per GPU, its speedup
        with ideal CPU and memory, and its ideal CPU. They are computed from the table if the profile does not state
        them for this number of CPUs per GPU.
        """
        for ratio, stated in self.two_speed.items():
            if math.isclose(ratio, cpus_per_gpu):
                return stated
        proportional = self.speed(cpus_per_gpu, memory_gb_per_gpu)
        ideal = self.speed(self.ideal_cpus_per_gpu, self.ideal_memory_gb_per_gpu)
        return TwoSpeed(self.iteration_s / proportional, max(1.0, ideal / proportional), self.ideal_cpus_per_gpu)


def _cell(axis: Floats, x: float) -> tuple[int, float]:
    if len(axis) == 1:
        return 0, 0.0
    i = min(int(np.searchsorted(axis, x, side="right")) - 1, len(axis) - 2)
    return i, float((x - axis[i]) / (axis[i + 1] - axis[i]))


@dataclass(frozen=True)
class Profiles:
    """A set of profiles of training jobs' models; `classes` maps a class (image, language, speech) to its models, in
    file order.
    """

    name: str
    source: str
    models: dict[str, ModelProfile]

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for model in self.models.values():
            found.setdefault(model.family, []).append(model.name)
        return {family: tuple(names) for family, names in found.items()}

    @property
    def iteration_s(self) -> dict[str, float]:
        """Return the seconds per iteration at the base point (throughput 1), by model."""
        return {name: model.iteration_s for name, model in self.models.items()}


def load_profiles(path: str | Path | None = None) -> Profiles:
    """Return the shipped profiles, or those of a JSON file in the same form; InputError names file and field."""
    if path is None:
        text = resources.files("cotenant.profiles").joinpath("data/synergy.json").read_text()
        return _parse(json.loads(text), "shipped profiles")
    return _parse(read_json(path), str(path))


def _parse(raw: Any, file: str) -> Profiles:
    if not isinstance(raw, dict) or not isinstance(raw.get("models"), dict) or not raw["models"]:
        raise InputError("is not a profile file: it needs an object with 'models'", file=file)
    cpus = _axis(raw, "cpus_per_gpu", file)
    memory = _axis(raw, "memory_gb_per_gpu", file)
    models = {}
    for name, entry in raw["models"].items():
        if not isinstance(entry, dict):
            raise InputError("is not an object", file=file, field=f"models.{name}")
        models[name] = _model(name, entry, cpus, memory, file)
    return Profiles(str(raw.get("name", file)), str(raw.get("source", file)), models)


def _axis(raw: dict[str, Any], key: str, file: str) -> Floats:
    try:
        axis = np.asarray(raw[key], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise InputError("is missing or not a list of numbers", file=file, field=key) from None
    if axis.ndim != 1 or not len(axis) or not np.isfinite(axis).all() or axis[0] <= 0 or (np.diff(axis) <= 0).any():
        raise InputError("must be rising positive numbers", file=file, field=key)
    return axis


def _model(name: str, entry: dict[str, Any], cpus: Floats, memory: Floats, file: str) -> ModelProfile:
    where = f"models.{name}"
    try:
        table = np.asarray(entry.get("throughput"), dtype=np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.shape != (len(cpus), len(memory)) or not np.isfinite(table).all() or (table <= 0).any():
        raise InputError(
            f"must be {len(cpus)} rows (cores) of {len(memory)} positive numbers (memory)",
            file=file,
            field=f"{where}.throughput",
        )
    knee_c, knee_m = _knee(table)
    own = _Entry(entry, file, where)
    ideal, two_speed, gpu_speed = own.part("ideal"), own.part("two_speed"), own.part("gpu_speed")
    return ModelProfile(
        name=name,
        family=str(entry.get("class", "other")),
        iteration_s=own.number("iteration_s"),
        cpus_per_gpu=cpus,
        memory_gb_per_gpu=memory,
        throughput=table,
        ideal_cpus_per_gpu=ideal.number("cpus_per_gpu", float(cpus[knee_c])),
        ideal_memory_gb_per_gpu=ideal.number("memory_gb_per_gpu", float(memory[knee_m])),
        multi_node_factor=own.number("multi_node_factor", 1.0, most=1.0),
        two_speed={two_speed.key_as_number(ratio): _two_speed(two_speed.part(ratio)) for ratio in two_speed.content},
        gpu_speed={gpu_speed.key_as_gpu(gpu): gpu_speed.number(gpu) for gpu in gpu_speed.content},
    )


def _two_speed(entry: _Entry) -> TwoSpeed:
    return TwoSpeed(entry.number("iteration_s"), entry.number("speedup"), entry.number("cpus_per_gpu"))


@dataclass(frozen=True)
class _Entry:
    """An object of a profile file whose values are checked when they are read; `where`: its place in the file."""

    content: dict[str, Any]
    file: str
    where: str

    def part(self, key: str) -> _Entry:
        """Return the object at `key`; an empty one if there is none."""
        content = self.content.get(key, {})
        if not isinstance(content, dict):
            raise self._wrong(key, "is not an object")
        return _Entry(content, self.file, f"{self.where}.{key}")

    def number(self, key: str, default: float | None = None, most: float = math.inf) -> float:
        """Return the number at `key`, above 0 and at most `most`."""
        value = self.content.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, f"{value!r} is not a positive number")
        if value > most:
            raise self._wrong(key, f"{value:g} is more than {most:g}")
        return float(value)

    def key_as_number(self, key: str) -> float:
        """Parse a key that is a number above 0."""
        value = number_or_nan(key)
        if not (math.isfinite(value) and value > 0):
            raise self._wrong(key, f"{key!r} is not a number of cores per GPU")
        return value

    def key_as_gpu(self, key: str) -> str:
        """Parse a key that is a GPU model; returns its name in the catalog."""
        try:
            return find_gpu(key).name
        except InputError as error:
            raise self._wrong(key, error.message) from None

    def _wrong(self, key: str, message: str) -> InputError:
        return InputError(message, file=self.file, field=f"{self.where}.{key}")


def _knee(table: Floats) -> tuple[int, int]:
    """Return the indices of the smallest number of cores, and then of the smallest memory, with which the throughput is
    within 0.1 % of the table's best.
    """
    best = table.max() * 0.999
    rows = np.flatnonzero((table >= best).any(axis=1))
    c = int(rows[0])
    return c, int(np.flatnonzero(table[c] >= best)[0])
