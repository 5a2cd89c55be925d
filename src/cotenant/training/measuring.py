"""Measures the speed of a training loop: after some steps to warm up, it times some steps and ends the process."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from cotenant.training.contract import Lease, write_json
from cotenant.training.sources import Source

STEPS_ENV = "COTENANT_MEASURE_STEPS"  # "WARM,TIMED": number of steps to warm up, and number of steps to time
MEASURED_FILE = "measured.json"


class Measuring:
    """Counts the steps of a training job. After the last it writes the measurement into the job's folder and ends the
    process with code 0.
    """

    def __init__(self, folder: Path, warm: int, timed: int) -> None:
        self._folder, self._warm, self._timed = folder, warm, timed
        self._done = 0
        self._begin_s = 0.0

    @classmethod
    def wanted(cls, folder: Path | None) -> Measuring | None:
        """Return an object that measures the speed of training if the environment variable COTENANT_MEASURE_STEPS
        requests a measurement, else None.
        """
        warm, _, timed = os.environ.get(STEPS_ENV, "").partition(",")
        if folder is None or not (warm.isdecimal() and timed.isdecimal()):
            return None
        return cls(folder, int(warm), max(1, int(timed)))

    def step(self, source: Source, lease: Lease) -> None:
        """Count a step of the training job; may end the process."""
        self._done += 1
        if self._done not in (self._warm, self._warm + self._timed):
            return
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._done == self._warm:
            self._begin_s = now
            return
        content = {
            "steps": self._timed,
            "seconds": now - self._begin_s,
            "cpus": lease.cpus,
            "workers": source.workers(lease.cpus),
            "steps_per_epoch": source.length(),
            "samples_per_step": source.samples_per_batch(),
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        write_json(self._folder / MEASURED_FILE, content)
        raise SystemExit(0)
