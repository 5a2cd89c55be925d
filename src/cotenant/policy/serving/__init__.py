"""Policies for inference services: plans that divide GPUs among services, the forming of batches, and autoscaling."""

from cotenant.core.extras import require

require("plan", "numpy", "numba")
