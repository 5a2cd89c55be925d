"""Simulates the serving of language models in virtual time: traces of tokens, batching for each step, shares of GPUs,
and loading and eviction of models."""

from cotenant.core.extras import require

require("sim", "numpy")
