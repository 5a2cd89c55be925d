"""Policies for inference services: plans that divide GPUs among services, batch dispatch, autoscaling."""

from cotenant.core.extras import require

require("plan", "numpy", "numba")
