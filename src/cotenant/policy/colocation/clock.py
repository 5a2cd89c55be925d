"""How much best-effort work a card's clock allows: a card at its power limit slows everybody down, LS after BE, too."""

from __future__ import annotations

GAIN = 0.3  # of duty for what the clock lacks or has over, each look


def next_duty(duty: float, clock: float, wanted: float, least: float) -> float:
    """The part of the time that BE may keep the GPU busy until the next look.

    duty' = duty + GAIN (clock - wanted), within [least, 1]; clocks are parts of the card's highest. An integral
    controller: on an H200 beside products a point of duty is half a point of clock. The same gain both ways: looks
    differ by 1 to 2 %, and whatever falls faster than it rises settles above what is wanted by as much.
    """
    return min(1.0, max(least, duty + GAIN * (clock - wanted)))
