"""Hypothesis strategies that draw sequences of best-effort launches and latency-sensitive work, for tests of the launch
rule in Python and in C."""

from __future__ import annotations

from hypothesis import strategies as st

US = 1_000

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # class of the LS work
        st.one_of(st.integers(1, 2_000 * US), st.integers(1, 60_000_000 * US)),  # length of the launch
        st.one_of(st.integers(0, 500 * US), st.integers(0, 60_000_000 * US)),  # time that passes before it
        st.booleans(),  # whether the oldest launch batch has ended by then
    ),
    max_size=60,
)
