"""Runs a load test from options to result. Requests are sent by separate processes, so that a live table or a plot does
not take time from their sending; `run_here` sends from this process, for tests and short checks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cotenant.core import pickles
from cotenant.core.errors import InputError, WorkError
from cotenant.loadgen.loop import Loop, Transport
from cotenant.loadgen.payload import Form, Payload, ask_form, random_inputs
from cotenant.loadgen.result import LoadResult, merge, rows_of
from cotenant.loadgen.schedule import LoadService, Schedule, build_schedule
from cotenant.loadgen.target import Target

# seconds between two calls of `tell` by a sender's loop; the sending process reports its progress in every fifth call
# (sender.PORTIONS)
TELL_S = 0.1
START_IN_S = 0.6  # all senders start at the same time, this long after the last one is ready
MAX_SENDERS = 64


@dataclass(frozen=True)
class LoadTest:
    """Definition of a load test. `timeout_s`: a request without an answer after this time has failed; `connections`:
    largest number of HTTP connections; `batch`: items per request; `deadline`: send each request's SLO to the server.
    """

    target: Target
    services: tuple[LoadService, ...]
    duration_s: float
    seed: int = 0
    step_s: float = 20.0
    as_recorded: bool = False
    timeout_s: float = 30.0
    connections: int = 1024
    batch: int = 1
    binary: bool = True
    check: bool = True
    deadline: bool = False
    senders: int = 1
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def scaled(self, factor: float, duration_s: float | None = None, seed: int | None = None) -> LoadTest:
        """Return a copy of the test with all rates multiplied by a factor, and with another duration and seed if given.
        """
        return replace(
            self,
            services=tuple(s.scaled(factor) for s in self.services),
            duration_s=self.duration_s if duration_s is None else duration_s,
            seed=self.seed if seed is None else seed,
        )


@dataclass(frozen=True)
class Progress:
    """Progress of a sending process at time `now_s`: how many requests it has sent, and how many of them are done.
    `services` has for each service: requests sent, answered with a result, ended otherwise; and the sum and the
    maximum, in ms, of the latencies of the requests that ended since the last report.
    """

    now_s: float
    sent: int
    done: int
    services: tuple[tuple[int, int, int, float, float], ...]


def ask_forms(test: LoadTest) -> dict[str, Form]:
    """Return the inputs of every model of a test; InputError names a model that the server does not have."""
    return {s.name: ask_form(test.target, s.name) for s in test.services}


def make_transport(test: LoadTest, forms: dict[str, Form]) -> Transport:
    """Return the transport (HTTP or gRPC) for a test's address, with its requests prepared."""
    inputs = [random_inputs(forms[s.name], test.batch, test.seed, dict(test.sizes)) for s in test.services]
    deadlines = [s.slo_ms if test.deadline else None for s in test.services]
    if test.target.is_grpc:
        from cotenant.loadgen.grpc import GrpcPayload, GrpcTransport

        made = [GrpcPayload(s.name, x, test.check, d) for s, x, d in zip(test.services, inputs, deadlines, strict=True)]
        return GrpcTransport(test.target, made, max(1, test.connections // test.senders))
    from cotenant.loadgen.http import HttpTransport

    payloads = [
        Payload(test.target, s.name, x, test.binary, test.check, d)
        for s, x, d in zip(test.services, inputs, deadlines, strict=True)
    ]
    most = max(1, test.connections // test.senders)
    return HttpTransport(test.target, payloads, most)


def run_here(
    test: LoadTest, forms: dict[str, Form] | None = None, tell: Callable[[Loop], None] | None = None,
    schedule: Schedule | None = None, start_at: float | None = None, on_loop: Callable[[Loop], None] | None = None,
    transport: Transport | None = None,
) -> LoadResult:  # fmt: skip
    """Run a whole test in this process and thread. `on_loop` is called with the sender's loop before it runs."""
    if schedule is None:
        schedule = build_schedule(test.services, test.duration_s, test.seed, test.step_s, test.as_recorded)
    if transport is None:
        transport = make_transport(test, ask_forms(test) if forms is None else forms)
    loop = Loop(schedule, transport, test.duration_s, test.timeout_s, tell, TELL_S)
    if on_loop is not None:
        on_loop(loop)
    loop.run(start_at)
    return LoadResult(
        test.services, rows_of(loop, test.services), loop.duration_s, test.seed, str(test.target), loop.wrong,
        loop.stray, int(getattr(transport, "peak", 0)), dict(loop.reasons), schedule.remarks,
    )  # fmt: skip


def run_load(test: LoadTest, tell: Callable[[Sequence[Progress]], None] | None = None) -> LoadResult:
    """Run a load test with `test.senders` processes. Each process reports its progress twice a second; `tell` gets the
    last report of every process."""
    if not 0 < test.timeout_s < 1e9:
        raise InputError(f"timeout must be above 0 s, not {test.timeout_s:g} s", field="timeout")
    if not 1 <= test.senders <= MAX_SENDERS:
        raise InputError(f"senders must be 1 to {MAX_SENDERS}, not {test.senders}", field="senders")
    forms = ask_forms(test)
    # creating a transport here reports errors in the requests before any process is started
    make_transport(test, forms)
    # drawing the schedule here once lets this process report a trace that cannot be read
    build_schedule(test.services, test.duration_s, test.seed, test.step_s, test.as_recorded)
    senders = [Sender(test, forms, n, tell is not None) for n in range(test.senders)]
    try:
        for sender in senders:
            sender.expect("ready")
        start_at = time.monotonic() + (START_IN_S if len(senders) > 1 else 0.05)
        for sender in senders:
            sender.say(start_at)
        found = _collect(senders, tell)
    finally:
        for sender in senders:
            sender.close()
    return merge(found)


def _collect(senders: list[Sender], tell: Callable[[Sequence[Progress]], None] | None) -> list[LoadResult]:
    import selectors

    latest: dict[int, Progress] = {}
    results: dict[int, LoadResult] = {}
    with selectors.DefaultSelector() as selector:
        for n, sender in enumerate(senders):
            selector.register(sender.out, selectors.EVENT_READ, n)
        while len(results) < len(senders):
            try:
                ready = selector.select()
            except KeyboardInterrupt:  # the first interrupt ends the sending, and the results so far are reported
                for sender in senders:
                    sender.process.send_signal(signal.SIGINT)
                continue
            for key, _ in ready:
                kind, content = senders[key.data].hear()
                if kind == "done":
                    results[key.data] = content
                    selector.unregister(key.fileobj)
                elif kind == "progress":
                    latest[key.data] = content
            if tell is not None and latest:
                tell(list(latest.values()))
    return [results[n] for n in range(len(senders))]


class Sender:
    """A process that sends part of a load test's requests; it exchanges pickled messages over its pipes."""

    def __init__(self, test: LoadTest, forms: dict[str, Form], number: int, telling: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cotenant.loadgen.sender"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.out: Any = self.process.stdout
        self.say((test, forms, number, telling))

    def say(self, content: object) -> None:
        """Send an object to the sending process."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(pickles.frame(content))
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkError("a sender of the load test ended early") from None

    def hear(self) -> tuple[str, Any]:
        """Return the sending process's next message (kind, content). An exception of the process is raised here."""
        try:
            kind, content = pickles.read(self.out)
        except EOFError:
            raise WorkError(f"a sender of the load test ended early (code {self.process.wait()})") from None
        if kind == "error":
            raise content
        return kind, content

    def expect(self, kind: str) -> None:
        """Wait for a message of this kind from the sending process."""
        while self.hear()[0] != kind:
            continue

    def close(self) -> None:
        """End the sending process."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.out.close()
