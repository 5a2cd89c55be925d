"""Latency-sensitive (LS) beside best-effort (BE) work on one GPU: schemes, the rule of BE launches, the budget."""

from cotenant.policy.colocation.budget import CurvePoint, choose_budget
from cotenant.policy.colocation.clock import next_duty
from cotenant.policy.colocation.gate import GateState, Rule, WorkClass, allowed_ns, ended, may_go, went
from cotenant.policy.colocation.schemes import SCHEMES, ColocationSettings, Scheme, scheme_named, settings_for

__all__ = [
    "SCHEMES",
    "ColocationSettings",
    "CurvePoint",
    "GateState",
    "Rule",
    "Scheme",
    "WorkClass",
    "allowed_ns",
    "choose_budget",
    "ended",
    "may_go",
    "next_duty",
    "scheme_named",
    "settings_for",
    "went",
]
