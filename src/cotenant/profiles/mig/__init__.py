"""Speeds on MIG slices: the included table, and the predictor from measurements under MPS."""

from cotenant.core.extras import require

require("sim", "numpy")
