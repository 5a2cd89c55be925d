"""The planner process: `python -m cotenant.serving.planning.main`, with requests on its standard input.

Planning runs compiled code that holds the interpreter lock for milliseconds to seconds, which would block the gateway.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from cotenant.core import pickles
from cotenant.core.errors import InputError
from cotenant.serving.planning.planner import Ask, Planner


def main() -> int:
    """Answer requests for plans until the gateway ends."""
    # 1 is PR_SET_PDEATHSIG: the kernel kills this process when its parent ends
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    source, write = pickles.take_streams()
    problem, name = pickles.read(source)
    planner = Planner(problem, name)
    os.nice(5)  # a lower CPU priority than that of the gateway, which serves requests
    while True:
        try:
            ask: Ask = pickles.read(source)
        except EOFError:
            return 0
        try:
            write(planner.answer(ask))
        except InputError as error:
            write(str(error))


if __name__ == "__main__":
    sys.exit(main())
