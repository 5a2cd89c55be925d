"""Executors: how the controller reaches nodes, by local processes or Ray."""
