"""Checks that tenants have the share they were given, and detects processes that use the agent's GPUs without it."""
