"""Backends: what runs a model inside a worker. One module per runtime; the registry is serving/config/backends.py."""

from cotenant.core.extras import require

require("serve", "numpy")
