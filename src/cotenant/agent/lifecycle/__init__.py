"""Lifecycle of tenants: admission, changes of the configuration, restarts of the agent, end."""
