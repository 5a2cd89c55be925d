"""The agent's end of the process that calls the driver: what is said when there is no answer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from waiting import WITHIN_S

from cotenant.devices.checkpoint import Checkpointer, CheckpointError


class Helper(Checkpointer):
    """A Checkpointer whose process runs the given program."""

    def __init__(self, program: str) -> None:
        super().__init__(lambda: Path(sys.executable))
        self.program = program

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-c", self.program, stdin=pipe, stdout=pipe)


def said(program: str, op: str, pid: int = 0, within_s: float = WITHIN_S) -> str:
    async def ask() -> str:
        helper = Helper(program)
        try:
            with pytest.raises(CheckpointError) as caught:
                await helper.order(op, pid, within_s=within_s)
        finally:
            if helper._process is not None:
                await helper._stop(helper._process)
        return str(caught.value)

    return asyncio.run(ask())


def test_a_helper_that_ends_is_not_taken_for_one_that_is_slow() -> None:
    assert said("raise SystemExit(3)", "version").startswith(
        "the driver's version: the process that calls the driver has ended"
    )
    assert said("import sys; sys.stdin.readline()", "lock", 17).startswith("lock of process 17: the process that calls")


def test_a_helper_that_says_nothing_is_named_with_the_time_it_had() -> None:
    assert said("import time; time.sleep(60)", "lock", 17, within_s=1.0).endswith(": no answer within 1 s")


def test_the_driver_s_no_has_its_meaning() -> None:
    answer = 'import json; input(); print(json.dumps({"code": 801, "seconds": 0}), flush=True); input()'
    assert said(answer, "checkpoint", 17) == (
        "checkpoint of process 17: the driver does not support this call for the process"
        " (managed memory, IPC, MPS or MIG) (code 801)"
    )
