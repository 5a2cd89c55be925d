"""Partition policies: which MIG layout each GPU has and who gets which instance."""

from cotenant.core.extras import require

require("sim", "numpy", "numba")
