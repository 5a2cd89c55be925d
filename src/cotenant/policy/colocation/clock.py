"""How much best-effort work a card's clock allows: a card at its power limit slows everybody down, LS after BE, too."""

from __future__ import annotations

FALL = 0.5  # of duty for what the clock lacks, each look: half of what is missing after a few looks
RISE = 0.1  # for what it has over: a program of many phases is not let go at each of them


def next_duty(duty: float, clock: float, wanted: float, least: float) -> float:
    """The part of the time that BE may keep the GPU busy until the next look.

    duty' = duty + k (clock - wanted), within [least, 1], k = FALL below `wanted` and RISE above. Clocks are parts of
    the card's highest. An integral controller: on an H200 beside products a point of duty is half a point of clock.
    """
    over = clock - wanted
    return min(1.0, max(least, duty + (RISE if over > 0 else FALL) * over))
