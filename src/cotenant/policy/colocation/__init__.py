"""Decides how latency-sensitive (LS) and best-effort (BE) work share one GPU: the co-location schemes, the rule for BE
launches, and the budget of BE work in flight.
"""

from cotenant.policy.colocation.budget import CurvePoint, choose_budget
from cotenant.policy.colocation.clock import next_duty
from cotenant.policy.colocation.division import APART, LOOK_NS, QUIET_NS, next_parts, share_ns
from cotenant.policy.colocation.schemes import (
    RUN_AHEAD,
    SCHEMES,
    ColocationSettings,
    Scheme,
    scheme_named,
    settings_for,
)

__all__ = [
    "APART",
    "LOOK_NS",
    "QUIET_NS",
    "RUN_AHEAD",
    "SCHEMES",
    "ColocationSettings",
    "CurvePoint",
    "Scheme",
    "choose_budget",
    "next_duty",
    "next_parts",
    "scheme_named",
    "settings_for",
    "share_ns",
]
