"""Elastic profiles: training speed by GPU model, number of GPUs and batch, and with another job on the same GPU.

Two kinds of measurement are read. `rate`: work per second for each GPU model and count, at the job's own batch (as in
Gavel). `steps`: seconds per step, and the synchronisation in it, for each GPU model, count and batch per GPU, with the
gradient noise scale over the training (as in Sia). For models with `steps`, work is counted in examples of full
statistical efficiency, and the batch with the highest goodput is used.
"""

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

Floats = NDArray[np.float64]
_ByGpu = dict[str, dict[int, Floats]]
SHIPPED = ("gavel", "sia")
BATCHES = 50  # number of total batch sizes that are tried, in geometric steps from the smallest to the largest


@dataclass(frozen=True)
class StepTimes:
    """Seconds per training step, and the part of them for which a GPU waits for the gradients of other GPUs, at `batch`
    examples per GPU (ascending).
    """

    batch: Floats
    step_s: Floats
    sync_s: Floats


@dataclass(frozen=True)
class ElasticModel:
    """The elastic profile of one model. `rate[gpu][count]`: work per second by phase of the training (an array; one
    phase if speed does not depend on progress); `batch[gpu][count]`: examples per step at that rate, by phase (empty if
    the job keeps its own batch); `apart[gpu][count]`: factor on the rate when the gang spans more nodes than necessary;
    `work`: work of a whole training, NaN if the trace states it; `restart_s`: time of a restart, NaN: unknown.
    """

    name: str
    family: str
    rate: dict[str, dict[int, Floats]]
    apart: dict[str, dict[int, float]] = field(default_factory=dict)
    work: float = math.nan
    restart_s: float = math.nan
    batch: dict[str, dict[int, Floats]] = field(default_factory=dict)


@dataclass(frozen=True)
class ElasticProfiles:
    """A set of elastic models. `beside[gpu][a, b]`: speed of model a when it shares a GPU with model b, as a fraction
    of the speed of a alone; `price[gpu]`: dollars per GPU and hour.
    """

    name: str
    source: str
    phases: int
    models: dict[str, ElasticModel]
    beside: dict[str, dict[tuple[str, str], float]]
    price: dict[str, float] = field(default_factory=dict)

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for model in self.models.values():
            found.setdefault(model.family, []).append(model.name)
        return {family: tuple(names) for family, names in found.items()}


def efficiency(batch: Floats, first_batch: float, noise: float) -> Floats:
    """Return the training progress per example at a batch size relative to that at `first_batch`. With the gradient
    noise scale `noise` in examples it is (noise + first_batch) / (noise + batch), after Pollux (OSDI'21, equation 7).
    """
    return np.asarray((noise + first_batch) / (noise + batch))


def goodput(times: StepTimes, count: int, batch_range: tuple[float, float], noise: float) -> tuple[float, float]:
    """Return the goodput: the largest number of examples of full efficiency per second on `count` GPUs over all batch
    sizes, and the batch that has it; 0 and 0 if no batch fits.

    A batch is split over the GPUs; if a part is larger than the largest measured one, gradients are accumulated over
    several passes without synchronisation. Between measured batches, times are interpolated.
    """
    least, most = batch_range
    low = max(least, float(times.batch[0]) * count)
    if low > most:
        return 0.0, 0.0
    total = np.geomspace(low, most, BATCHES)
    each = total / count
    passes = np.ceil(each / times.batch[-1] - 1e-8)
    part = each / passes
    step = np.interp(part, times.batch, times.step_s)
    sync = np.interp(part, times.batch, times.sync_s)
    rate = total / (step + (passes - 1) * (step - sync)) * efficiency(total, least, noise)
    rate = np.where(part >= times.batch[0] - 1e-8, rate, 0.0)
    best = int(np.argmax(rate))
    return float(rate[best]), float(total[best])


def load_elastic(name: str) -> ElasticProfiles:
    """Return shipped elastic profiles (`gavel`, `sia`), or a JSON file in the same form; InputError names file and
    field.
    """
    if name in SHIPPED:
        text = resources.files("cotenant.profiles").joinpath(f"data/elastic-{name}.json").read_text()
        return _Reader(name).profiles(json.loads(text))
    if not Path(name).exists():
        raise InputError(f"is neither a file nor a shipped profile; shipped are {', '.join(SHIPPED)}", file=name)
    return _Reader(name).profiles(read_json(name))


