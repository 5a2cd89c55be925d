"""Training clusters in virtual time: a compiled, event-driven engine."""
