"""Policies for training jobs. A policy is an ordering of the jobs, an allotment of CPU and memory to each, and a
placement on nodes.
"""

from cotenant.core.extras import require

require("sim", "numpy", "numba")
