"""Predicts speeds on MIG slices from latencies measured under MPS. Numpy only.

Up to seven co-runners are measured at three active-thread levels (100, 50, 14 %). Each column (one co-runner) attends
to the six others through self-attention without positions, so the order of columns does not matter, and becomes a
distribution over known workloads. The prediction is the median of these workloads' latencies on MIG slices, weighted by
the distribution. The predictor is trained by bench/profiles/train_mps_mig.py. The file of the shipped predictor also
states its errors and the source of its training data.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.files import atomic_file
from cotenant.core.mig import Geometry

SHIPPED = "mps-mig-a100-40gb.npz"
DUMMY = np.array([0.8889, 1.0, 0.8889])
SLICES = ("7g", "4g", "3g")


def features(columns: np.ndarray) -> np.ndarray:
    """Convert latencies (..., 3), normalised by their maximum, to the features (..., 8) that the predictor reads: the
    latencies, their logarithms, and two ratios.
    """
    a, b, c = columns[..., 0:1], columns[..., 1:2], columns[..., 2:3]
    return np.concatenate([columns, 2 * np.log(columns), a / b, b / c], axis=-1)


def _gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def weighted_median(distribution: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the weighted medians of the columns of a table: weights (..., classes) and table (classes, t) give (...,
    t). Classes with NaN in a column are ignored for that column.
    """
    out = np.full((*distribution.shape[:-1], table.shape[1]), np.nan)
    for t in range(table.shape[1]):
        known = np.flatnonzero(~np.isnan(table[:, t]))
        order = known[np.argsort(table[known, t])]
        mass = np.cumsum(distribution[..., order], -1)
        out[..., t] = table[order[(mass >= 0.5 * mass[..., -1:]).argmax(-1)], t]
    return out


