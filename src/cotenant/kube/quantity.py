"""Parsing of Kubernetes quantities; anything else is an InputError with one sentence.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from fractions import Fraction

from cotenant.core.errors import InputError
from cotenant.core.units import LEAST_MEMORY_BYTES, meant

_QUANTITY = re.compile(
    r"^([+-]?)([0-9]{1,30}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:([eE][+-]?[0-9]{1,2})|([A-Za-z]{0,3}))$"
)
_PLAIN = re.compile(r"[+]?[0-9.]+")
_PERCENT = re.compile(r"^([0-9]{1,6}(?:\.[0-9]{1,6})?|\.[0-9]{1,6})(%?)$")
_SUFFIXES = {"": Fraction(1)}
_SUFFIXES |= {letter: Fraction(1000) ** (i + 1) for i, letter in enumerate("kMGTPE")}
_SUFFIXES |= {f"{letter}i": Fraction(1024) ** (i + 1) for i, letter in enumerate("KMGTPE")}
_SUFFIXES |= {"m": Fraction(1, 1000), "u": Fraction(1, 10**6), "n": Fraction(1, 10**9)}
_WITH_B = {
    f"{suffix}B": scale for suffix, scale in _SUFFIXES.items() if len(suffix) == 2 or suffix in ("k", "M", "G", "T")
}
MOST_BYTES = 1 << 62


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_quantity(value: object, field: str) -> Fraction:
    """The number denoted by a Kubernetes quantity: 30, "30", "8Gi", "500M", "1e3", "250m"."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{_shown(value)} is not a quantity; write it like 30 or 8Gi", field=field)
    match = _QUANTITY.fullmatch(str(value))
    if not match or (suffix := match.group(4) or "") not in _SUFFIXES:
        raise InputError(f"{_shown(value)} is not a quantity; write it like 30 or 8Gi", field=field)
    sign, digits, exponent, _ = match.groups()
    number = Fraction(digits.rstrip(".") or "0") * _SUFFIXES[suffix]
    if exponent:
        number *= Fraction(10) ** int(exponent[1:])
    return -number if sign == "-" else number


def parse_count(value: object, field: str, most: int) -> int:
    """An integer from 0 to `most`."""
    number = parse_quantity(value, field)
    if number.denominator != 1 or not 0 <= number <= most:
        raise InputError(f"{_shown(value)} is not a whole number from 0 to {most:,}", field=field)
    return int(number)


def parse_memory(value: object, field: str) -> int:
    """Bytes, at least 1 MiB: "8Gi", "500M", and "8GiB" as elsewhere in Cotenant. The unit is required."""
    scale = Fraction(1)
    text = value
    if isinstance(value, str):
        digits = value.rstrip("kKMGTiB")
        if (suffix := value[len(digits) :]) in _WITH_B:
            text, scale = digits, _WITH_B[suffix]
    try:
        number = parse_quantity(text, field) * scale
    except InputError:
        raise InputError(
            f"{_shown(value)} is not an amount of memory; write it like 8Gi or 500M", field=field
        ) from None
    if number.denominator != 1 or not 0 < number < MOST_BYTES:
        raise InputError(
            f"{_shown(value)} is not a whole number of bytes above 0 and below 4Ei (4 * 2^60 bytes)", field=field
        )
    if _PLAIN.fullmatch(str(value)):
        raise InputError(f"{_shown(value)} has no unit; write {meant(int(number), 'Gi', 'Mi')}", field=field)
    if number < LEAST_MEMORY_BYTES:
        milli = str(value).endswith("m")
        hint = f"; m is a thousandth, write {str(value)[:-1]}Mi" if milli else "; write it like 8Gi or 500M"
        raise InputError(f"{_shown(value)} is less than 1 MiB{hint}", field=field)
    return int(number)


def parse_share(value: object, field: str) -> float:
    """Fraction of a GPU's time: "30%" or "0.3"."""
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise InputError(f"{_shown(value)} is not a share of a GPU; write it like 30% or 0.3", field=field)
    number = Fraction(match.group(1)) / (100 if match.group(2) else 1)
    if number > 1:
        hint = "" if match.group(2) else ": a plain number is a fraction, write 30% or 0.3"
        raise InputError(f"{_shown(value)} is over 100% of a GPU{hint}", field=field)
    return float(number)
