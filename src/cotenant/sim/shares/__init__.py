"""Simulates the tenants of one node in virtual time, with the share policy that the agent runs."""
