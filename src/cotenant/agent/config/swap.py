"""Parsing of the agent's settings about swapping tenants' GPU memory to host memory."""

from __future__ import annotations

from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.units import parse_bytes, parse_fraction

GRANULE = 2 << 20  # the driver maps memory in multiples of this size
LARGEST_PIECE = 16 << 30


def parse_moving(value: Any, name: str | None = None) -> float:
    """Parse the fraction of time that a GPU may spend on swapping memory: 0.1 % to 90 %."""
    fraction = parse_fraction(value, name)
    if not 0.001 <= fraction <= 0.9:
        raise InputError("write 0.1 % to 90 %", field=name)
    return fraction


def parse_piece(value: Any, name: str | None = None) -> int:
    """Parse the largest piece in which memory is swapped: a multiple of the driver's granularity."""
    size = parse_bytes(value, name)
    if not GRANULE <= size <= LARGEST_PIECE or size % GRANULE:
        raise InputError("must be a multiple of 2 MiB, up to 16 GiB", field=name)
    return size
