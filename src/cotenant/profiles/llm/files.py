"""Files of language models' profiles: JSON, a row per model, times in ms.

{"format": "cotenant-llm-profile-1", "models": {"chat-8b": {
    "prefill_ms": {"base": 6, "per_token": 0.03, "per_pair": 0, "least": 0},
    "decode_ms": {"base": 6, "per_sequence": 0.02, "per_context": 5e-5},
    "request_ms": 3, "schedules_ahead": false, "kv_tokens": 200000, "step_tokens": 8192, "max_sequences": 256,
    "max_context": 32768, "weights": "16GiB", "gpu": "H100", "measured": {...}}}}

`prefill_ms` and `decode_ms` are the coefficients of the formula of step times in profile.py; `LlmProfile` there says
what the other fields mean (`request_ms`: `request_s` in ms, 0 by default).

A profile that comes with the package is a file llm-NAME.json in `cotenant/profiles/data`, and is found by NAME.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cotenant.core.checked import Memory, Strict, check
from cotenant.core.errors import InputError
from cotenant.core.jsonfile import read_json
from cotenant.profiles.llm.profile import H100_MEMORY, LlmProfile, StepTimes, parse_size, roofline

FORMAT = "cotenant-llm-profile-1"
SHIPPED = Path(str(resources.files("cotenant.profiles").joinpath("data")))


class _Prefill(Strict):
    base: float = Field(ge=0, lt=1e9)
    per_token: float = Field(ge=0, lt=1e9)
    per_pair: float = Field(0.0, ge=0, lt=1e9)
    least: float = Field(0.0, ge=0, lt=1e9)


class _Decode(Strict):
    base: float = Field(ge=0, lt=1e9)
    per_sequence: float = Field(0.0, ge=0, lt=1e9)
    per_context: float = Field(0.0, ge=0, lt=1e9)


class _Row(Strict):
    prefill_ms: _Prefill
    decode_ms: _Decode
    request_ms: float = Field(0.0, ge=0, lt=1e9)
    schedules_ahead: bool = False
    kv_tokens: int = Field(200_000, ge=1)
    step_tokens: int = Field(8192, ge=1)
    max_sequences: int = Field(256, ge=1)
    max_context: int = Field(32_768, ge=1)
    weights: Memory = 0
    gpu: str = ""
    measured: dict[str, Any] = Field(default_factory=dict)


class _File(Strict):
    format: Literal["cotenant-llm-profile-1"]
    models: dict[str, _Row] = Field(min_length=1)


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.name[len("llm-") : -len(".json")] for path in SHIPPED.glob("llm-*.json"))


def _place(spec: str | Path) -> Path:
    """Return the file that a profile's file name, or the name of a shipped profile, stands for."""
    if Path(spec).exists() or not (shipped := shipped_profiles()) or Path(spec).suffix == ".json":
        return Path(spec)
    if str(spec) in shipped:
        return SHIPPED / f"llm-{spec}.json"
    raise InputError(f"no such file; shipped profiles: {', '.join(shipped)}", file=spec)


def read_profiles(path: str | Path) -> dict[str, LlmProfile]:
    """Return the profiles of all models of a file, or of a shipped profile, by name. InputError with file and field of
    the first thing that is wrong.
    """
    path = _place(path)
    content = check(_File, read_json(path), path)
    return {name: _profile(name, row) for name, row in content.models.items()}


def _profile(name: str, row: _Row) -> LlmProfile:
    p, d = row.prefill_ms, row.decode_ms
    prefill, decode = (p.base, p.per_token, p.per_pair), (d.base, d.per_sequence, d.per_context)
    times = StepTimes(*(x / 1000 for x in (*prefill, *decode, p.least)))
    return LlmProfile(
        name, times, row.kv_tokens, row.step_tokens, row.max_sequences, row.max_context, row.weights, row.gpu,
        row.request_ms / 1000, row.schedules_ahead,
    )  # fmt: skip


def row_of(profile: LlmProfile, measured: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a model's row of a profile file, in the form that `read_profiles` reads."""
    t = profile.times
    row: dict[str, Any] = {
        "prefill_ms": {"base": t.prefill_base * 1e3, "per_token": t.per_token * 1e3, "per_pair": t.per_pair * 1e3,
                       "least": t.prefill_least * 1e3},
        "decode_ms": {"base": t.decode_base * 1e3, "per_sequence": t.per_sequence * 1e3,
                      "per_context": t.per_context * 1e3},
        "request_ms": profile.request_s * 1e3, "schedules_ahead": profile.schedules_ahead,
        "kv_tokens": profile.kv_tokens, "step_tokens": profile.step_tokens, "max_sequences": profile.max_sequences,
        "max_context": profile.max_context, "gpu": profile.gpu,
    }  # fmt: skip
    if profile.weights_bytes:
        row["weights"] = f"{profile.weights_bytes / 2**20:.0f}MiB"
    return row if measured is None else {**row, "measured": measured}


def add_row(path: str | Path, profile: LlmProfile, measured: dict[str, Any] | None = None) -> None:
    """Write a model's row into a profile file, and keep the other models' rows."""
    from cotenant.core.files import atomic_file

    content: dict[str, Any] = {"format": FORMAT, "models": {}}
    if Path(path).exists():
        read_profiles(path)
        content = read_json(path)
    content["models"][profile.name] = row_of(profile, measured)
    with atomic_file(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def find_profile(spec: str, name: str, memory_bytes: float = H100_MEMORY) -> LlmProfile:
    """Return a model's profile. If `spec` is a size such as 8b, the profile is estimated for a program that uses
    `memory_bytes` of GPU memory. Otherwise `spec` is a file or a shipped profile's name: the profile is the row with
    the model's name, or the only row.
    """
    size = parse_size(spec)
    if size is not None:
        return roofline(name, size, memory_bytes)
    rows = read_profiles(spec)
    if name not in rows and len(rows) > 1:
        raise InputError(f"has no model {name!r}; it has {', '.join(rows)}", file=spec)
    return rows.get(name) or next(iter(rows.values()))


def residual_of(path: str | Path, name: str) -> float | None:
    """Return the largest relative error of the fit of a model's measured profile; None if the file does not have it.
    The row is that of `find_profile`."""
    rows: dict[str, Any] = read_json(_place(path))["models"]
    row = rows.get(name) or next(iter(rows.values()))
    found = row.get("measured", {}).get("worst_residual")
    return float(found) if isinstance(found, (int, float)) else None
