"""The planner process: `python -m cotenant.serving.planning.main`, asked over its standard input.

Planning takes milliseconds to seconds of compiled code that holds the interpreter, which the gateway cannot wait for.
A message is 8 bytes of length and a pickle; so is an answer.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from typing import BinaryIO

from cotenant.core.errors import InputError
from cotenant.serving.planning.planner import LENGTH, Ask, Planner


def read(stream: BinaryIO) -> object | None:
    """One message, None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))  # type: ignore[no-any-return]


def main() -> int:
    """Answer until the gateway is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    first = read(source)
    assert isinstance(first, tuple)
    problem, name = first
    planner = Planner(problem, name)
    os.nice(5)  # requests matter more
    while True:
        ask = read(source)
        if ask is None:
            return 0
        assert isinstance(ask, Ask)
        try:
            answer: object = planner.answer(ask)
        except InputError as error:
            answer = str(error)
        data = pickle.dumps(answer)
        sink.write(LENGTH.pack(len(data)) + data)
        sink.flush()


if __name__ == "__main__":
    sys.exit(main())
