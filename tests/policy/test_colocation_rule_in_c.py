"""The rule of best-effort launches in the shim's C decides as that of the simulator in Python."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
from colocation_events import EVENTS, US
from hypothesis import given, settings
from hypothesis import strategies as st
from native_sources import SHIM

from cotenant.abi.floor import RuleKind, WorkClass
from cotenant.policy.colocation import APART, GateState, Rule, ended, may_go, share_ns, went


class CRule(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("scheme", "beside", "sm_threshold", "work_class", "work_sms")] + [
        ("budget_ns", ctypes.c_int64),
        ("lead_ns", ctypes.c_int64),
        ("stretch", ctypes.c_uint32),
        ("duty", ctypes.c_uint32),
    ]


class CState(ctypes.Structure):
    _fields_ = [
        ("outstanding_ns", ctypes.c_int64),
        ("unfinished", ctypes.c_int64),
        ("busy_until_ns", ctypes.c_int64),
        ("batch_ns", ctypes.c_int64),
        ("batch_full", ctypes.c_bool),
        ("credit_ns", ctypes.c_int64),
        ("credit_at_ns", ctypes.c_int64),
        ("open_ns", ctypes.c_int64),
        ("dry_ns", ctypes.c_int64),
        ("area_ns2", ctypes.c_int64),
        ("open_at_ns", ctypes.c_int64),
        ("stretch_permille", ctypes.c_int64),
        ("starved", ctypes.c_bool),
        ("owed_ns", ctypes.c_int64),
    ]


SOURCE = """
#include "floor/floor_rule.h"
int may_go(struct floor_rule *r, struct floor_state *s, uint32_t c, int64_t n, int64_t t)
{ return floor_may_go(r, s, c, n, t); }
void went(struct floor_rule *r, struct floor_state *s, uint32_t c, int64_t n, int64_t t)
{ floor_went(r, s, c, n, t); }
int64_t share(uint64_t i, uint64_t p) { return floor_share(i, p); }
void ended(struct floor_state *s, int64_t p, int64_t t) { floor_ended(s, p, t); }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("rule")
    (folder / "rule.c").write_text(SOURCE)
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", f"-I{SHIM}", "-o", str(folder / "rule.so"), str(folder / "rule.c")],
        check=True,
    )
    library = ctypes.CDLL(str(folder / "rule.so"))
    library.may_go.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64, ctypes.c_int64]
    library.went.argtypes = library.may_go.argtypes
    library.share.argtypes, library.share.restype = [ctypes.c_uint64, ctypes.c_uint64], ctypes.c_int64
    library.ended.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return library


LAUNCHES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 200)), min_size=60, max_size=60)  # class, SMs of each


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
    compiled: ctypes.CDLL, kind: RuleKind, interval: int, lead: int, beside: int, threshold: int, stretch: int,
    duty: int, launches: list[tuple[int, int]], events: list[tuple[int, int, int, bool]],
) -> None:  # fmt: skip
    """Every launch with the class and SMs of its own kernel."""
    state, c_state = GateState(), CState()
    pieces: list[int] = []
    now = 1
    for (work, sms), (active, length, passes, done) in zip(launches, events, strict=False):
        rule = Rule(kind, interval, lead, beside, threshold, WorkClass(work), sms, stretch, duty)
        c_rule = CRule(int(kind), beside, threshold, work, sms, interval, lead, stretch, duty)
        now += passes
        if done and pieces:
            piece = pieces.pop(0)
            ended(state, piece, now)
            compiled.ended(ctypes.byref(c_state), piece, now)
        goes = may_go(rule, state, WorkClass(active), length, now)
        assert goes == bool(compiled.may_go(ctypes.byref(c_rule), ctypes.byref(c_state), active, length, now))
        if goes:
            went(rule, state, WorkClass(active), length, now)
            compiled.went(ctypes.byref(c_rule), ctypes.byref(c_state), active, length, now)
            state.unfinished += 1
            c_state.unfinished += 1
            pieces.append(length)
        for field, _ in CState._fields_:
            assert getattr(state, field) == getattr(c_state, field), field


@given(st.integers(1_000, 10**9), st.one_of(st.integers(0, 5000), st.just(APART)))
def test_c_and_python_divide_alike(compiled: ctypes.CDLL, interval: int, parts: int) -> None:
    assert compiled.share(interval, parts) == share_ns(interval, parts)
