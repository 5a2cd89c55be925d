"""What runs a model inside a worker: one module per runtime, one list of them in base.py."""

from cotenant.core.extras import require

require("serve", "numpy")
