"""The agent of a node: token broker, memory ledger, mechanisms, launcher. Imports stay light: standard library only."""
