"""Settings of an agent about contents that leave the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.units import parse_bytes, parse_fraction

GRANULE = 2 << 20  # of memory behind addresses, as the driver makes it
LARGEST_PIECE = 16 << 30


def parse_swap(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of AgentConfig from those of `data` that are there. InputError names the one that is wrong."""
    values: dict[str, Any] = {}
    if "swap_memory" in data:
        values["swap_memory_bytes"] = parse_bytes(data["swap_memory"], "swap_memory")
    if "most_moving" in data:
        values["most_moving"] = parse_moving(data["most_moving"], "most_moving")
    if "swap_piece" in data:
        values["swap_piece_bytes"] = parse_piece(data["swap_piece"], "swap_piece")
    if "swap_hand" in data:
        if not isinstance(data["swap_hand"], bool):
            raise InputError("write true or false", field="swap_hand")
        values["swap_hand"] = data["swap_hand"]
    return values


def parse_moving(value: Any, name: str) -> float:
    """The fraction of time that may go to moving: 0.1 % to 90 %."""
    fraction = parse_fraction(value, name)
    if not 0.001 <= fraction <= 0.9:
        raise InputError("write 0.1 % to 90 %", field=name)
    return fraction


def parse_piece(value: Any, name: str) -> int:
    """The largest unit that moves, in whole granules of the driver."""
    size = parse_bytes(value, name)
    if not GRANULE <= size <= LARGEST_PIECE or size % GRANULE:
        raise InputError("write a multiple of 2 MiB up to 16 GiB", field=name)
    return size
