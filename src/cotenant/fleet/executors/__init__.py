"""How the controller reaches nodes: local processes or Ray."""
