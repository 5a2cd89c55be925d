"""Traces of requests to language models as arrays, and the changes to a trace before it is replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.units import counted

MAX_TOKENS = 10_000_000
MAX_REQUESTS = 50_000_000


@dataclass(frozen=True)
class TokenOptions:
    """Options for reading a token trace. Only requests of the `duration_s` seconds from `start_s` on are read. `seed`:
    for formats with random requests.
    """

    start_s: float = 0.0
    duration_s: float = float("inf")
    seed: int = 0


@dataclass(frozen=True)
class TokenTrace:
    """n requests as arrays of shape (n,), in ascending order of time: seconds from the start, index into `models`,
    tokens of prompt and output, and tokens of the prompt that were in a prefix cache. `models` is ("",) if the format
    has none. `left_out`: number of removed rows by reason."""

    source: str
    models: tuple[str, ...]
    times_s: np.ndarray
    model: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    cached: np.ndarray
    left_out: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.times_s)

    @property
    def span_s(self) -> float:
        """Return the seconds from the start of the trace to the last request."""
        return float(self.times_s[-1]) if len(self) else 0.0

    def keep(self, rows: np.ndarray, reason: str = "") -> TokenTrace:
        """Return the requests for which `rows` is true. If a reason is given, the other requests are counted as left
        out for this reason.
        """
        gone = int(len(self) - rows.sum())
        left = dict(self.left_out)
        if reason and gone:
            left[reason] = left.get(reason, 0) + gone
        cut = {name: getattr(self, name)[rows] for name in ("times_s", "model", "prompt", "output", "cached")}
        return replace(self, left_out=left, **cut)

    def faster(self, speed: float) -> TokenTrace:
        """Return the trace with all times divided by `speed`."""
        if not 0 < speed < 1e6:
            raise InputError(f"a speed of {speed:g} is not above 0", field="speed")
        return replace(self, times_s=self.times_s / speed)

    def thinned(self, part: float, seed: int) -> TokenTrace:
        """Return a random subset of the requests that has each request with probability `part`. Bursts remain, at a
        lower rate.
        """
        return self if part >= 1 else self.keep(np.random.default_rng([seed, 1]).random(len(self)) < part)

    def fitting(self, most: Sequence[int]) -> TokenTrace:
        """Return the requests that fit the context of their model; `most`: tokens by model."""
        return self.keep(self.prompt + self.output <= np.array(most)[self.model], "longer than the model's context")

    def onto(self, names: Sequence[str], seed: int = 0) -> TokenTrace:
        """Return the requests, each assigned to one of the models `names`. If `names` has models of the trace, requests
        to these keep their model, and requests to other models are left out. If it has none, the requests to the most
        used model of the trace go to the first of `names`, those to the second most used model to the second, and so
        on; requests to the remaining models are left out. If the trace names no models, each request gets a random one.
        """
        if self.models == ("",):
            drawn = np.random.default_rng([seed, 2]).integers(len(names), size=len(self))
            return replace(self, models=tuple(names), model=drawn.astype(np.int32))
        if not set(self.models) & set(names):
            counts = np.bincount(self.model, minlength=len(self.models))
            order = np.argsort(-counts, kind="stable")[: len(names)]
            target = {int(old): new for new, old in enumerate(order)}
        else:
            target = {old: names.index(name) for old, name in enumerate(self.models) if name in names}
        table = np.array([target.get(old, -1) for old in range(len(self.models))], np.int32)
        model = table[self.model]
        found = replace(self, models=tuple(names), model=np.maximum(model, 0))
        return found.keep(model >= 0, "of models that are not simulated")

    def summary(self) -> dict[str, Any]:
        """Return statistics of the token trace, as plain data."""
        per = np.bincount(self.model, minlength=len(self.models))
        return {
            "source": self.source, "requests": len(self), "span_s": self.span_s,
            "requests_of": {name: int(n) for name, n in zip(self.models, per, strict=True)},
            "prompt_tokens": _spread(self.prompt), "output_tokens": _spread(self.output),
            "left_out": dict(self.left_out), "remarks": list(self.remarks),
        }  # fmt: skip


def _spread(values: np.ndarray) -> dict[str, float] | None:
    if not len(values):
        return None
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p99": float(p99), "max": float(values.max())}


def make_trace(
    source: str, times_s: Any, model: Any, prompt: Any, output: Any, models: Sequence[str] = ("",), cached: Any = None,
    left_out: Mapping[str, int] | None = None, remarks: Sequence[str] = (), options: TokenOptions | None = None,
    zero_s: float | None = None,
) -> TokenTrace:  # fmt: skip
    """Make a token trace from columns of a file: sort it, remove requests without prompt or output, and cut it to the
    time span of `options`. Time 0 is `zero_s`, or the first request if that is None.
    """
    options = options or TokenOptions()
    times = np.asarray(times_s, np.float64)
    order = np.argsort(times, kind="stable")
    notes = list(remarks)
    back = int((np.diff(times) < 0).sum())
    if back:
        notes.append(f"{counted(back, 'request was', 'requests were')} out of order; sorted by time")
    ins, outs, had = (
        np.asarray(c)[order].astype(np.int64)
        for c in (prompt, output, np.zeros(len(times)) if cached is None else cached)
    )
    which = np.zeros(len(times), np.int32) if model is None else np.asarray(model, np.int32)[order]
    times = times[order]
    times -= zero_s if zero_s is not None else times[0] if len(times) else 0.0
    whole = TokenTrace(source, tuple(models), times, which, ins, outs, had, dict(left_out or {}), tuple(notes))
    whole = whole.keep(whole.prompt > 0, "without a prompt")
    whole = whole.keep(whole.output > 0, "without an answer")
    start, end = options.start_s, options.start_s + options.duration_s
    cut = whole.keep((whole.times_s >= start) & (whole.times_s < end))
    if not len(cut):
        raise InputError(f"{source} has no requests left" + (f": {dict(cut.left_out)}" if cut.left_out else ""))
    return replace(cut, times_s=cut.times_s - start, cached=np.minimum(cut.cached, cut.prompt - 1))


def coded(names: Any) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the distinct names in order of first appearance, and for each of `names` its index among them."""
    index: dict[str, int] = {}
    codes = np.fromiter((index.setdefault(name, len(index)) for name in names), np.int32)
    return tuple(index), codes
