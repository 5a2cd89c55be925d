"""Runs a training job for its profile: with a given number of cores, for a few steps. The training loop of the job,
`cotenant.loop`, measures how long they take.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.training import contract
from cotenant.training.contract import Lease, read_json, write_lease
from cotenant.training.measuring import MEASURED_FILE, STEPS_ENV

TAIL = 400  # an error quotes this many characters of the end of a failed program's output


def usable_cores() -> list[int]:
    """Return the CPU cores (their indices) that this process may use."""
    return sorted(os.sched_getaffinity(0))


@dataclass
class JobRuns:
    """A job that can be run briefly with any number of cores.

    `pretend`: the number of cores is passed to the job but not enforced, for programs that only simulate computation.
    `warm` steps are not counted, `steps` are timed. `raw` is the output of the last run.
    """

    command: Sequence[str]
    gpus: float = 1.0
    memory_bytes: int | None = None
    warm: int = 5
    steps: int = 50
    timeout_s: float = 600.0
    pretend: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    def step_s(self, cpus: int) -> float:
        """Run the job with this many cores, and return its seconds per step. InputError if the command cannot start,
        WorkError if it ends without a measurement.
        """
        folder = Path(tempfile.mkdtemp(prefix="cotenant-profile-"))
        try:
            return self._run(cpus, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, cpus: int, folder: Path) -> float:
        cores = None if self.pretend else usable_cores()[:cpus]
        write_lease(folder, 0, Lease(cpus=float(cpus), memory_bytes=self.memory_bytes))
        environment = {**os.environ, **self.environment} | {
            contract.FOLDER_ENV: str(folder),
            contract.CPUS_ENV: str(cpus),
            contract.GPUS_ENV: f"{self.gpus:g}",
            STEPS_ENV: f"{self.warm},{self.steps}",
        }
        with (folder / "log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    list(self.command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, preexec_fn=None if cores is None else _Held(cores),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise InputError(f"{self.command[0]}: cannot be started: {why}", field="command") from None
            code = self._wait(process)
        found = read_json(folder / MEASURED_FILE)
        if found is None:
            said = (folder / "log").read_text(errors="replace")[-TAIL:].strip()
            why = "the job must train through cotenant.loop" if code == 0 else f"its exit code is {code}"
            raise WorkError(
                f"the job ended with {cpus} cores before it was measured ({why}; the measurement takes at least "
                f"{self.warm + self.steps} steps)"
                + (f"; it said last: {said}" if said else "")
            )
        self.raw = found
        return float(found["seconds"]) / float(found["steps"])

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            raise WorkError(
                f"the job took more than {self.timeout_s:g} s for {self.warm + self.steps} steps; use fewer --steps"
            ) from None
        finally:
            if process.poll() is None:  # the job is ended even if this process is interrupted
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class _Held:
    """Code that runs in the child process before the job's program, and pins the program and its children to the given
    cores.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores

    def __call__(self) -> None:
        os.sched_setaffinity(0, self._cores)
