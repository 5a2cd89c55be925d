"""Plots, HTML pages and explanations of recorded runs."""

from cotenant.core.extras import require

require("report", "numpy")
