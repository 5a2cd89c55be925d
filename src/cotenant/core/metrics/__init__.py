"""Pure functions of a record."""

from cotenant.core.extras import require

require("report", "numpy")
