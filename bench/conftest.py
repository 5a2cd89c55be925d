"""Fixtures of the benchmarks that run under pytest."""

from shared_fixtures import call, pytest_collection_modifyitems, shared

__all__ = ["call", "pytest_collection_modifyitems", "shared"]
