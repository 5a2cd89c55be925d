"""Mechanisms: ways to enforce a tenant's share of a GPU. One file per mechanism, and `registry`, the only list of them.

A new mechanism is one file here, its line in `registry.MECHANISMS`, a test and a line in docs/commands.md.
"""
