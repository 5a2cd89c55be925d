"""Partition policies: the MIG layout of each GPU, and the assignment of jobs to instances."""

from cotenant.core.extras import require

require("sim", "numpy", "numba")
