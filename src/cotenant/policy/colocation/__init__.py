"""Latency-sensitive (LS) and best-effort (BE) work on one GPU: schemes, the rule for BE launches, the in-flight
budget.
"""

from cotenant.policy.colocation.budget import CurvePoint, choose_budget
from cotenant.policy.colocation.clock import next_duty
from cotenant.policy.colocation.division import APART, LOOK_NS, QUIET_NS, next_parts, share_ns
from cotenant.policy.colocation.schemes import SCHEMES, ColocationSettings, Scheme, scheme_named, settings_for

__all__ = [
    "APART",
    "LOOK_NS",
    "QUIET_NS",
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
