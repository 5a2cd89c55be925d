"""Share and schedule GPUs among deep-learning tenants.

`cotenant.loop(loader, checkpoint=...)` is what a training program imports; see docs/howto/training-loop.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotenant.training.loop import loop as loop

__all__ = ["loop"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "loop":  # on first use: a command line that trains nothing does not pay for it
        from cotenant.training.loop import loop

        return loop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
