"""The rule for best-effort (BE) launches in plain Python. Tests compare it with the compiled rule,
native/shim/floor/floor_rule.h. Times are whole nanoseconds, so that both give the same results for the same events.
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
    """Constants of the rule. `work_sms`: number of SMs that BE kernels fill (0: not known). `stretch_permille`: how far
    the in-flight budget of the scheme tidal may grow for work that leaves the GPU idle (1000: not at all).
    `duty_cycle_permille`: fraction of the time for which tidal lets BE keep the GPU busy while LS is idle (1000:
    always)."""

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
        """Whether the rule makes BE leave the GPU idle between its launches."""
        return 0 < self.duty_cycle_permille < 1000


@dataclass
class GateState:
    """The work in flight, and the state of the rule; see struct floor_state."""

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
    """Whether a BE launch that is predicted to take `next_ns` may go while LS work of class `active` (NONE: none)
    runs."""
    if rule.kind is RuleKind.TEMPORAL:
        return active is WorkClass.NONE and state.outstanding_ns == 0
    if rule.kind is RuleKind.ORION:
        return _orion(rule, state, active)
    if rule.kind is RuleKind.TIDAL:
        return _tidal(rule, state, active, next_ns, now_ns)
    return True


def _orion(rule: Rule, state: GateState, active: WorkClass) -> bool:
    """Orion's rule (EuroSys'24): while LS runs, BE may launch only kernels of the other class, or of unknown class,
    that fit on the free SMs. With or without LS, it may launch no more than DUR_THRESHOLD between two drains."""
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
    """The scheme tidal. While LS runs, BE launches nothing, or one kernel at a time from a credit that grows by
    `overlap_permille` of the time. Otherwise BE may have up to `allowed_ns` of work in flight, and may launch a longer
    kernel `lead_ns` before the predicted end of the one in front of it."""
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
    """Time at which a paced program that stops now has been idle for as long as it must be."""
    return max(state.busy_until_ns, state.open_at_ns) + state.owed_ns


def allowed_ns(rule: Rule, state: GateState) -> int:
    """How much work tidal allows in flight now."""
    return rule.budget_ns * max(1000, min(state.stretch_permille, rule.stretch_permille)) // 1000


def _adapt(rule: Rule, state: GateState) -> None:
    """Set the in-flight budget of the next window. A program that its host holds back launches ahead of the GPU if it
    can, and leaves the GPU idle if the budget prevents that. On average, LS work waits for the mean over time of the
    work in flight. So for work that leaves the GPU idle the budget grows as long as that mean is below a quarter of its
    largest value, and it shrinks again when the GPU is kept busy.
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
    """Update the state at a launch. Since the previous launch the work in flight decreased until `busy_until_ns`, and
    then the GPU was idle. A gap longer than GAP_NS means that the program had nothing to do, so a larger budget would
    not help it. Nor would it if the rule itself requires gaps."""
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
    """Record a launch."""
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
    """Record the end of a launch batch in flight; the next one begins about now. If there is none, the GPU may have
    been idle since the predicted end."""
    state.outstanding_ns -= predicted_ns
    state.unfinished -= 1
    rest = state.outstanding_ns > 0
    state.busy_until_ns = now_ns + state.outstanding_ns if rest else min(state.busy_until_ns, now_ns)
