"""Parsing and formatting of quantities with units: "40GiB", "30%", "5min", "8/h"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from cotenant.core.errors import InputError

_BYTES = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    # Kubernetes writes binary units without the letter B
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip
_SECONDS = {
    "us": 1e-6, "ms": 1e-3,
    "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
}  # fmt: skip
LEAST_MEMORY_BYTES = 1 << 20
MOST_MEMORY_BYTES = 1 << 62
_NUMBER = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*$")


def _split(text: str | float, field: str | None, example: str) -> tuple[float, str]:
    # the value may come from a file, so it may have any type
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise InputError(f"{str(text)[:80]} is not a quantity; write it like {example}", field=field)
    if isinstance(text, int | float):
        try:
            number, unit = float(text), ""
        except OverflowError:
            raise InputError(f"the number is too large; write it like {example}", field=field) from None
    else:
        match = _NUMBER.match(text)
        if not match:
            raise InputError(f"{text!r} is not a quantity; write it like {example}", field=field)
        number, unit = float(match.group(1)), match.group(2)
    if not math.isfinite(number):
        raise InputError(f"{text!r} is not a finite number; write it like {example}", field=field)
    if number < 0:
        raise InputError(f"{text!r} is negative; write it like {example}", field=field)
    return number, unit


def _finite(number: float, text: str | float, field: str | None) -> float:
    """Return the number. Raises InputError if the number became infinite when it was multiplied by its unit."""
    if not math.isfinite(number):
        raise InputError(f"{str(text)[:40]!r} is not a finite number", field=field)
    return number


def number_or_nan(text: Any) -> float:
    """Return the number that a text without unit states; NaN, which no comparison accepts, if it states none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def parse_bytes(text: str | float, field: str | None = None) -> int:
    """Return the bytes that a text states: "40GiB", "500 GB", "8Gi" or a plain number of bytes. Decimal and binary
    units differ, as in SI/IEC.
    """
    number, unit = _split(text, field, "40GiB or 500GB")
    if unit in ("K", "M", "G", "T", "k", "g"):  # of Slurm and Docker these are binary units, of Kubernetes decimal ones
        value, letter = f"{number:.12g}", unit.upper()
        raise InputError(f"{text!r} can mean two sizes; write {value}{letter}iB or {value}{letter}B", field=field)
    if unit and unit.upper() not in _BYTES:
        raise InputError(f"unknown memory unit {unit!r} in {text!r}; write it like 40GiB or 500GB", field=field)
    return round(_finite(number * _BYTES[unit.upper()] if unit else number, text, field))


def parse_memory(text: str | float, field: str | None = None) -> int:
    """Return the bytes of a memory limit: the unit is required, and the amount must be at least LEAST_MEMORY_BYTES.

    Raises InputError for a number without unit, which could be bytes, MiB or GiB, and for amounts too small for any
    program, which indicate a wrong unit ("8KB").
    """
    number, unit = _split(text, field, "8GiB or 500MB")
    if number == 0:
        raise InputError("memory must be over 0; write it like 8GiB or 500MB", field=field)
    if not unit and number >= MOST_MEMORY_BYTES:
        raise InputError(f"{str(text)[:40]!r} has no unit; write it like 8GiB or 500MB", field=field)
    if not unit:
        raise InputError(f"{str(text)[:40]!r} has no unit; write {meant(number, 'GiB', 'MiB')}", field=field)
    size = parse_bytes(text, field)
    if size < LEAST_MEMORY_BYTES:
        raise InputError(f"{str(text)[:40]!r} is less than 1 MiB; write it like 8GiB or 500MB", field=field)
    return size


def parse_memory_or_zero(text: str | float, field: str | None = None) -> int:
    """Parse a memory limit like `parse_memory`, but 0 is allowed and needs no unit."""
    return 0 if _split(text, field, "8GiB or 500MB")[0] == 0 else parse_memory(text, field)


def meant(number: float, large: str, small: str) -> str:
    """Return the memory that a number without unit probably means, as text. Numbers below 1024 get the unit `large`
    (GiB), numbers below 2^20 the unit `small` (MiB). Larger numbers count as bytes and are converted to `small`.
    """
    if number >= 1 << 20:
        return f"{number / (1 << 20):.12g}{small}"
    return f"{number:.12g}{large if number < 1024 else small}"


