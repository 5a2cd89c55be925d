"""Makes new serving plans when request rates change while the server runs, and applies them."""

from cotenant.core.extras import require

require("serve", "numpy", "numba")
