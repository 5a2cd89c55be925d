"""Latency of served models by batch size and partition of a GPU: tables, files, interference between neighbours."""

from cotenant.core.extras import require

require("plan", "numpy")
