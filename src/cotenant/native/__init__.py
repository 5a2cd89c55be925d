"""Finds the compiled libraries that the agent and tenants' programs load, and the environment that loads them."""
