"""Language models in virtual time: token traces, iteration-level batching, shares of GPUs, loading and eviction."""

from cotenant.core.extras import require

require("sim", "numpy")
