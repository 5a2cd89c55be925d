"""The compiled rule of best-effort launches decides as a plain one in Python."""

from __future__ import annotations

import dataclasses

import gate_oracle as oracle
from colocation_events import EVENTS, US
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.abi.floor import RuleKind, WorkClass
from cotenant.abi.rules import FloorRule, FloorState
from cotenant.native import rules
from cotenant.policy.colocation import APART, share_ns

# (work class, SMs) of each launch
LAUNCHES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 200)), min_size=60, max_size=60)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(RuleKind)),
    st.integers(1_000, 400 * US),
    st.integers(0, 50 * US),
    st.integers(0, 1000),
    st.integers(0, 132),
    st.sampled_from([0, 1000, 1500, 4000]),
    st.sampled_from([1000, 950, 700, 100]),
    LAUNCHES,
    EVENTS,
)
def test_c_and_python_decide_alike(
    kind: RuleKind, budget: int, lead: int, overlap: int, threshold: int, stretch: int, duty: int,
    launches: list[tuple[int, int]], events: list[tuple[int, int, int, bool]],
) -> None:  # fmt: skip
    """Every launch with the class and SMs of its own kernel."""
    state, c_state = oracle.GateState(), FloorState()
    pieces: list[int] = []
    now = 1
    for (work, sms), (active, length, passes, done) in zip(launches, events, strict=False):
        rule = oracle.Rule(kind, budget, lead, overlap, threshold, WorkClass(work), sms, stretch, duty)
        c_rule = FloorRule(
            scheme=kind, budget_ns=budget, lead_ns=lead, overlap_permille=overlap, sm_threshold=threshold,
            work_class=work, work_sms=sms, stretch_permille=stretch, duty_cycle_permille=duty,
        )  # fmt: skip
        now += passes
        if done and pieces:
            piece = pieces.pop(0)
            oracle.ended(state, piece, now)
            rules.ended(c_state, piece, now)
        goes = oracle.may_go(rule, state, WorkClass(active), length, now)
        assert goes == rules.may_go(c_rule, c_state, WorkClass(active), length, now)
        if goes:
            oracle.went(rule, state, WorkClass(active), length, now)
            rules.went(c_rule, c_state, WorkClass(active), length, now)
            state.unfinished += 1
            c_state.unfinished += 1
            pieces.append(length)
        for field in dataclasses.fields(state):
            assert getattr(state, field.name) == getattr(c_state, field.name), field.name
        assert oracle.allowed_ns(rule, state) == rules.allowed_ns(c_rule, c_state)
        assert oracle.rested_at_ns(state) == rules.rested_at_ns(c_state)


@given(st.integers(1_000, 10**9), st.one_of(st.integers(0, 5000), st.just(APART)))
def test_c_and_python_divide_alike(budget: int, parts: int) -> None:
    assert rules.library().gate_share_ns(budget, parts) == share_ns(budget, parts)
