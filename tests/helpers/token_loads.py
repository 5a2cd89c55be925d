"""Tenants for tests of the turn simulator, and the deviation of their shares from the granted ones."""

from __future__ import annotations

from typing import Any

from cotenant.policy.shares import SECOND_NS, Share
from cotenant.sim.shares.engine import Load, TokenResult


def saturated(name: str, request: float, limit: float = 1.0, **more: Any) -> Load:
    """A tenant that always has work."""
    return Load(name, Share(request=request, limit=limit), **more)


def worst_window_error(
    result: TokenResult, granted: dict[str, float], window_ns: int = 10 * SECOND_NS, step_ns: int = SECOND_NS // 4
) -> float:
    """Largest deviation of the share held from the share granted, over all tenants and all windows of that length (a
    window begins at every step)."""
    worst = 0.0
    start_ns = 0
    while start_ns + window_ns <= result.end_ns:
        for name, share in granted.items():
            got = result.held_ns(name, start_ns, start_ns + window_ns) / window_ns
            worst = max(worst, abs(got - share))
        start_ns += step_ns
    return worst
