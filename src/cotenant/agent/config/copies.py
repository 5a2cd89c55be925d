"""Settings of copy turns as they are written: `copies:` of an agent's configuration, and the command line's options."""

from __future__ import annotations

import dataclasses
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.units import parse_bytes
from cotenant.policy.copies import CopySettings

_SIZES = {
    "chunk": "chunk_bytes",
    "period": "period_bytes",
    "small": "small_bytes",
    "slice": "slice_bytes",
    "alone": "alone_bytes",
}
MOST_LEAD_US = 1_000_000
_PACED = ("stream", "thread")


def parse_copies(data: Any) -> CopySettings:
    """`copies: true`, or a mapping: period, chunk, alone, small, slice (sizes),
    in_flight, lead_us, paced (stream or thread).

    Copies take turns on every GPU once the setting is there; `copies: false` is the default.
    """
    if isinstance(data, bool):
        return CopySettings(always=data)
    if not isinstance(data, dict):
        raise InputError("write true, or a mapping such as {period: 8MiB}", field="copies")
    values: dict[str, Any] = {"always": True}
    for key, value in data.items():
        if key in _SIZES:
            values[_SIZES[key]] = parse_bytes(value, f"copies.{key}")
        elif key == "in_flight" and isinstance(value, int) and not isinstance(value, bool):
            values["in_flight"] = value
        elif key == "lead_us" and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LEAD_US:
            values["lead_ns"] = value * 1000
        elif key == "paced" and value in _PACED:
            values["host_paced"] = value == "thread"
        else:
            known = ", ".join([*_SIZES, "in_flight, lead_us (numbers)", "paced (stream or thread)"])
            raise InputError(f"{key}: {str(value)[:40]} is not a setting of copies; there are {known}", field="copies")
    return checked(**values)


def with_options(base: CopySettings, *, period: str | None, chunk: str | None) -> CopySettings | None:
    """`base` with --copy-period and --copy-chunk over it; None when neither was given."""
    settings = base
    for option, name, text in (("--copy-period", "period_bytes", period), ("--copy-chunk", "chunk_bytes", chunk)):
        if text is not None:
            values = dataclasses.asdict(settings) | {"always": True, name: parse_bytes(text, option)}
            settings = checked(option, **values)
    return None if period is None and chunk is None else settings


def checked(field: str = "copies", **values: Any) -> CopySettings:
    """CopySettings; InputError when a value is out of range."""
    try:
        return CopySettings(**values)
    except ValueError as error:
        raise InputError(str(error), field=field) from None
