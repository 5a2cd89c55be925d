"""The executor in virtual time."""
