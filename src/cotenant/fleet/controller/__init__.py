"""The fleet controller: job table, decisions, orders to nodes."""

from cotenant.core.extras import require

require("fleet", "numpy", "numba")
