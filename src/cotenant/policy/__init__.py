"""Decisions as pure functions and state machines: no clock, no input or output, no randomness."""
