"""Comparisons a user can run; each prints a ratio against its own baseline."""
