"""Python interface of Cotenant: the functions of the command line, with results that notebooks show as tables and
charts.

`cotenant.simulate`, `compare`, `read_record`, `draw_trace`, `plan`, `predict` and `Agent` (docs/howto/python.md).
"""

from __future__ import annotations
