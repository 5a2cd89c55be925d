"""Training clusters in virtual time: a compiled, event-driven engine."""

from cotenant.core.extras import require

require("sim", "numpy", "numba", "polars")
