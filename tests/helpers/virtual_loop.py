"""An event loop whose clock jumps to the next timer instead of waiting for it: for code that waits for nothing else."""

from __future__ import annotations

import asyncio
import selectors


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0 s; what is ready on files is seen, but not waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Jumps(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                loop.now_s += timeout or 0.0
                return super().select(0)

        super().__init__(Jumps())

    def time(self) -> float:
        return self.now_s
