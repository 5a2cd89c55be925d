"""The rule of best-effort launches in plain Python: the oracle of the compiled rule, native/shim/floor/floor_rule.h.

Times are whole nanoseconds, so that both give the same answers to the same events.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.abi.floor import RuleKind, WorkClass

WINDOW_NS = 10_000_000  # after so much time without LS work, the scheme tidal adapts its budget
GAP_NS = 1_000_000
# largest budget scale, in thousandths; with it, LS work finds on average up to one event interval in flight
STRETCH = 4000
# a debt of idle time up to here is deferred, and then paid at once, so that kernels in a row can be timed
REST_NS = 200_000
LONGEST_NS = 1_000_000_000  # a limit, so that products of two times fit into 64 bits in C


@dataclass(frozen=True)
class Rule:
    """What does not change from launch to launch. `work_sms`: SMs the BE kernels fill (0: not known).
    `stretch_permille`: how far tidal's budget may grow for work that leaves the GPU dry (1000: not at all).
    `duty_cycle_permille`: part of the time that tidal lets BE keep the GPU busy while LS is idle (1000: all of it)."""

    kind: RuleKind
    budget_ns: int
    lead_ns: int = 0
    overlap_permille: int = 0
    sm_threshold: int = 0
    work_class: WorkClass = WorkClass.UNKNOWN
    work_sms: int = 0
    stretch_permille: int = 1000
    duty_cycle_permille: int = 1000

    @property
    def paced(self) -> bool:
        """Whether BE leaves the GPU idle between its launches."""
        return 0 < self.duty_cycle_permille < 1000


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
    open_ns: int = 0
    dry_ns: int = 0
    area_ns2: int = 0
    open_at_ns: int = 0
    stretch_permille: int = 0
    starved: bool = False
    owed_ns: int = 0


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
    """Beside LS: nothing, or one launch at a time from a credit growing by `overlap_permille` of the time. Else: work
    in flight up to `allowed_ns`, and a longer kernel `lead_ns` before the one in front of it should end."""
    passed_ns = now_ns - state.credit_at_ns if active and state.credit_at_ns else 0
    state.credit_at_ns = now_ns if active else 0
    state.credit_ns = min(state.credit_ns + passed_ns * rule.overlap_permille // 1000, rule.budget_ns)
    if active:
        state.open_at_ns = 0
        enough = state.credit_ns >= min(next_ns, rule.budget_ns)
        return rule.overlap_permille > 0 and state.outstanding_ns == 0 and enough
    if state.open_at_ns == 0:
        state.open_at_ns = now_ns
    if rule.paced and state.owed_ns >= REST_NS and now_ns < rested_at_ns(state):
        return False
    if state.outstanding_ns == 0 or state.outstanding_ns + next_ns <= allowed_ns(rule, state):
        return True
    return state.unfinished <= 1 and state.busy_until_ns - now_ns <= rule.lead_ns


def rested_at_ns(state: GateState) -> int:
    """When a paced program that stops now has been idle for what it owes."""
    return max(state.busy_until_ns, state.open_at_ns) + state.owed_ns


def allowed_ns(rule: Rule, state: GateState) -> int:
    """What tidal lets be in flight now."""
    return rule.budget_ns * max(1000, min(state.stretch_permille, rule.stretch_permille)) // 1000


def _adapt(rule: Rule, state: GateState) -> None:
    """The bound of the next window.

    A program that its host holds back launches ahead of its GPU when it can, and leaves it dry when the bound does not
    let it. LS work waits for what is in flight when it comes: on average for the mean over time. So for work that
    leaves the GPU dry the bound grows as long as that mean is below a quarter of what it may grow to, and shrinks again
    when the GPU is kept busy.
    """
    mean_ns = state.area_ns2 // state.open_ns
    most_ns = rule.budget_ns * rule.stretch_permille // STRETCH
    state.starved = state.dry_ns * 32 > state.open_ns
    now_permille = max(1000, state.stretch_permille)
    if state.starved and mean_ns * 4 < most_ns * 3:
        state.stretch_permille = min(now_permille * 5 // 4, max(1000, rule.stretch_permille))
    elif not state.starved or mean_ns > most_ns:
        state.stretch_permille = max(1000, now_permille * 4 // 5)
    state.open_ns = state.dry_ns = state.area_ns2 = 0


def _look_back(rule: Rule, state: GateState, now_ns: int) -> None:
    """A launch goes now: since the last one the work in flight has become less until `busy_until_ns`, then the GPU was
    dry. A longer gap than GAP_NS is a program that has nothing to do: running ahead would not help it; nor would it
    where the rule asks for gaps."""
    passed_ns = min(now_ns - state.open_at_ns, LONGEST_NS)
    left_ns = min(max(0, state.busy_until_ns - state.open_at_ns), LONGEST_NS)
    busy_ns = min(passed_ns, left_ns)
    state.open_at_ns = now_ns
    state.owed_ns = max(0, state.owed_ns - (passed_ns - busy_ns))
    if passed_ns - busy_ns > GAP_NS or rule.paced:
        return
    state.open_ns += passed_ns
    state.dry_ns += passed_ns - busy_ns
    state.area_ns2 += busy_ns * left_ns - busy_ns * busy_ns // 2
    if state.open_ns >= WINDOW_NS:
        _adapt(rule, state)


def went(rule: Rule, state: GateState, active: WorkClass, next_ns: int, now_ns: int) -> None:
    """The launch went."""
    if rule.kind is RuleKind.TIDAL and not active:
        _look_back(rule, state, now_ns)
    if rule.paced:
        state.owed_ns += next_ns * (1000 - rule.duty_cycle_permille) // rule.duty_cycle_permille
    state.busy_until_ns = max(state.busy_until_ns, now_ns) + next_ns
    state.outstanding_ns += next_ns
    if rule.kind is RuleKind.ORION:
        state.batch_ns += next_ns
        state.batch_full = state.batch_ns > rule.budget_ns
    if rule.kind is RuleKind.TIDAL and active:
        state.credit_ns -= next_ns


def ended(state: GateState, predicted_ns: int, now_ns: int) -> None:
    """A piece of the work in flight was seen to have ended; the rest begins about now. If there is none, the GPU may
    have been dry for a while, since the work should have ended."""
    state.outstanding_ns -= predicted_ns
    state.unfinished -= 1
    rest = state.outstanding_ns > 0
    state.busy_until_ns = now_ns + state.outstanding_ns if rest else min(state.busy_until_ns, now_ns)
