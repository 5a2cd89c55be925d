"""Simulates training clusters in virtual time, with a compiled event loop."""

from cotenant.core.extras import require

require("sim", "numpy", "numba", "polars")
