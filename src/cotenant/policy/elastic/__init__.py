"""Policies for jobs that run on several GPU models and counts: who gets which model, how many, and beside whom."""

from cotenant.core.extras import require

require("sim", "numpy", "highspy")
