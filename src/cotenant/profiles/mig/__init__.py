"""Speeds on MIG slices: shipped table, predictor from MPS measurements."""

from cotenant.core.extras import require

require("sim", "numpy")
