"""Duty cycle of best-effort work from the card's clock: at its power limit a card slows down all work, also LS work
after BE work.
"""

from __future__ import annotations

GAIN = 0.3  # change of the duty cycle per unit of clock error, at each update


def next_duty(duty: float, clock: float, wanted: float, least: float) -> float:
    """The fraction of the time that BE may keep the GPU busy until the next update.

    duty' = duty + GAIN (clock - wanted), within [least, 1]; clocks are fractions of the card's highest. An integral
    controller: on an H200 with matrix products, one point of duty changes the clock by half a point. The gain is the
    same in both directions: readings differ by 1 to 2 %, and a controller that falls faster than it rises would settle
    above the wanted clock.
    """
    return min(1.0, max(least, duty + GAIN * (clock - wanted)))
