"""An event loop whose clock jumps to the next timer instead of waiting. Use it only for code that waits for nothing but
timers."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0 s. Files that are ready are handled, but the loop never waits for a file."""

    def __init__(self, late: Callable[[], float] = lambda: 0.0) -> None:
        """`late`: returns how many seconds late a wait ends; a real loop waits for whole milliseconds, rounded up."""
        self.now_s = 0.0
        loop = self

        class Jumps(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                loop.now_s += timeout + late() if timeout else 0.0
                return super().select(0)

        super().__init__(Jumps())

    def time(self) -> float:
        return self.now_s
