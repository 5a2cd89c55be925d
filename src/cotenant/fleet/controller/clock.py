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
    """Identity of the current boot and time namespace, in which monotonic clocks are comparable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return "unknown"


class FleetClock:
    """Clock with `now_s()`, which stands at its last value until `begin()`. After a reboot or on another machine it
    continues from the last recorded time.
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
        """Whether the clock is running."""
        return self._origin_ns is not None

    def begin(self) -> None:
        """Start the clock if it does not run. Saved with the next commit."""
        if self._origin_ns is None:
            self._origin_ns = self._monotonic_ns() - round(self.last_s * 1e9)
            self._store.set_meta("origin_ns", str(self._origin_ns))
            self._store.set_meta("boot", self._boot)

    def now_s(self) -> float:
        """Fleet time; never decreases."""
        if self._origin_ns is not None:
            self.last_s = max(self.last_s, (self._monotonic_ns() - self._origin_ns) / 1e9)
        return self.last_s

    def save(self) -> None:
        """Save the time, for after a reboot."""
        self._store.set_meta("time_s", repr(self.now_s()))
