"""Request arrivals: arrival processes, recorded traces, scenario sets."""

from cotenant.core.extras import require

require("sim", "numpy")
