"""Throughput of training jobs by CPU cores and memory: tables, and how they are measured."""

from cotenant.core.extras import require

require("sim", "numpy")
