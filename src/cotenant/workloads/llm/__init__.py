"""Requests to language models: times, models, tokens in and out; readers, generators, texts."""

from cotenant.core.extras import require

require("sim", "numpy", "polars")
