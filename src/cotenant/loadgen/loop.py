"""The event loop of a sender of requests. Requests leave at their scheduled times, even if earlier ones are not
answered yet; latencies count from these times.

One thread, epoll and a kernel timer: asyncio's timers have a resolution of a millisecond, which at thousands of
requests per second would dominate the measurement. The time at which each request was really sent is recorded, but a
delay is not subtracted from the latency.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import time
from array import array
from collections.abc import Callable
from typing import Protocol

from cotenant.loadgen.schedule import Schedule

# codes of requests' outcomes, as in metrics.serving.OUTCOMES; LATE is assigned only after the run
OK, LATE, DROPPED, FULL, FAILED = 1, 2, 3, 4, 0
BURST = 32  # after it has sent this many requests, the loop looks for answers
RETRY_S = 0.005  # a closed-loop client waits this long after a refused request


def reason_of(error: Exception | None) -> str:
    """Say why a connection broke; None: the server closed it."""
    if error is None:
        return "the server closed the connection"
    return str(getattr(error, "strerror", None) or error).lower()


class Transport(Protocol):
    """Interface of a protocol by which a sender's loop sends requests: sends request `index` for service `svc`, and
    calls `Loop.finish` when the request has ended.
    """

    def open(self, loop: Loop) -> None:
        """Connect to the server, and register file descriptors by the loop's `watch`."""

    def send(self, index: int, svc: int) -> None:
        """Send a request now, or as soon as a connection is free."""

    def expire(self, index: int) -> None:
        """Cancel a request that has waited too long for its answer. After that, `Loop.finish` must not be called for
        the request.
        """

    def close(self) -> None:
        """Close all connections to the server."""


class Timer:
    """Wakes epoll at a time of the monotonic clock, within a few microseconds (Linux timerfd)."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # clock CLOCK_MONOTONIC; the flags mean non-blocking and close-on-exec
        self.fd = int(libc.timerfd_create(1, 0o4000 | 0o2000000))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._settime = libc.timerfd_settime
        self._spec = (ctypes.c_long * 4)()  # struct itimerspec: interval (s, ns), first expiry (s, ns)
        self._pointer = ctypes.byref(self._spec)

    def at(self, when_s: float) -> None:
        """Set the timer so that it wakes epoll once, at this time of the monotonic clock."""
        whole = int(when_s)
        self._spec[2], self._spec[3] = whole, int((when_s - whole) * 1e9)
        self._settime(self.fd, 1, self._pointer, None)  # flag 1: the timer's expiry is an absolute time

    def clear(self) -> None:
        """Acknowledge a wake-up by the timer."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Close the timer's descriptor."""
        os.close(self.fd)


class Records:
    """Results of a sender's requests, by index. Times are in seconds from the start, and negative if the event did not
    happen.
    """

    def __init__(self, times_s: array[float], svc: array[int]) -> None:
        self.svc, self.scheduled = svc, times_s
        self.sent, self.finished = array("d", [-1.0]) * len(svc), array("d", [-1.0]) * len(svc)
        self.inference = array("d", [-1.0]) * len(svc)
        self.outcome = bytearray(len(svc))

    def add(self, svc: int, now: float) -> int:
        """Add a request of a closed-loop client to the records; return its index."""
        index = len(self.svc)
        self.svc.append(svc)
        self.scheduled.append(now)
        self.sent.append(-1.0)
        self.finished.append(-1.0)
        self.inference.append(-1.0)
        self.outcome.append(0)
        return index


