"""The ranks of one job: they must leave after the same step, or those that stay would wait in a collective for ever."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any


class Gang:
    """One process alone."""

    rank = 0
    world = 1

    def agree(self, leave: bool, save: bool) -> tuple[bool, bool]:
        """Whether all leave, and whether all save, after this step; called by every rank after every step."""
        return leave, save

    def together(self, well: bool = True) -> bool:
        """Returns once every rank has called it: whether all is well with all of them."""
        return well

    def close(self) -> None:
        """Called after everything else of the loop, on every rank."""


class TorchGang(Gang):
    """The ranks of torch.distributed's default group, through a group of their own on the CPU.

    After each step every rank adds its wish to a sum that the next step reads: the exchange runs beside the step and
    costs it nothing, and all ranks read the same sum.
    """

    def __init__(self, torch: Any) -> None:
        dist = torch.distributed
        self._torch, self._dist = torch, dist
        self._group = dist.new_group(backend="gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._wishes: Any = None
        self._work: Any = None

    def agree(self, leave: bool, save: bool) -> tuple[bool, bool]:
        """See Gang; all ranks know a wish one step later."""
        wanted = self._read()
        self._wishes = self._torch.tensor([leave, save], dtype=self._torch.int32)
        self._work = self._dist.all_reduce(self._wishes, group=self._group, async_op=True)
        return wanted

    def _read(self) -> tuple[bool, bool]:
        if self._work is None:
            return False, False
        self._work.wait()
        self._work = None
        leave, save = self._wishes.tolist()
        return leave > 0, save > 0

    def together(self, well: bool = True) -> bool:
        """See Gang."""
        troubles = self._torch.tensor([0 if well else 1], dtype=self._torch.int32)
        self._dist.all_reduce(troubles, group=self._group)
        return bool(troubles.item() == 0)

    def close(self) -> None:
        """See Gang.

        Gloo's threads must have ended before the interpreter does: one that is still at work aborts the process in
        about one exit of ten, and a job that left with a checkpoint would count as failed. The default group is the
        program's own until its last line, so it is destroyed only after that, and only where the program did not.
        """
        self._read()
        self._dist.destroy_process_group(self._group)
        atexit.register(self._destroy_default)

    def _destroy_default(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def find_gang() -> Gang:
    """The gang this process is in: torch.distributed's where that is initialised."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchGang(torch)
    return Gang()


def apart_rank() -> int:
    """The rank of a process that was started as one of several and trains by itself; 0 for any other."""
    return stated_rank() if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") else 0


def stated_rank() -> int:
    """The rank that the launcher stated, 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0
