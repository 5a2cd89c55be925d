"""Dispatch: forms batches of requests and gives them to workers; holds the live state of the server."""

from cotenant.core.extras import require

require("serve", "numpy", "numba", "orjson")
