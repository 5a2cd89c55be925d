"""Records a GPU's clocks and power during a measurement, and the time for which the host was throttled."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from cotenant.devices.cards import WHY, Card
from cotenant.devices.nvidia import Nvidia

EVERY_S = 0.05  # not shorter, because every sample calls the driver

_cards: dict[str, Card | None] = {}


def _card(uuid: str) -> Card | None:
    if uuid not in _cards:
        _cards[uuid] = Nvidia().card(uuid)
    return _cards[uuid]


class Watch:
    """Context manager that samples the GPU every EVERY_S. Without NVML it has no samples."""

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
        """Medians of clocks, power and temperature; for each throttle reason the fraction of samples that had it."""
        keys = dict.fromkeys(key for seen in self._seen for key in seen)
        values = {key: [seen[key] for seen in self._seen if key in seen] for key in keys}
        return {k: statistics.fmean(v) if k in WHY else statistics.median(v) for k, v in values.items()}


def throttled() -> int:
    """Total time in microseconds for which the CPU quota of this control group throttled it; -1 if unknown."""
    for path in ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"):
        with suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("throttled_usec"):
                    return int(line.split()[1])
                if line.startswith("throttled_time"):
                    return int(line.split()[1]) // 1000
    return -1


def card_gib() -> float | None:
    """Memory in use on the GPU; None where nvidia-smi does not say it."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    asked += ["-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0")]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        return round(float(subprocess.run(asked, capture_output=True, check=True, timeout=20).stdout) / 1024, 1)
    return None
