"""Share and schedule GPUs among deep-learning tenants.

`cotenant.loop(loader, checkpoint=...)` is what a training program imports (docs/howto/training-loop.md). For programs
and notebooks (docs/howto/python.md): `draw_trace`, `simulate`, `read_record`, `compare`, `plan`, `predict`, `Agent`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotenant.api.agent import Agent as Agent
    from cotenant.api.jobs import compare as compare
    from cotenant.api.jobs import draw_trace as draw_trace
    from cotenant.api.jobs import read_record as read_record
    from cotenant.api.jobs import simulate as simulate
    from cotenant.api.mig import predict as predict
    from cotenant.api.serving import plan as plan
    from cotenant.training.loop import loop as loop

__version__ = "0.1.0"

# name -> its module, which is imported at the first use, so that commands which do not train need not wait for it
_HOMES = {
    "loop": "cotenant.training.loop",
    **dict.fromkeys(("draw_trace", "simulate", "read_record", "compare"), "cotenant.api.jobs"),
    "plan": "cotenant.api.serving",
    "predict": "cotenant.api.mig",
    "Agent": "cotenant.api.agent",
}
__all__ = ["Agent", "compare", "draw_trace", "loop", "plan", "predict", "read_record", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
