"""Policies for elastic jobs, which can run on several GPU models and on several numbers of GPUs. A policy chooses both
for each job, and some also choose which jobs share a GPU.
"""

from cotenant.core.extras import require

require("sim", "numpy", "highspy")
