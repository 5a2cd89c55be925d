"""Worker processes, on this machine or through Ray, and their start and replacement."""

from cotenant.core.extras import require

require("serve", "numpy")
