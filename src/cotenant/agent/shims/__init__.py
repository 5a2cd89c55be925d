"""Connections of the shims in tenants' processes: assigns each process to its tenant and answers its messages."""
