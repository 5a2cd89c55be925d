"""Lets all ranks of a job stop after the same step, because otherwise the remaining ranks would wait in a collective
for ever."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any


class Gang:
    """The ranks of a job, which stop together. This class is for a job with a single process."""

    rank = 0
    world = 1

    def agree(self, leave: bool, save: bool) -> tuple[bool, bool]:
        """Return whether all ranks stop, and whether all save, after this step. Every rank must call this method after
        every step. `leave`, `save`: whether this rank requests to stop, or to save.
        """
        return leave, save

    def together(self, well: bool = True) -> bool:
        """Wait until every rank has called this method. Returns whether all ranks passed True."""
        return well

    def close(self) -> None:
        """End the communication between ranks. Every rank must call this method at the end of the loop."""


class TorchGang(Gang):
    """The ranks of torch.distributed's default group, which communicate through a separate group on the CPU. After each
    step every rank adds its requests (stop, save) to a sum that all ranks read after the next step. The exchange runs
    concurrently with that step, so it takes no extra time."""

    def __init__(self, torch: Any) -> None:
        dist = torch.distributed
        self._torch, self._dist = torch, dist
        self._group = dist.new_group(backend="gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._wishes: Any = None
        self._work: Any = None

    def agree(self, leave: bool, save: bool) -> tuple[bool, bool]:
        """Do as `Gang.agree` says. The result has the requests that ranks made one step before."""
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
        troubles = self._torch.tensor([0 if well else 1], dtype=self._torch.int32)
        self._dist.all_reduce(troubles, group=self._group)
        return bool(troubles.item() == 0)

    def close(self) -> None:
        """Do as `Gang.close` says. This ends Gloo's threads: a thread that still runs when the interpreter ends aborts
        the process in about one exit of ten. A job that stopped with a checkpoint would then count as failed.
        The program may use the default group until its last line. So that group is destroyed only at exit, unless the
        program has destroyed it itself.
        """
        self._read()
        self._dist.destroy_process_group(self._group)
        atexit.register(self._destroy_default)

    def _destroy_default(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def find_gang() -> Gang:
    """Return the ranks of this job: those of torch.distributed if it is initialized, otherwise this process alone."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchGang(torch)
    return Gang()


def apart_rank() -> int:
    """Return the rank of this process in a job of several processes (WORLD_SIZE) that do not communicate by
    torch.distributed; otherwise 0.
    """
    return stated_rank() if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") else 0


def stated_rank() -> int:
    """Return the rank in the environment variable RANK; 0 if it is not set."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0