@dataclass(frozen=True)
class _Reader:
    """Reads values of an elastic profile and checks them. Errors name `file`."""

    file: str

    def profiles(self, raw: Any) -> ElasticProfiles:
        if not isinstance(raw, dict) or not isinstance(raw.get("models"), dict) or not raw["models"]:
            raise InputError("is not an elastic profile: it needs an object with 'models'", file=self.file)
        models = {name: self._model(name, entry) for name, entry in raw["models"].items()}
        phases = max(len(rates) for m in models.values() for by in m.rate.values() for rates in by.values())
        beside = {find_gpu(gpu).name: self._pairs(gpu, entry) for gpu, entry in raw.get("beside", {}).items()}
        prices = raw.get("price", {})
        price = {self._gpu(gpu, "price"): self._number(prices, gpu, "price") for gpu in prices}
        name, source = str(raw.get("name", self.file)), str(raw.get("source", ""))
        return ElasticProfiles(name, source, phases, models, beside, price)

    def _model(self, name: str, entry: Any) -> ElasticModel:
        where = f"models.{name}"
        if not isinstance(entry, dict) or ("rate" in entry) == ("steps" in entry):
            raise InputError("needs either 'rate' or 'steps'", file=self.file, field=where)
        apart: dict[str, dict[int, float]] = {}
        batch: _ByGpu = {}
        if "rate" in entry:
            rate = {
                gpu: {count: np.array([value]) for count, value in by.items()}
                for gpu, by in self._by_count(entry["rate"], f"{where}.rate").items()
            }
            apart = self._by_count(entry.get("apart", {}), f"{where}.apart")
        else:
            rate, batch = self._from_steps(entry, where)
        return ElasticModel(
            name,
            str(entry.get("class", "other")),
            rate,
            {
                gpu: {n: min(1.0, value / rate[gpu][n][0]) for n, value in by.items() if n in rate.get(gpu, {})}
                for gpu, by in apart.items()
            },
            self._number(entry, "work", where),
            self._number(entry, "restart_s", where, least=0.0),
            batch,
        )

    def _from_steps(self, entry: dict[str, Any], where: str) -> tuple[_ByGpu, _ByGpu]:
        """Return goodput and batch size of a model, each by GPU model, count and phase."""
        try:
            least, most = (float(x) for x in entry["batch"])
            noise = [float(x) for x in entry["noise"]]
        except (KeyError, TypeError, ValueError):
            what = "needs 'batch' (least, largest) and 'noise' by phase"
            raise InputError(what, file=self.file, field=where) from None
        rate: _ByGpu = {}
        batch: _ByGpu = {}
        for gpu, by in entry["steps"].items():
            name = self._gpu(gpu, where)
            rate[name], batch[name] = {}, {}
            for count, columns in by.items():
                table = np.asarray(columns, np.float64)
                if table.ndim != 2 or len(table) != 3 or (np.diff(table[0]) <= 0).any() or (table[1] <= table[2]).any():
                    raise InputError(
                        "must be three rows: increasing batch sizes, seconds per step, and seconds of synchronisation "
                        "in a step, fewer than those of the whole step",
                        file=self.file, field=f"{where}.steps.{gpu}.{count}",
                    )  # fmt: skip
                best = np.array([goodput(StepTimes(*table), int(count), (least, most), n) for n in noise])
                if (best > 0).all():
                    rate[name][int(count)], batch[name][int(count)] = best.T
        return rate, batch

    def _by_count(self, raw: Any, where: str) -> dict[str, dict[int, float]]:
        try:
            found = {gpu: {int(n): float(x) for n, x in by.items()} for gpu, by in raw.items()}
        except (AttributeError, TypeError, ValueError):
            raise InputError("must be work per second by GPU model and count", file=self.file, field=where) from None
        if any(n < 1 or not 0 < x < math.inf for by in found.values() for n, x in by.items()):
            raise InputError("must be positive numbers", file=self.file, field=where)
        return {self._gpu(gpu, where): by for gpu, by in found.items()}

    def _pairs(self, gpu: str, entry: Any) -> dict[tuple[str, str], float]:
        try:
            names, table = [str(n) for n in entry["models"]], np.asarray(entry["fraction"], np.float64)
        except (KeyError, TypeError, ValueError):
            table, names = np.empty(0), []
        if table.shape != (len(names), len(names)) or not ((table >= 0) & (table <= 1)).all():
            raise InputError(
                "must be one row and one column per model, with fractions between 0 and 1",
                file=self.file,
                field=f"beside.{gpu}",
            )
        return {
            (a, b): float(table[i, k]) for i, a in enumerate(names) for k, b in enumerate(names)
            if table[i, k] > 0 and table[k, i] > 0
        }  # fmt: skip

    def _gpu(self, name: str, where: str) -> str:
        try:
            return find_gpu(name).name
        except InputError as error:
            raise InputError(error.message, file=self.file, field=where) from None

    def _number(self, entry: dict[str, Any], key: str, where: str, least: float | None = None) -> float:
        """Return a number of the entry, above 0 or at least `least`; NaN if it has none."""
        value = entry.get(key, math.nan)
        number = not isinstance(value, bool) and isinstance(value, int | float) and value != math.inf
        if not number or (value <= 0 if least is None else value < least):
            what = "a positive number" if least is None else f"a number of at least {least:g}"
            raise InputError(f"{value!r} is not {what}", file=self.file, field=f"{where}.{key}")
        return float(value)
