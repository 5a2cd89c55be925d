"""The agent of a node: it starts tenants, grants them turns on GPUs, and limits their shares and memory.

At start-up it imports only the standard library.
"""
