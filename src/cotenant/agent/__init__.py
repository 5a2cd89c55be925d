"""The agent of a node: token broker, memory ledger, mechanisms, launcher. Imports only the standard library at
start-up.
"""
