"""Policies for inference services: plans of GPU pieces, batch dispatch, autoscaling."""

from cotenant.core.extras import require

require("plan", "numpy", "numba")
