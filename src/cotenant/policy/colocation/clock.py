"""Sets the duty cycle of best-effort (BE) work from the GPU's clock frequency. At its power limit a GPU lowers its
clock frequency, which also slows down latency-sensitive work that follows BE work.
"""

from __future__ import annotations

GAIN = 0.3  # how much the duty cycle changes per unit of the clock's deviation from its target, at each update


def next_duty(duty: float, clock: float, wanted: float, least: float) -> float:
    """Return the fraction of the time in which BE work may keep the GPU busy until the next update.

    duty' = duty + GAIN (clock - wanted), within [least, 1]; clocks are fractions of the card's highest. This is an
    integral controller: on an H200 with matrix products, one point of duty changes the clock by half a point. The gain
    is the same in both directions: readings differ by 1 to 2 %, and a controller that lowers the duty cycle faster than
    it raises it would settle above the wanted clock.
    """
    return min(1.0, max(least, duty + GAIN * (clock - wanted)))
