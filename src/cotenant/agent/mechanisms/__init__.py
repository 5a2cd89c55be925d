"""Mechanisms: how a share is enforced on a GPU. One file per mechanism, and `registry`, the only list of them.

A new mechanism is one file here, its line in `registry.MECHANISMS`, a test and a line in docs/commands.md.
"""
