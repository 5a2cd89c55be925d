"""Readers of cluster descriptions: NODESxGPUS such as 16x8, YAML files, and files of public simulators and traces."""

from cotenant.core.extras import require

require("sim", "numpy", "polars")
