"""Tenants of a node: admission, processes, state across restarts, launching."""
