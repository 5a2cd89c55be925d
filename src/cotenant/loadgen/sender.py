"""The sending process: reads a test from standard input, sends its part, writes progress and result to standard output.

python -m cotenant.loadgen.sender
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from cotenant.core import pickles
from cotenant.core.errors import InputError, WorkError
from cotenant.loadgen.loop import FAILED, OK, Loop
from cotenant.loadgen.run import LoadTest, Progress, run_here
from cotenant.loadgen.schedule import build_schedule

PORTIONS = 5


class Teller:
    """Counts the requests of each service, and sums the latencies of those that ended since the last report. Counting
    takes one or two microseconds per request and delays requests that are due, so it is done in small portions.
    """

    def __init__(self, write: Callable[[object], None], services: int) -> None:
        self.write = write
        self.rows: list[list[Any]] = [[0, 0, 0, 0.0, 0.0] for _ in range(services)]
        self.seen = 0
        self.open: list[int] = []
        self.looks = 0

    def __call__(self, loop: Loop) -> None:
        records, rows = loop.records, self.rows
        top = len(records.svc) if loop.clients else loop.next
        waiting = []
        for index in [*self.open, *range(self.seen, top)]:
            row = rows[records.svc[index]]
            if index >= self.seen:
                row[0] += 1
            if records.finished[index] < 0:
                waiting.append(index)
                continue
            took = (records.finished[index] - records.scheduled[index]) * 1000.0
            row[1 if records.outcome[index] == OK else 2] += 1
            row[3] += took
            row[4] = max(row[4], took)
        self.open, self.seen = waiting, top
        self.looks += 1
        if self.looks % PORTIONS:
            return
        told = Progress(loop.now(), top, loop.done, tuple((r[0], r[1], r[2], r[3], r[4]) for r in rows))
        self.write(("progress", told))
        for row in rows:
            row[3] = row[4] = 0.0


def main() -> None:
    """Read the load test from standard input, prepare its requests, wait for the start, and send them."""
    source, write = pickles.take_streams()
    test: LoadTest
    test, forms, number, telling = pickles.read(source)
    try:
        schedule = build_schedule(test.services, test.duration_s, test.seed, test.step_s, test.as_recorded)
        part = schedule.part(number, test.senders)
        write(("ready", None))
        try:
            start_at = pickles.read(source)
        except EOFError:
            return  # the parent process has ended, so the result of the test is not needed

        def on_loop(loop: Loop) -> None:
            signal.signal(signal.SIGINT, lambda *_: loop.stop())

        tell = Teller(write, len(test.services)) if telling else None
        result = run_here(test, forms, tell, part, start_at, on_loop)
        write(("done", result))
    except (InputError, WorkError) as error:
        write(("error", error))
    except BrokenPipeError:
        return
    except Exception as error:
        write(("error", WorkError(f"the sender failed: {type(error).__name__}: {error}")))


if __name__ == "__main__":
    assert FAILED == 0  # records are initialized with zeros, which must mean FAILED
    main()
