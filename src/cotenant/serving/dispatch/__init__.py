"""Dispatch: from requests to batches; the live state of the server."""

from cotenant.core.extras import require

require("serve", "numpy", "numba", "orjson")
