"""Dispatch: forms batches of requests and gives them to worker processes; holds the live state of the server."""

from cotenant.core.extras import require

require("serve", "numpy", "numba", "orjson")