class Loop:
    """Runs one schedule over one transport. `run` returns when every request is answered, failed or cancelled."""

    def __init__(
        self, schedule: Schedule, transport: Transport, duration_s: float, timeout_s: float,
        tell: Callable[[Loop], None] | None = None, tell_every_s: float = 0.5,
    ) -> None:  # fmt: skip
        self.records = Records(array("d", schedule.times_s.tolist()), array("i", schedule.svc.tolist()))
        self.open_count = len(schedule.times_s)
        self.clients = schedule.clients
        self.transport, self.duration_s, self.timeout_s = transport, duration_s, timeout_s
        self.stopping = False
        self.next = 0
        self.done = 0
        self.wrong = 0  # number of answers that belong to another request or model
        self.stray = 0  # number of answers that came when no request was open
        self.reasons: dict[str, int] = {}
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._epoll = select.epoll()
        self._timer = Timer()
        self._client_of: dict[int, int] = {}
        self._retries: list[tuple[float, int]] = []
        self._pending: dict[int, None] = {}  # requests that were sent or wait to be sent, the oldest first
        self._tell, self._tell_every_s = tell, tell_every_s
        self.began = 0.0

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call `handler(events)` when the descriptor is ready."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def rewatch(self, fd: int, events: int) -> None:
        """Replace the set of events for which the loop watches a file descriptor. Does not block."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor; does nothing for one that is not watched."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self.began

    def sent(self, index: int) -> None:
        """Record that the transport has handed a request to the kernel."""
        self.records.sent[index] = time.monotonic() - self.began

    def finish(self, index: int, outcome: int, inference_ms: float = -1.0, reason: str = "") -> None:
        """Record the end of a request. `reason`: why the request failed."""
        if index not in self._pending:
            self.stray += 1
            return
        del self._pending[index]
        records = self.records
        now = time.monotonic() - self.began
        records.finished[index] = now
        records.outcome[index] = outcome
        records.inference[index] = inference_ms
        self.done += 1
        if reason:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if index in self._client_of:
            svc = self._client_of.pop(index)
            if outcome == OK:
                self._next_of_client(svc, now)
            # a server's refusal comes at once, so a client without a pause would do nothing but repeat its request
            else:
                self._retries.append((now + RETRY_S, svc))

    def _next_of_client(self, svc: int, now: float) -> None:
        if now < self.duration_s and not self.stopping:
            self._submit(self.records.add(svc, now), svc, closed=True)

    def _submit(self, index: int, svc: int, closed: bool = False) -> None:
        self._pending[index] = None
        if closed:
            self._client_of[index] = svc
        self.transport.send(index, svc)

    def run(self, start_at: float | None = None) -> Records:
        """Send all requests, beginning at `start_at` on the monotonic clock (default: now). Garbage collection is off
        meanwhile, since its pauses would count as latency of the server.
        """
        self.transport.open(self)
        self._epoll.register(self._timer.fd, select.EPOLLIN)
        was_on = gc.isenabled()
        gc.collect()  # garbage is collected before the start, since that takes half a second in a large process
        gc.disable()
        self.began = time.monotonic() if start_at is None else start_at
        if start_at is not None:
            time.sleep(max(0.0, start_at - time.monotonic()))
        try:
            self._loop()
        finally:
            if was_on:
                gc.enable()
            self.transport.close()
            self._epoll.close()
            self._timer.close()
        return self.records

    def stop(self) -> None:
        """Stop sending, and wait for unanswered requests. The run's duration ends here."""
        if not self.stopping:
            self.stopping = True
            self.duration_s = min(self.duration_s, max(1e-3, self.now()))

    def _loop(self) -> None:
        times, svc = self.records.scheduled, self.records.svc
        count, clock, began = self.open_count, time.monotonic, self.began
        poll, handlers, timer_fd = self._epoll.poll, self._handlers, self._timer.fd
        for client in self.clients:
            self._submit(self.records.add(client, 0.0), client, closed=True)
        tell_at = housekeeping_at = 0.0
        armed = -1.0
        while True:
            now = clock() - began
            burst = 0
            while self.next < count and times[self.next] <= now and burst < BURST and not self.stopping:
                index = self.next
                self.next = index + 1
                self._submit(index, svc[index])
                burst += 1
                now = clock() - began
            if now >= housekeeping_at:
                housekeeping_at = now + 0.05
                self._housekeeping(now)
            if self._tell is not None and now >= tell_at:
                tell_at = now + self._tell_every_s
                self._tell(self)
            sending = self.next < count and not self.stopping
            if not sending and not self._pending and (not self._retries or now >= self.duration_s):
                return
            wait = 0.05
            if self._retries:
                self._retry(now)
                wait = RETRY_S
            if sending:
                due = times[self.next]
                if due <= now:
                    wait = 0.0
                elif due - now < wait + 0.002:
                    if due != armed:
                        self._timer.at(began + due)
                        armed = due
                    wait = 0.1
            for fd, events in poll(wait):
                if fd == timer_fd:
                    self._timer.clear()
                elif fd in handlers:
                    handlers[fd](events)

    def _retry(self, now: float) -> None:
        due = [x for x in self._retries if x[0] <= now]
        if due:
            self._retries = [x for x in self._retries if x[0] > now]
            for _, svc in due:
                self._next_of_client(svc, now)

    def _housekeeping(self, now: float) -> None:
        """Fail requests that have waited too long for an answer; the oldest come first."""
        scheduled = self.records.scheduled
        while self._pending:
            index = next(iter(self._pending))
            if now - scheduled[index] < self.timeout_s:
                return
            self.transport.expire(index)
            self.finish(index, FAILED, reason=f"no answer within {self.timeout_s:g} s")
