"""Latency of served models by batch and partition: tables, files, interference between neighbours."""

from cotenant.core.extras import require

require("plan", "numpy")
