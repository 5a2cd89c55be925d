"""Parsing of copy scheduling settings: `copies:` in the agent's configuration, and command-line options."""

from __future__ import annotations

import dataclasses
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.units import parse_bytes
from cotenant.policy.copies import CopySettings

_SIZES = ("period_bytes", "chunk_bytes")


def parse_copies(data: Any) -> CopySettings:
    """Parse the setting `copies`: true, false (the default), or a mapping.

    With true or a mapping, copies are scheduled on every GPU; with false, only on GPUs that have a latency-sensitive
    tenant or one with a copy weight. The mapping may set `chunk_bytes`, the size of the chunks into which copies are
    split, and `period_bytes`, which all waiting tenants copy together in one round.
    """
    if isinstance(data, bool):
        return CopySettings(always=data)
    if not isinstance(data, dict):
        raise InputError("must be true or a mapping such as {period_bytes: 8MiB}", field="copies")
    values: dict[str, Any] = {"always": True}
    for key, value in data.items():
        if key not in _SIZES:
            raise InputError(f"unknown setting {str(key)[:40]!r}; known: {', '.join(_SIZES)}", field="copies")
        values[key] = parse_bytes(value, f"copies.{key}")
    return checked(**values)


def with_options(base: CopySettings, *, period: str | None, chunk: str | None) -> CopySettings | None:
    """`base` overridden by --copy-period-bytes and --copy-chunk-bytes; None if neither was given."""
    settings = base
    for name, text in (("period_bytes", period), ("chunk_bytes", chunk)):
        option = f"--copy-{name.replace('_', '-')}"
        if text is not None:
            values = dataclasses.asdict(settings) | {"always": True, name: parse_bytes(text, option)}
            settings = checked(option, **values)
    return None if period is None and chunk is None else settings


def checked(field: str = "copies", **values: Any) -> CopySettings:
    """Return CopySettings with these sizes. Raises InputError if a size is out of range."""
    try:
        return CopySettings(**values)
    except ValueError as error:
        raise InputError(str(error), field=field) from None
