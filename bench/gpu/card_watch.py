"""The card's clock and power while something runs; and whether the host was held back meanwhile."""

from __future__ import annotations

import statistics
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from cotenant.devices.cards import WHY, Card
from cotenant.devices.nvidia import Nvidia

EVERY_S = 0.05  # each look is a call of the driver

_cards: dict[str, Card | None] = {}


def _card(uuid: str) -> Card | None:
    if uuid not in _cards:
        _cards[uuid] = Nvidia().card(uuid)
    return _cards[uuid]


class Watch:
    """Reads every EVERY_S while it is entered; nothing where there is no NVML."""

    def __init__(self, uuid: str) -> None:
        self._card = _card(uuid)
        self._seen: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while self._card is not None and not self._stop.wait(EVERY_S):
            self._seen.append(self._card.read())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def medians(self) -> dict[str, float]:
        """Median of each clock, power and temperature; of the reasons, the part of the looks that had them."""
        keys = dict.fromkeys(key for seen in self._seen for key in seen)
        values = {key: [seen[key] for seen in self._seen if key in seen] for key in keys}
        return {k: statistics.fmean(v) if k in WHY else statistics.median(v) for k, v in values.items()}


def throttled() -> int:
    """Microseconds for which this control group was held back by its share of the processors, so far; -1: not known."""
    for path in ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"):
        with suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("throttled_usec"):
                    return int(line.split()[1])
                if line.startswith("throttled_time"):
                    return int(line.split()[1]) // 1000
    return -1
