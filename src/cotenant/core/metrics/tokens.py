"""Metrics of requests to language models, simulated or live: TTFT, TPOT, attainment, goodput. Formulas are in
metrics.md.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Target:
    """The SLOs of a language model (limits of TTFT and TPOT); None means that there is no such SLO."""

    name: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class TokenTimes:
    """Times of n requests as arrays: index of the model, due time, times of the first and last token in seconds (NaN:
    never), numbers of tokens."""

    model: np.ndarray
    due_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    prompt: np.ndarray
    output: np.ndarray

    @property
    def ttft_ms(self) -> np.ndarray:
        """Return for each request the time in ms from its due time to its first token."""
        found: np.ndarray = (self.first_s - self.due_s) * 1e3
        return found

    @property
    def tpot_ms(self) -> np.ndarray:
        """Return for each request the mean time in ms between tokens after the first; NaN for answers of one token."""
        gaps = np.where(self.output > 1, self.output - 1, np.nan)
        found: np.ndarray = (self.last_s - self.first_s) / gaps * 1e3
        return found

    def csv(self, names: Sequence[str], outcomes: Sequence[str] = ()) -> str:
        """Return the requests as CSV, one row each. Cells for events that did not happen are empty. `outcomes`: how
        each request ended, for a last column `outcome`."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        heads = ["model", "due_s", "first_s", "last_s", "prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms"]
        table.writerow([*heads, "outcome"] if outcomes else heads)
        columns = (self.due_s, self.first_s, self.last_s, self.prompt, self.output, self.ttft_ms, self.tpot_ms)
        for row, (model, *cells) in enumerate(zip(self.model, *columns, strict=True)):
            shown = [f"{c}" if isinstance(c, np.integer) else "" if np.isnan(c) else f"{c:.6f}" for c in cells]
            table.writerow((names[model], *shown, *outcomes[row : row + 1]))
        return text.getvalue()

    def kept(self, targets: Sequence[Target]) -> np.ndarray:
        """Return whether each request was answered completely and within its model's SLOs."""
        ttft, tpot = (
            np.array([np.inf if t is None else t for t in column])[self.model]
            for column in ([t.ttft_ms for t in targets], [t.tpot_ms for t in targets])
        )
        late = (self.ttft_ms > ttft) | (np.nan_to_num(self.tpot_ms) > tpot)
        kept: np.ndarray = np.isfinite(self.last_s) & ~late
        return kept

    def rows(self, targets: Sequence[Target], duration_s: float) -> dict[str, dict[str, Any]]:
        """Return the figures of each model's requests, by the model's name."""
        kept = self.kept(targets)
        found = {}
        for index, target in enumerate(targets):
            found[target.name] = self._row(self.model == index, kept, duration_s) | {
                "ttft_target_ms": target.ttft_ms, "tpot_target_ms": target.tpot_ms
            }  # fmt: skip
        return found

    def total(self, targets: Sequence[Target], duration_s: float) -> dict[str, Any]:
        """Return the figures of `rows` over the requests of all models together."""
        return self._row(np.ones(len(self.model), bool), self.kept(targets), duration_s)

    def _row(self, mine: np.ndarray, kept: np.ndarray, duration_s: float) -> dict[str, Any]:
        whole = mine & np.isfinite(self.last_s)
        sent = int(mine.sum())
        return {
            "requests": sent,
            "answered": int(whole.sum()),
            "ttft_ms": _percentiles(self.ttft_ms[mine & np.isfinite(self.first_s)]),
            "tpot_ms": _percentiles(self.tpot_ms[whole & (self.output > 1)]),
            "attainment": float(kept[mine].mean()) if sent else None,
            "goodput_rps": float(kept[mine].sum() / duration_s),
            "output_tokens_per_s": float(self.output[whole].sum() / duration_s),
            "prompt_tokens_per_s": float(self.prompt[whole].sum() / duration_s),
        }


def _percentiles(values: np.ndarray) -> dict[str, float] | None:
    if not len(values):
        return None
    found = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean()), **{f"p{p}": float(x) for p, x in zip(PERCENTILES, found, strict=True)}}
