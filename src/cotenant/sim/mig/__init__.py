"""Simulates policies that partition GPUs by MIG, in virtual time."""

from cotenant.core.extras import require

require("sim", "numpy", "numba", "polars")
