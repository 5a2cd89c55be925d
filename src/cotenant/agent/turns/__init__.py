"""Turns: time slices in which only one tenant may launch on a GPU; the agent's token broker grants them."""
