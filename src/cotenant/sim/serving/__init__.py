"""Simulates inference services in virtual time, request by request."""

from cotenant.core.extras import require

require("sim", "numpy", "numba")
