"""Simulators; they run in virtual time."""
