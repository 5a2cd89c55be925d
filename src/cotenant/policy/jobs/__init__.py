"""Policies for training jobs: orderings, CPU/memory allotments, placements."""

from cotenant.core.extras import require

require("sim", "numpy", "numba")
