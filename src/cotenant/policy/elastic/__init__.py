"""Policies for elastic jobs, which can run on several GPU models and counts: they choose model, count and co-located
jobs.
"""

from cotenant.core.extras import require

require("sim", "numpy", "highspy")
