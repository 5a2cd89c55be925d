"""Checkpoints on disk. A crash of the process or the machine while one is written leaves the last checkpoint intact.

    checkpoint/manifest.json     {"step", "attempt", "world", "folder", "previous"}: the only file that is ever replaced
    checkpoint/step-120/rank-0.pt ...

A new checkpoint is written into its own folder and synced to disk. It becomes the last checkpoint when a new manifest
is renamed over the old manifest. The previous checkpoint is kept, too, in case that the last cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.training.contract import read_json, sync_folder

MANIFEST = "manifest.json"


class FencedError(WorkError):
    """Raised in a process of an earlier start of a job if a later start has already written into the folder."""


@dataclass(frozen=True)
class Saved:
    """A loaded checkpoint. `world`: number of ranks that wrote it; `remark`: checkpoints that were skipped because they
    cannot be read."""

    step: int
    world: int
    state: dict[str, Any]
    remark: str | None = None


class CheckpointStore:
    """Reads and writes a job's checkpoints for one rank. All ranks share the folder.

    `attempt`: how often the job was started before. A process of an earlier start that still runs cannot overwrite the
    checkpoints of a later start. Methods raise WorkError if the disk fails; the last checkpoint then stays the last.
    """

    def __init__(self, folder: Path, rank: int = 0, world: int = 1, attempt: int = 0) -> None:
        self.folder, self.rank, self.world, self.attempt = folder, rank, world, attempt

    def step(self) -> int | None:
        """Return the step of the last checkpoint; None if there is none."""
        manifest = read_json(self.folder / MANIFEST)
        return None if manifest is None else _whole(manifest.get("step"))

    def save(self, step: int, state: dict[str, Any], together: Callable[[bool], bool] = lambda well: well) -> int:
        """Write `state` as the checkpoint of `step`; returns the bytes that this rank wrote.

        `together(well)` must wait until every rank has called it, and return whether all ranks passed True. `step` may
        be that of the last checkpoint: training is reproducible, so the files that are replaced have an equal state.
        Raises WorkError if a rank could not write, and FencedError if the job was started again meanwhile.
        """
        written, trouble = 0, None
        try:
            written = self._write(step, state)
        except (OSError, pickle.PicklingError, AttributeError, TypeError, WorkError) as error:
            trouble = error
        well = together(trouble is None)
        if well and self.rank == 0:
            try:
                self._commit(step)
            except (OSError, WorkError) as error:
                trouble = error
        well = together(well and trouble is None)
        if isinstance(trouble, FencedError):
            raise trouble
        if not well:
            why = _why(trouble) if trouble is not None else "another rank could not write its state"
            raise WorkError(f"the checkpoint of step {step} could not be written: {why}") from trouble
        return written

    def load(self) -> Saved | None:
        """Load the last checkpoint, or the previous one if the last cannot be read. None if there is no checkpoint.

        Raises WorkError if checkpoints exist but none can be read, because a silent start from step 0 would hide that.
        """
        manifest: dict[str, Any] | None = read_json(self.folder / MANIFEST)
        if manifest is None:
            if (self.folder / MANIFEST).exists():
                raise WorkError(f"{self.folder / MANIFEST} cannot be read; remove the folder to start from step 0")
            return None
        troubles: list[str] = []
        while manifest is not None:
            folder = self.folder / str(manifest.get("folder"))
            world = _whole(manifest.get("world")) or 1
            try:
                # if the job has more ranks than wrote the checkpoint, each additional rank loads the state of rank 0
                state = _read(folder, self.rank if self.rank < world else 0)
                return Saved(int(manifest["step"]), world, state, "; ".join(troubles) or None)
            except Exception as error:  # a damaged pickle can raise any exception
                troubles.append(f"{folder.name} cannot be read ({error})")
            previous = manifest.get("previous")
            manifest = previous if isinstance(previous, dict) else None
        raise WorkError(f"{self.folder}: {'; '.join(troubles)}; remove the folder to start from step 0")

    def _write(self, step: int, state: dict[str, Any]) -> int:
        self._refuse_fenced()
        folder = self.folder / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        dump, ending = _format()
        path = folder / f"rank-{self.rank}.{ending}"
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                dump(state, file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            part.replace(path)
            sync_folder(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        return size

    def _commit(self, step: int) -> None:
        last = self._refuse_fenced()
        if last is not None and last.get("step") == step:
            previous = last.get("previous")
        else:
            previous = None if last is None else {name: last[name] for name in last if name != "previous"}
        content = {
            "step": step, "attempt": self.attempt, "world": self.world, "folder": f"step-{step}", "previous": previous,
        }  # fmt: skip
        part = self.folder / f".{MANIFEST}.part"
        with part.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)  # the folder of the step must be on disk before the manifest refers to it
        part.replace(self.folder / MANIFEST)
        sync_folder(self.folder)
        kept = {content["folder"], (previous or {}).get("folder")}
        for old in self.folder.glob("step-*"):
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def _refuse_fenced(self) -> dict[str, Any] | None:
        last = read_json(self.folder / MANIFEST)
        if last is not None and (_whole(last.get("attempt")) or 0) > self.attempt:
            raise FencedError(
                f"the job was started again: start {last['attempt']} of this job has already written a checkpoint, so "
                f"this process, which is start {self.attempt}, ends"
            )
        return last


def _format() -> tuple[Callable[[Any, Any], None], str]:
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.save, "pt"
    return pickle.dump, "pickle"


def _read(folder: Path, rank: int) -> dict[str, Any]:
    plain = folder / f"rank-{rank}.pickle"
    if plain.exists():
        with plain.open("rb") as file:
            state: dict[str, Any] = pickle.load(file)
            return state
    import torch

    # weights_only is not set, because optimizers and random states consist of more than tensors; the job itself wrote
    # this file, so it is trusted
    loaded: dict[str, Any] = torch.load(folder / f"rank-{rank}.pt", map_location="cpu", weights_only=False)
    return loaded


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
