"""Rates of copies between a GPU and host memory: assumed at first, then measured."""

from __future__ import annotations

from dataclasses import dataclass, field

BLEND = 0.3  # weight of a new measurement in the running average of a rate
# moves of fewer bytes are not used to measure the rate, because nearly all of their time is a fixed cost
LEAST_BYTES = 64 << 20


@dataclass
class MoveRates:
    """Rates of copies between GPU and host memory: bytes per second out of the GPU and into it, alone and in each
    direction while both run; and the fixed time of a move in seconds. The defaults are those of one H100 (PCIe 5.0 x16,
    pinned host memory).
    """

    out_bps: float = 52e9
    in_bps: float = 48e9
    both_bps: float = 37e9
    fixed_s: float = 0.01
    seen: set[str] = field(default_factory=set)

    def seconds(self, out_bytes: int, in_bytes: int) -> float:
        """Return the time in seconds of a move of memory in both directions, which overlap: min(out, in) at `both_bps`,
        the rest at the rate of its direction.
        """
        if not out_bytes and not in_bytes:
            return 0.0
        together = min(out_bytes, in_bytes)
        rest = (out_bytes - together) / self.out_bps + (in_bytes - together) / self.in_bps
        return self.fixed_s + together / self.both_bps + rest

    def observe(self, out_bytes: int, in_bytes: int, seconds: float) -> None:
        """Update the rates with the measured time of a switch, which moved bytes out of the GPU and into it."""
        if seconds <= 0.0 or max(out_bytes, in_bytes) < LEAST_BYTES:
            return
        if not in_bytes:
            self.out_bps = self._blend("out", self.out_bps, out_bytes, seconds)
        elif not out_bytes:
            self.in_bps = self._blend("in", self.in_bps, in_bytes, seconds)
        elif 0.5 < out_bytes / in_bytes < 2.0:
            before = self.both_bps
            self.both_bps = self._blend("both", before, max(out_bytes, in_bytes), seconds)
            # a direction that was never measured alone is assumed to be faster or slower by the same factor
            factor = self.both_bps / before
            self.out_bps *= 1.0 if "out" in self.seen else factor
            self.in_bps *= 1.0 if "in" in self.seen else factor

    def _blend(self, way: str, before: float, size: int, seconds: float) -> float:
        """Return the present rate of direction `way` combined with the measured time of a move of `size` bytes; the
        first measurement replaces the assumed value.

        How much of the measured time was the fixed part is not known: between nothing and `fixed_s`. So the move shows
        only between which two rates the true one is. They are nearly the same for a large move; for a small one they
        are far apart, and a rate between them stays as it is.
        """
        copying_s = seconds - self.fixed_s
        measured = max(before, size / seconds)
        if copying_s > 0.0:
            measured = min(measured, size / copying_s)
        if way not in self.seen:
            self.seen.add(way)
            return measured
        return before + BLEND * (measured - before)
