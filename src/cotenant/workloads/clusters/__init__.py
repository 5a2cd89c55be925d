"""Clusters as users write them: 16x8, YAML, and the files of public simulators."""

from cotenant.core.extras import require

require("sim", "numpy", "polars")
