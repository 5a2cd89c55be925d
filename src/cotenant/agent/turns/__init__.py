"""Turns: exclusive time slices of a GPU, granted by the token broker."""
