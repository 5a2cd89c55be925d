"""Traces of training jobs: one reader per format, filters, synthetic generators."""

from cotenant.core.extras import require

require("sim", "numpy", "polars", "orjson")
