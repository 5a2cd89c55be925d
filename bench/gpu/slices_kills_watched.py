"""A program that keeps kernels of 1 to 10 ms in flight and records when each of them ended:
`python -m slices_kills_watched FILE`.

It appends the time of each end to FILE as 8 bytes (ns of the monotonic clock, native order), so that another process
can read the times of a program that runs. It prints `ready NAME` (of the GPU), and ends with its standard input.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import threading
import time
from collections import deque

from cotenant.bench.driver import Driver
from cotenant.bench.workload import in_a_sentence

IN_FLIGHT = 3
SHORTEST_NS, LONGEST_NS = 1_000_000, 10_000_000


def main(arguments: list[str]) -> int:
    """Launch kernels until standard input ends. The only argument is FILE."""
    cuda, draw, ended = Driver(), random.Random(1), threading.Event()
    events = deque(cuda.event() for _ in range(IN_FLIGHT))
    # one write per kernel and no buffer, so that what has ended is in the file
    file = os.open(arguments[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    for event in events:
        cuda.launch(draw.randint(SHORTEST_NS, LONGEST_NS))
        cuda.record(event)
    print(f"ready {cuda.name}", flush=True)
    while not ended.is_set():
        cuda.wait(events[0])
        os.write(file, struct.pack("=q", time.monotonic_ns()))
        cuda.launch(draw.randint(SHORTEST_NS, LONGEST_NS))
        cuda.record(events[0])
        events.rotate(-1)
    cuda.synchronise()
    return 0


if __name__ == "__main__":
    sys.exit(in_a_sentence(main))
