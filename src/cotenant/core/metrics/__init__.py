"""Metrics of a run, as pure functions of its record."""

from cotenant.core.extras import require

require("report", "numpy")
