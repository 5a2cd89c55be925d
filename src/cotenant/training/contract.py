"""The protocol between a training job and the process that started it: environment variables, files in the job's
folder, and an exit code.

The files are JSON. They are replaced by rename, so that a reader sees either the old or the new file. They stay when
either process ends, so that a restarted controller learns what its jobs have done. A job that moves to another node
keeps its folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER_ENV = "COTENANT_JOB_DIR"
ATTEMPT_ENV = "COTENANT_ATTEMPT"
CPUS_ENV = "COTENANT_CPUS"
MEMORY_ENV = "COTENANT_MEMORY_BYTES"
GPUS_ENV = "COTENANT_GPUS"
BATCH_ENV = "COTENANT_BATCH"

PREEMPTED_EXIT = 75  # exit code of a job that was stopped and can be resumed; it is EX_TEMPFAIL of sysexits
PROGRESS_FILE = "progress.json"
CHECKPOINT_FOLDER = "checkpoint"


@dataclass(frozen=True)
class Lease:
    """What a job may use, and until when. `until_s`: time of this machine's monotonic clock; None: no end. `cpus` and
    `memory_bytes`: cores and memory of this process. `stop`: the job must save and end after this step."""

    cpus: float | None = None
    memory_bytes: int | None = None
    stop: bool = False
    until_s: float | None = None
    attempt: int = 0


@dataclass(frozen=True)
class Progress:
    """Progress of a job. `step`: number of steps done; `checkpoint_step`: step of the last checkpoint, None if there is
    none.
    """

    attempt: int
    state: str  #: state of the job: running | preempted | finished
    step: int
    total_steps: int | None
    fraction: float | None
    epoch: int
    checkpoint_step: int | None
    steps_per_s: float | None
    written_unix_s: float
    problem: str | None = None


def lease_file(folder: Path, rank: int = 0) -> Path:
    """Return the path of the file with the lease of one of the job's ranks."""
    return folder / f"lease-{rank}.json"


def write_lease(folder: Path, rank: int, lease: Lease) -> None:
    """Replace the lease of one of the job's ranks."""
    write_json(lease_file(folder, rank), asdict(lease))


def read_lease(folder: Path, rank: int = 0) -> Lease | None:
    """Return the current lease of a rank; None if there is no lease or it is invalid."""
    raw = read_json(lease_file(folder, rank))
    if raw is None:
        return None
    return Lease(
        cpus=_number(raw.get("cpus")),
        memory_bytes=_whole(raw.get("memory_bytes")),
        stop=raw.get("stop") is True,
        until_s=_number(raw.get("until_s")),
        attempt=_whole(raw.get("attempt")) or 0,
    )


def write_progress(folder: Path, progress: Progress) -> None:
    """Replace the job's progress report."""
    write_json(folder / PROGRESS_FILE, asdict(progress))


def write_json(path: Path, content: Mapping[str, Any], *, sync: bool = False) -> None:
    """Replace a JSON file atomically. Without `sync` it is not synced to disk, so a crash of the machine may lose it or
    leave it empty; leases and progress reports are soon written again.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w") as file:
            file.write(json.dumps(content))
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a crash of the machine does not undo a rename in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file with an object; None if the file is missing or contains no object."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None or number < 0 else int(number)
