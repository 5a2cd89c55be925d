"""Runs the steps of a timed engine in a thread. A step computes nothing, it only takes time: the thread waits, or it
runs kernels on a GPU. The limits of a tenant that shares a GPU apply to these kernels as to those of real inference."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cotenant.core.errors import WorkError
from cotenant.policy.llm_batching import Batcher, Token
from cotenant.profiles.llm.profile import LlmProfile, Step

SPIN_S = 0.0002  # the end of a step is awaited by spinning for this long, because a sleep may return this much late
KERNEL_NS = 500_000  # on a GPU, a step consists of kernels of this length in ns
PIECE_BYTES = 256 << 20  # size of an allocation of the memory that an engine holds
MOST_BEHIND_S = 0.02  # after a pause of the machine that is longer than this, steps are not shortened to catch up


class Device(Protocol):
    """Interface of a device on which an engine's steps run."""

    def run(self, step: Step, began_s: float, seconds: float) -> float:
        """Block until a step that began at `began_s` (monotonic clock) has run for `seconds`. Returns the time at which
        the step ended.
        """


class Clock:
    """Runs steps by waiting. The host's own time between two steps counts as part of the next step."""

    def run(self, step: Step, began_s: float, seconds: float) -> float:
        """Wait until the step, which takes `seconds` from `began_s` on, has ended. Returns the time of its end."""
        until = max(began_s, time.monotonic() - MOST_BEHIND_S) + seconds
        left = until - time.monotonic()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.monotonic() < until:
            time.sleep(0)
        return until


class Cuda:
    """Runs steps as kernels on device 0 (the software GPU, or a real one), and holds `memory_bytes` of its memory."""

    def __init__(self, memory_bytes: int) -> None:
        from cotenant.bench.driver import Driver

        self._driver = Driver()
        left = memory_bytes
        while left > 0:
            self._driver.device_memory(min(left, PIECE_BYTES))
            left -= PIECE_BYTES
        self._bound = False

    def run(self, step: Step, began_s: float, seconds: float) -> float:
        """Launch the step's kernels and wait. Steps with prefill are compute-bound, steps of decoding memory-bound."""
        if not self._bound:  # a thread must make the context current before it launches kernels
            self._driver.make_current()
            self._bound = True
        work = "compute" if step.tokens else "memory"
        left = round(seconds * 1e9)
        while left > 0:
            self._driver.launch(min(left, KERNEL_NS), work=work)
            left -= KERNEL_NS
        self._driver.synchronise()
        return time.monotonic()


class Engine:
    """A timed engine, which runs requests in batched steps. Any thread may add requests; `deliver` gets the tokens of
    each step on the engine's thread.
    """

    def __init__(self, profile: LlmProfile, device: Device, deliver: Callable[[Sequence[Token]], None]) -> None:
        self.profile = profile
        self._device, self._deliver = device, deliver
        self._batcher = Batcher(profile)
        self._changed = threading.Condition()
        self._closing = False
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def add(self, id_: int, prompt: int, output: int) -> None:
        """Add a request of `prompt` tokens for `output` tokens; see `Batcher.add`. Raises WorkError if the device has
        failed.
        """
        with self._changed:
            if self.error is not None:
                raise WorkError(self.error)
            self._batcher.add(id_, prompt, output)
            self._changed.notify()

    def cancel(self, id_: int) -> None:
        """Drop a request whose client has disconnected."""
        with self._changed:
            self._batcher.cancel(id_)

    @property
    def load(self) -> int:
        """Return the number of requests that run or wait."""
        return len(self._batcher)

    def close(self) -> None:
        """Stop the engine's thread after the current step."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(10)

    def _run(self) -> None:
        free_s = time.monotonic()  # end of the last step: from then on the engine was free
        while True:
            with self._changed:
                step = self._batcher.begin()
                while step is None:
                    if self._closing:
                        return
                    self._changed.wait()
                    free_s = time.monotonic()
                    step = self._batcher.begin()
                if self._closing:
                    return
            try:
                free_s = self._device.run(step, free_s, self.profile.times.seconds(step))
            except WorkError as error:
                self.error = str(error)
                self._deliver(())
                return
            with self._changed:
                produced = self._batcher.end()
            self._deliver(produced)
