"""How a share is enforced on a GPU: a file per mechanism, and `registry`, the one list of them.

A new mechanism is one file here, its line in `registry.MECHANISMS`, a test and a line in docs/commands.md.
"""