class MpsMigModel:
    """A trained predictor of speeds on MIG slices. `card`: description of its training and errors."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.card: dict[str, Any] = json.loads(str(arrays["card"]))
        self.names: list[str] = list(self.card["names"])
        self._p = {k: np.asarray(v, np.float32) for k, v in arrays.items() if k.startswith("m")}
        self._targets = np.asarray(arrays["targets"], np.float64)
        self._small = np.asarray(arrays["small"], np.float64)
        self._regression = np.asarray(arrays["regression"], np.float64)
        self._samples = np.asarray(arrays["samples"], np.float64)

    @classmethod
    def load(cls, path: str | Path | None = None) -> MpsMigModel:
        """Load a model file, by default the shipped one. InputError if the file is not a model."""
        if path is None:
            return _shipped()
        arrays = _read_npz(path)
        try:
            return cls(arrays)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"is no MPS -> MIG model file ({error})", file=path) from None

    def posterior(self, mps: np.ndarray) -> np.ndarray:
        """Return how probable each known workload is for each job of n mixes of jobs, as the mean over the networks of
        the ensemble: shape (n, 7 jobs, workloads). `mps`: the jobs' latencies under MPS, shape (n, 3 MPS levels, 7
        jobs).
        """
        columns = normalised(mps).transpose(0, 2, 1)
        x = features(columns)
        members = int(self.card["members"])
        total = np.zeros((*columns.shape[:2], len(self.names)))
        for m in range(members):
            z = ((x - self._p[f"m{m}/mean"]) / self._p[f"m{m}/std"]).astype(np.float32)
            total += _softmax(self._forward(f"m{m}", z))
        return total / members

    def _layer(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ self._p[f"{name}/w"] + self._p[f"{name}/b"])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x * self._p[name] / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))

    def _forward(self, m: str, x: np.ndarray) -> np.ndarray:
        heads = int(self.card["heads"])
        h = self._layer(f"{m}/in2", _gelu(self._layer(f"{m}/in1", x)))
        for i in range(int(self.card["blocks"])):
            b = f"{m}/blocks/{i}"
            z = self._norm(h, f"{b}/g1")
            n, width, size = z.shape[0], z.shape[1], z.shape[2]
            q, k, v = (self._layer(f"{b}/{name}", z).reshape(n, width, heads, -1) for name in "qkv")
            weight = _softmax(np.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(size // heads))
            h = h + self._layer(f"{b}/o", np.einsum("bhnm,bmhd->bnhd", weight, v).reshape(n, width, size))
            h = h + self._layer(f"{b}/down", _gelu(self._layer(f"{b}/up", self._norm(h, f"{b}/g2"))))
        return self._layer(f"{m}/cls", self._norm(h, f"{m}/g"))

    def predict(self, mps: np.ndarray) -> np.ndarray:
        """Predict latencies on the slices 7g/4g/3g, shape (n, 3, 7), from latencies under MPS at 100/50/14 %, shape (n,
        3, 7). The predicted latencies are relative to the largest latency of their column.
        """
        return weighted_median(self.posterior(mps), self._targets).transpose(0, 2, 1)

    def predict_speeds(self, mps: np.ndarray, geo: Geometry) -> np.ndarray:
        """Predict the speed of each job on each kind of slice, relative to the whole GPU: shape (n mixes, 7 jobs, kinds
        of geo). `mps`: latencies under MPS, shape (n mixes, 3 percentages, 7 jobs).
        """
        distribution = self.posterior(mps)
        large = weighted_median(distribution, self._targets)
        small = weighted_median(distribution, self._small)
        # Not every known workload was measured on 2g and 1g. The regression is used for a slice on which most of the
        # workloads that resemble the job were not measured.
        known = (distribution @ ~np.isnan(self._small)) >= 0.5
        guess = self.small_slices(large[..., 0] / large[..., 1], large[..., 0] / large[..., 2])
        return by_kind(np.concatenate([large, np.where(known, small, guess)], -1), geo)

    def small_slices(self, speed_4g: np.ndarray, speed_3g: np.ndarray) -> np.ndarray:
        """Predict the speeds on 2g and 1g, an array (..., 2), by regression on the speeds on 4g and 3g. A predicted
        speed is at least 0 and at most the speed on 3g.
        """
        design = np.stack([np.ones_like(speed_4g), speed_4g, speed_3g], -1)
        return np.asarray(np.clip(design @ self._regression.T, 0.0, speed_3g[..., None]))

    def draw(self, rng: np.random.Generator, model: str, jobs: int, speeds: np.ndarray, geo: Geometry) -> np.ndarray:
        """Return a prediction of the workload's speeds on each kind of slice of `geo`, drawn at random: with the errors
        that the predictor makes if it measures the workload under MPS beside `jobs - 1` others.

        It is drawn from predictions for mixes outside the predictor's training set. If there are none for this
        workload, the relative errors of a random other workload are applied to `speeds`, its true speeds.
        """
        pools = self._samples[:, min(max(jobs, 1), 7) - 1]
        if model in self.names and not np.isnan(pools[self.names.index(model)]).all():
            row = pools[self.names.index(model), int(rng.integers(pools.shape[1]))]
            return by_kind(row, geo)
        while True:
            other = int(rng.integers(len(self.names)))
            row = pools[other, int(rng.integers(pools.shape[1]))]
            if not np.isnan(row[:3]).any():
                break
        truth = np.concatenate([self._targets[other], self._small[other]])
        return np.asarray(speeds * np.nan_to_num(by_kind(row, geo) / by_kind(truth, geo), nan=1.0, posinf=1.0))

    def evaluate(self, mps: np.ndarray, mig: np.ndarray | None) -> dict[str, Any]:
        """Return the predictor's mean absolute error over the columns of real jobs; without targets only how many
        columns were predicted.
        """
        predicted = self.predict(mps)
        if mig is None:
            return {"mae": None, "mae_by_slice": None, "n_columns": int(predicted.shape[0] * predicted.shape[2])}
        truth = normalised(mig, "Y").transpose(0, 2, 1)
        if len(truth) != len(predicted):
            raise InputError(
                f"Y has shape {mig.shape} and X has {np.shape(mps)}; both need the same number of mixes", field="Y"
            )
        real = np.abs(truth - DUMMY).max(-1) > 5e-4
        gap = np.abs(predicted.transpose(0, 2, 1) - truth)[real]
        if not len(gap):
            raise InputError("every column of Y is a dummy; there is nothing to compare", field="Y")
        by_slice = {name: float(gap[:, i].mean()) for i, name in enumerate(SLICES)}
        return {"mae": float(gap.mean()), "mae_by_slice": by_slice, "n_columns": len(gap)}


def normalised(latencies: np.ndarray, field: str = "X") -> np.ndarray:
    """Check latencies (X under MPS or Y on slices), of shape (n, 3, 7) or (3, 7), and return them as (n, 3, 7) with
    each column divided by its maximum. Raises InputError for another shape or an invalid value.
    """
    array = np.asarray(latencies)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or array.shape[1:] != (3, 7) or not len(array):
        rows = "levels 100/50/14 %" if field == "X" else "slices 7g/4g/3g"
        raise InputError(
            f"{field} has shape {np.shape(latencies)}; it must be (n, 3, 7): {rows} by seven co-runners", field=field
        )
    if array.dtype.kind not in "fiu":
        raise InputError(f"{field} holds {array.dtype}, not numbers", field=field)
    array = array.astype(np.float64)
    wrong = ~(np.isfinite(array) & (array > 0))
    if wrong.any():
        n, level, column = (int(v) for v in np.argwhere(wrong)[0])
        raise InputError(
            f"{field}[{n}, {level}, {column}] is {array[n, level, column]}; a latency must be above 0 (run a dummy "
            "where there is no seventh job, and leave out a mix in which one ran out of memory)",
            field=field,
        )
    return np.asarray(array / array.max(axis=1, keepdims=True))


def by_kind(row: np.ndarray, geo: Geometry) -> np.ndarray:
    """Return speeds by kind of slice (..., kinds), from (..., 5): latencies on 7g/4g/3g and speeds on 2g/1g. The speed
    on 1g+me is that on 1g.
    """
    speed = {"7g": np.ones(row.shape[:-1]), "4g": row[..., 0] / row[..., 1], "3g": row[..., 0] / row[..., 2]}
    speed |= {"2g": row[..., 3], "1g": row[..., 4], "1g+": row[..., 4]}
    return np.stack([speed[kind] for kind in geo.kinds], -1)


@cache
def _shipped() -> MpsMigModel:
    with files("cotenant.profiles").joinpath("data", SHIPPED).open("rb") as file, np.load(file) as data:
        return MpsMigModel({k: data[k] for k in data.files})


def _read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """Return all arrays of an npz file; InputError if the file is not one."""
    try:
        # the file is checked before np.load, which would also try .npy and pickle and then print misleading errors
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith(".npy")]
        with np.load(path, allow_pickle=False) as data:
            return {n.removesuffix(".npy"): data[n] for n in names}
    except (OSError, ValueError, EOFError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot read it as an npz file ({reason})", file=path) from None


def read_measurements(path: str | Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Read X (n, 3, 7) and, if present, Y from an npz file."""
    arrays = _read_npz(path)
    if "X" not in arrays:
        raise InputError(f"the file has no array X; it has {', '.join(arrays) or 'none'}", file=path)
    return arrays["X"], arrays.get("Y")


def write_predictions(path: str | Path, latencies: np.ndarray, speeds: np.ndarray) -> None:
    """Write an npz file with P (n, 3, 7) and S (n, 7, kinds) atomically."""
    with atomic_file(path) as file:
        np.savez_compressed(file.buffer, P=latencies, S=speeds)
