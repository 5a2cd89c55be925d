"""Tenants of one node in virtual time, against the same share policy that the agent runs."""
