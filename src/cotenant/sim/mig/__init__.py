"""MIG partition policies in virtual time."""

from cotenant.core.extras import require

require("sim", "numpy", "numba", "polars")
