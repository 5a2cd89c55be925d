"""Traces of requests to language models (times, models, token counts): readers, generators, and texts of prompts."""

from cotenant.core.extras import require

require("sim", "numpy", "orjson")
