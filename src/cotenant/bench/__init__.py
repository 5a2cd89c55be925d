"""Benchmarks that users can run. Each measures its own baseline in the same run and prints a ratio to it."""
