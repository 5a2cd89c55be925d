"""Fleet time: seconds since the fleet began, independent of changes to the system's date and kept across
controllers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cotenant.fleet.store.jobs import Store

Monotonic = Callable[[], int]


def _boot() -> str:
    """Identifies the current boot and time namespace. Times of the monotonic clock are comparable only if both are the
    same.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return "unknown"


class FleetClock:
    """The fleet's clock. Until `begin()`, `now_s()` returns the last recorded value. After a reboot or on another
    machine the clock continues from the last recorded time.
    """

    def __init__(self, store: Store, monotonic_ns: Monotonic = time.monotonic_ns, boot: str | None = None) -> None:
        self._store, self._monotonic_ns, self._boot = store, monotonic_ns, boot or _boot()
        self._origin_ns: int | None = None
        self.last_s = store.last_s()
        origin = store.meta("origin_ns")
        if origin is not None and store.meta("boot") == self._boot:
            self._origin_ns = int(origin)

    @property
    def runs(self) -> bool:
        """Return whether the fleet's clock is running."""
        return self._origin_ns is not None

    def begin(self) -> None:
        """Start the fleet's clock if it does not run. The next commit saves its state."""
        if self._origin_ns is None:
            self._origin_ns = self._monotonic_ns() - round(self.last_s * 1e9)
            self._store.set_meta("origin_ns", str(self._origin_ns))
            self._store.set_meta("boot", self._boot)

    def now_s(self) -> float:
        """Return the fleet's time in seconds, which never decreases."""
        if self._origin_ns is not None:
            self.last_s = max(self.last_s, (self._monotonic_ns() - self._origin_ns) / 1e9)
        return self.last_s

    def save(self) -> None:
        """Save the time, from which the clock continues after a reboot."""
        self._store.set_meta("time_s", repr(self.now_s()))
