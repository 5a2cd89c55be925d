"""The append-only event log of a run: schema, writer, reader."""

from cotenant.core.extras import require

require("report", "numpy", "polars")
