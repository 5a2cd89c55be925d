"""Processes that run models, on this machine or through Ray, and what starts and replaces them."""

from cotenant.core.extras import require

require("serve", "numpy")
