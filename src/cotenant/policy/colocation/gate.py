"""The rule of best-effort launches: a state machine over predicted times. shim/floor_rule.h is the same in C.

Times are whole nanoseconds, so that both give the same answers to the same events; a test compares them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WorkClass(enum.IntEnum):
    """What a piece of work needs most; 0 stands for no work."""

    NONE = 0
    UNKNOWN = 1
    MEMORY = 2
    COMPUTE = 3


class RuleKind(enum.IntEnum):
    """enum cotenant_floor_scheme: how BE launches are decided."""

    FREE = 0
    TEMPORAL = 1
    ORION = 2
    TIDAL = 3


@dataclass(frozen=True)
class Rule:
    """What does not change from launch to launch. `work_sms`: SMs the BE kernels fill (0: not known)."""

    kind: RuleKind
    interval_ns: int
    lead_ns: int = 0
    beside_permille: int = 0
    sm_threshold: int = 0
    work_class: WorkClass = WorkClass.UNKNOWN
    work_sms: int = 0


@dataclass
class GateState:
    """What is in flight, and what the rule remembers. See struct floor_state."""

    outstanding_ns: int = 0
    unfinished: int = 0
    busy_until_ns: int = 0
    batch_ns: int = 0
    batch_full: bool = False
    credit_ns: int = 0
    credit_at_ns: int = 0


def may_go(rule: Rule, state: GateState, active: WorkClass, next_ns: int, now_ns: int) -> bool:
    """May a BE launch that should take `next_ns` go, while LS work of class `active` (NONE: none) runs?"""
    if rule.kind is RuleKind.TEMPORAL:
        return active is WorkClass.NONE and state.outstanding_ns == 0
    if rule.kind is RuleKind.ORION:
        return _orion(rule, state, active)
    if rule.kind is RuleKind.TIDAL:
        return _tidal(rule, state, active, next_ns, now_ns)
    return True


def _orion(rule: Rule, state: GateState, active: WorkClass) -> bool:
    """Orion's rule (EuroSys'24): beside LS only work of the other class, or of unknown class, that fits the SMs; and no
    more than DUR_THRESHOLD between two drains, LS or not."""
    if active and rule.sm_threshold and rule.work_sms > rule.sm_threshold:
        return False
    if active > WorkClass.UNKNOWN and rule.work_class > WorkClass.UNKNOWN and active == rule.work_class:
        return False
    if not state.batch_full:
        return True
    if state.outstanding_ns > 0:
        return False
    state.batch_full, state.batch_ns = False, 0
    return True


def _tidal(rule: Rule, state: GateState, active: WorkClass, next_ns: int, now_ns: int) -> bool:
    """Beside LS: nothing, or one launch at a time from a credit growing by `beside_permille` of the time. Else: work in
    flight up to `interval_ns`, and a longer kernel `lead_ns` before the one in front of it should end."""
    passed_ns = now_ns - state.credit_at_ns if active and state.credit_at_ns else 0
    state.credit_at_ns = now_ns if active else 0
    state.credit_ns = min(state.credit_ns + passed_ns * rule.beside_permille // 1000, rule.interval_ns)
    if active:
        enough = state.credit_ns >= min(next_ns, rule.interval_ns)
        return rule.beside_permille > 0 and state.outstanding_ns == 0 and enough
    if state.outstanding_ns == 0 or state.outstanding_ns + next_ns <= rule.interval_ns:
        return True
    return state.unfinished <= 1 and state.busy_until_ns - now_ns <= rule.lead_ns


def went(rule: Rule, state: GateState, active: WorkClass, next_ns: int, now_ns: int) -> None:
    """The launch went."""
    state.busy_until_ns = max(state.busy_until_ns, now_ns) + next_ns
    state.outstanding_ns += next_ns
    if rule.kind is RuleKind.ORION:
        state.batch_ns += next_ns
        state.batch_full = state.batch_ns > rule.interval_ns
    if rule.kind is RuleKind.TIDAL and active:
        state.credit_ns -= next_ns


def ended(state: GateState, predicted_ns: int, now_ns: int) -> None:
    """A piece of the work in flight was seen to have ended; the rest begins about now."""
    state.outstanding_ns -= predicted_ns
    state.unfinished -= 1
    state.busy_until_ns = now_ns + state.outstanding_ns
