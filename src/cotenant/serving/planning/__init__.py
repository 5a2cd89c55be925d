"""Replanning for changing request rates while the server runs."""

from cotenant.core.extras import require

require("serve", "numpy", "numba")
