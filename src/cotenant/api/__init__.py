"""Cotenant from Python: what the command line does, with results that notebooks show as tables and charts.

`cotenant.simulate`, `compare`, `read_record`, `draw_trace`, `plan`, `predict` and `Agent` (docs/howto/python.md).
"""

from __future__ import annotations
