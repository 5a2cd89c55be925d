"""Policies for elastic jobs, which can run on several GPU models and on several numbers of GPUs. A policy chooses the
GPU model and the number of GPUs for each job, and some also choose which jobs share a GPU.
"""

from cotenant.core.extras import require

require("sim", "numpy", "highspy")
