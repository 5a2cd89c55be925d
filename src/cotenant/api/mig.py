"""Predicts a job's speeds on MIG instances from measurements under MPS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.api.arguments import checked
from cotenant.api.tables import html_table, text_table
from cotenant.core.errors import InputError
from cotenant.core.extras import needs
from cotenant.core.mig import geometry
from cotenant.profiles.mig.mps_mig import MpsMigModel, normalised

with needs("sim"):
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

KINDS = ("7g", "4g", "3g", "2g", "1g")


@dataclass(frozen=True)
class Prediction:
    """Predicted speeds on MIG instances, for n mixes of seven jobs. A notebook shows the first mix as a table."""

    latencies: NDArray[np.float64]  #: (n, 3, 7): latencies on 7g, 4g and 3g, divided by each job's largest latency
    speeds: NDArray[np.float64]  #: (n, 7, 5): speeds on 7g, 4g, 3g, 2g and 1g, relative to the whole GPU

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        rows = [[f"job {i}", *(f"{speed:.2f}" for speed in row)] for i, row in enumerate(self.speeds[0])]
        return ["speed on", *KINDS], rows

    def _repr_html_(self) -> str:
        return html_table(*self._texts())

    def __repr__(self) -> str:
        return text_table(*self._texts())


@checked
def predict(latencies: ArrayLike, *, model: str | Path | None = None) -> Prediction:
    """Predict speeds on MIG instances of an A100 from latencies measured under MPS.

    `latencies`: array (3, 7), or (n, 3, 7) for n mixes of jobs. Its rows are 100, 50 and 14 % of the SMs, its columns
    the seven jobs that run together; values are above 0, in any unit. `model`: a model file; by default the included
    one. InputError for an invalid shape or value.
    """
    trained = MpsMigModel.load(model)
    try:
        measured: Any = normalised(np.asarray(latencies), "latencies")
    except ValueError:  # rows of unequal length
        raise InputError("must be an array (3, 7) or (n, 3, 7) of numbers", field="latencies") from None
    slices = geometry("A100-40GB", double_memory=False)
    return Prediction(trained.predict(measured), trained.predict_speeds(measured, slices))