def parse_seconds(text: str | float, field: str | None = None) -> float:
    """Return the seconds that a text states: "5min", "300s", "250ms", "1.5h", "2d" or a plain number of seconds."""
    number, unit = _split(text, field, "300s, 5min or 1.5h")
    if unit and unit not in _SECONDS:
        raise InputError(f"unknown time unit {unit!r} in {text!r}; write it like 300s, 5min or 1.5h", field=field)
    return _finite(number * _SECONDS[unit] if unit else number, text, field)


def parse_time(text: str | float, field: str | None = None) -> float:
    """Return the seconds that a text with a unit states, where a plain number could mean milliseconds as well as
    seconds: "100ms", "5s", or 0. Raises InputError for another plain number."""
    number, unit = _split(text, field, "100ms or 5s")
    if number and not unit:
        raise InputError(f"'{text}' has no unit; write {number:g}ms or {number:g}s", field=field)
    return parse_seconds(text, field)


def parse_fraction(text: str | float, field: str | None = None, *, most: float = 1.0) -> float:
    """Return the fraction that a text states: "30%" or 0.3, at most `most`."""
    number, unit = _split(text, field, "30% or 0.3")
    if unit not in ("", "%"):
        raise InputError(f"unknown unit {unit!r} in {text!r}; write it like 30% or 0.3", field=field)
    value = number / 100.0 if unit == "%" else number
    if value > most:
        meant_as = number if number <= 100 * most else 30
        hint = "" if unit else f" (a plain number is a fraction: write {meant_as:g}% or {meant_as / 100:g})"
        raise InputError(f"{text!r} is over {most:.0%}{hint}", field=field)
    return value


def parse_rate_per_s(text: str | float, field: str | None = None) -> float:
    """Return the events per second that a text states: "8/h", "2/min", "0.5/s" or a plain number per second."""
    if isinstance(text, str) and "/" in text:
        number_text, _, unit = text.partition("/")
        number, own_unit = _split(number_text, field, "8/h")
        if own_unit or unit.strip() not in _SECONDS:
            raise InputError(f"{text!r} is not a rate; write it like 8/h, 2/min or 0.5/s", field=field)
        return _finite(number / _SECONDS[unit.strip()], text, field)
    number, unit = _split(text, field, "8/h")
    if unit:
        raise InputError(f"{text!r} is not a rate; write it like 8/h, 2/min or 0.5/s", field=field)
    return number


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: 1 job, 12,345 jobs. `many`: the plural of `one`, if it is not `one` + s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_memory(n: int) -> str:
    """Return an amount of memory as text for users: in binary units if that gives a whole number, else in decimal ones:
    1 TiB, 768 GiB, 62.5 GB.
    """
    for power, unit in ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB")):
        if n >= power and n % power == 0:
            return f"{n // power:,} {unit}"
    power, unit = next((found for found in ((10**15, "PB"), (10**12, "TB")) if n >= found[0]), (10**9, "GB"))
    return f"{n / power:.4g} {unit}"


def format_bytes(n: float) -> str:
    """Return a number of bytes as text for users, in binary units: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def sms_text(sms: Mapping[str, int] | None) -> str:
    """Return a tenant's SMs in words, or an empty text if there is nothing to say. `sms` has three numbers of SMs:
    "reserved" for the tenant, "at_most" (the most that its share allows; 0: not known), and "seen" (the most that one
    of its processes sees; 0: not known).
    """
    if not sms or not sms["at_most"]:
        return ""
    # the driver allots SMs in multiples of a fixed number, to which "at_most" is not rounded; what a program sees is
    # exact
    most = min(sms["at_most"], sms.get("seen") or sms["at_most"])
    if sms["reserved"] >= most:
        return f"{sms['reserved']} SMs reserved"
    return f"{sms['reserved']} to {most} SMs" if sms["reserved"] else f"at most {most} SMs"


def format_ms(ms: float) -> str:
    """Return milliseconds as text to one decimal, without a trailing zero: 108, 376.9."""
    return f"{round(ms, 1):.12g}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text for users: 350 ms, 42 s, 5.2 min, 3.1 h, 2.4 d."""
    size = abs(seconds)
    if size < 1:
        return f"{seconds * 1e3:.0f} ms"
    for limit, scale, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if size < limit:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 86400:.4g} d"
