"""Simulators in virtual time."""
