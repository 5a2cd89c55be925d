"""`for batch in cotenant.loop(loader, checkpoint=...)`: a training loop that can be stopped, moved and resumed exactly.

After every step the loop reads its lease (what the job may use, and until when), reports its progress, and saves a
checkpoint if one is due or requested. If the job must stop, the loop saves and ends the process with exit code 75. When
the program is started again with the same folder, it resumes at the next batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cotenant.core.errors import InputError, WorkError
from cotenant.training import randomness
from cotenant.training.checkpoint import CheckpointStore, FencedError
from cotenant.training.contract import (
    ATTEMPT_ENV,
    CHECKPOINT_FOLDER,
    FOLDER_ENV,
    PREEMPTED_EXIT,
    Lease,
    Progress,
    write_progress,
)
from cotenant.training.gang import Gang, apart_rank, find_gang
from cotenant.training.leases import LeaseWatch
from cotenant.training.loaders import find_source
from cotenant.training.measuring import Measuring
from cotenant.training.sources import Source
from cotenant.training.state import States, find_states

REPORT_S = 0.5  # interval between two reports of the job's progress, in s


class Loop:
    """The iterable that `cotenant.loop` returns. A program iterates over it once.

    `step`: number of steps done since the beginning of training; `epoch`: number of the current epoch, from 0; `lease`:
    what the job may use now.
    """

    def __init__(
        self, source: Source, states: States, epochs: int, steps: int | None, folder: Path | None, every_s: float,
        seed: int | None,
    ) -> None:  # fmt: skip
        self._source, self._states, self._folder = source, states, folder
        self._epochs, self._steps, self._every_s = epochs, steps, every_s
        self._seed = seed
        self._attempt = _attempt_given()
        self.step = self.epoch = 0
        self._batch = 0  # number of the next batch of data within the epoch
        self._gang: Gang = Gang()
        self._apart = 0
        self._store: CheckpointStore | None = None
        self._watch = LeaseWatch(folder, self._attempt)
        self._signalled = self._begun = self._asked = self._mute = False
        self._saved_step: int | None = None
        self._problem: str | None = None
        self._told_s = self._told_step = 0.0
        self._saved_s = time.monotonic()
        self._measuring = Measuring.wanted(folder)

    @property
    def lease(self) -> Lease:
        """Return what this process may use: the latest lease, or the lease with which the process was started."""
        return self._watch.lease

    @property
    def total_steps(self) -> int | None:
        """Return the number of steps of the whole training; None if the loader does not tell its length."""
        length = self._source.length()
        total = None if length is None else length * self._epochs
        return total if self._steps is None else self._steps if total is None else min(self._steps, total)

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise RuntimeError("a loop can be iterated over only once; create another one for more training")
        self._begun = True
        self._gang = find_gang()
        # if there are several processes that do not communicate with each other, each one saves its own checkpoints
        self._apart = apart_rank() if self._gang.world == 1 else 0
        before = self._listen()
        try:
            self._resume()
            yield from self._epochs_left()
            self._finish()
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def save(self) -> None:
        """Request a checkpoint. The checkpoint is written after the current step, or with several ranks after the next
        step.
        """
        self._asked = True

    def _save(self) -> None:
        if self._store is None:
            return
        state = {
            "epoch": self.epoch, "batch": self._batch, "seed": self._seed, "random": randomness.take(),
            "objects": self._states.take(),
        }  # fmt: skip
        self._store.save(self.step, state, self._gang.together)
        self._saved_step, self._saved_s, self._problem = self.step, time.monotonic(), None

    # ---- the loop

    def _epochs_left(self) -> Iterator[Any]:
        while self.epoch < self._epochs and not self._enough():
            lease = self.lease
            ended = True
            for batch in self._source.batches(self._seed or 0, self.epoch, self._batch, lease.cpus):
                yield batch
                self.step += 1
                self._batch += 1
                self._after_step()
                if self._enough():
                    return
                if self._other_workers(lease):
                    ended = False  # the epoch has not ended: it continues at the next batch, with new loader workers
                    break
            if ended:
                self.epoch += 1
                self._batch = 0

    def _other_workers(self, before: Lease) -> bool:
        """Whether new worker processes are needed, because the lease's cores or memory have changed."""
        workers = self._source.workers(self.lease.cpus)
        other_memory = self.lease.memory_bytes != before.memory_bytes
        return workers != self._source.workers(before.cpus) or (workers > 0 and other_memory)

    def _enough(self) -> bool:
        return self._steps is not None and self.step >= self._steps

    def _after_step(self) -> None:
        now = time.monotonic()
        if self._measuring is not None:
            self._measuring.step(self._source, self.lease)
        memory = self.lease.memory_bytes
        if self._watch.look(now) and self.lease.memory_bytes not in (None, memory):
            self._source.set_memory(self.lease.memory_bytes or 0)
        due = self._store is not None and (self._asked or now - self._saved_s >= self._every_s)
        leave, due = self._gang.agree(self._signalled or self._watch.over(now), due)
        if leave:
            self._leave()
        if due:
            self._asked = False
            self._try_to_save()
        if now - self._told_s >= REPORT_S:
            self._tell("running")

    # ---- start and end

    def _listen(self) -> Any:
        """Handle SIGTERM as a request to stop; returns the previous handler, None if this thread cannot set
        handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            return None

        def wish(_number: int, _frame: FrameType | None) -> None:
            self._signalled = True

        return signal.signal(signal.SIGTERM, wish)

    def _resume(self) -> None:
        if self._folder is not None and self._states.wanted and self._measuring is None:
            where = self._folder / CHECKPOINT_FOLDER
            if self._apart:
                where = where / f"apart-{self._apart}"
            self._store = CheckpointStore(where, self._gang.rank, self._gang.world, self._attempt)
            saved = self._store.load()
            if saved is not None:
                if saved.remark:
                    _say(f"{saved.remark}; resuming from step {saved.step}")
                state = saved.state
                self._states.put(state["objects"])
                self.step = self._saved_step = saved.step
                self.epoch, self._batch, self._seed = state["epoch"], state["batch"], state["seed"]
                if self._gang.rank < saved.world:
                    randomness.put(state["random"])
                # a rank without saved random state gets random numbers that are reproducible and that no other rank has
                else:
                    randomness.set_all(randomness.derive(self._seed, saved.step, self._gang.rank))
        if self._seed is None:
            self._seed = _seed_of_process()
        if self.lease.memory_bytes is not None:
            self._source.set_memory(self.lease.memory_bytes)
        self._tell("running")

    def _leave(self) -> NoReturn:
        if not self._watch.fenced:
            self._try_to_save()
        self._gang.close()
        self._tell("preempted")
        raise SystemExit(PREEMPTED_EXIT)

    def _finish(self) -> None:
        if self._store is not None and self._saved_step != self.step:
            self._try_to_save()
        self._gang.close()
        self._tell("finished")

    def _try_to_save(self) -> None:
        """Save a checkpoint. If the disk fails, training continues and the progress report says so. If the job was
        started again meanwhile, this process ends.
        """
        try:
            self._save()
        except FencedError as error:
            raise SystemExit(f"cotenant: {error}") from None
        except WorkError as error:
            # after a failure, too, the next checkpoint is tried after the usual interval
            self._saved_s = time.monotonic()
            self._problem = str(error)
            _say(str(error))

    def _tell(self, state: str) -> None:
        now = time.monotonic()
        rate = (self.step - self._told_step) / (now - self._told_s) if self._told_s and now > self._told_s else None
        self._told_s, self._told_step = now, self.step
        if self._folder is None or self._gang.rank + self._apart != 0 or self._watch.fenced:
            return
        total = self.total_steps
        try:
            write_progress(
                self._folder,
                Progress(
                    attempt=self._attempt, state=state, step=self.step, total_steps=total,
                    fraction=min(1.0, self.step / total) if total else None, epoch=self.epoch,
                    checkpoint_step=self._saved_step, steps_per_s=rate, written_unix_s=time.time(),
                    problem=self._problem,
                ),
            )  # fmt: skip
            self._mute = False
        except OSError as error:
            if not self._mute:  # the error is printed only once, until a progress report can be written again
                _say(f"the progress report could not be written: {error.strerror or error}")
            self._mute = True


def loop(
    loader: Any,
    *,
    checkpoint: Any = None,
    epochs: int = 1,
    steps: int | None = None,
    folder: str | Path | None = None,
    every_s: float = 600.0,
    seed: int | None = None,
    most_workers: int = 16,
) -> Loop:
    """Iterate over the batches of `epochs` epochs (at most `steps` batches), so that training can be stopped after any
    batch and resumed exactly.

    `loader`: a torch DataLoader, a sequence of batches, an iterable, or a function from the epoch to an iterable.
    `checkpoint`: the objects that training changes, by name: `{"model": model, "optimizer": optimizer}`. They must have
    `state_dict` and `load_state_dict`, or be random generators of numpy or torch. The position in the data and the
    random states of Python, numpy and torch are saved, too. If `checkpoint` is None, nothing is saved.
    `folder`: folder for checkpoints; by default that of the environment variable COTENANT_JOB_DIR, which Cotenant sets
    for jobs that it starts. If there is neither, nothing is saved.
    `every_s`: seconds between checkpoints. `seed`: determines the order of the data; by default torch's initial seed,
    which `torch.manual_seed` sets. `most_workers`: a DataLoader with workers gets as many workers as the job has cores,
    but at most this many.
    Raises InputError for invalid arguments, WorkError if a checkpoint cannot be read.
    """
    if epochs < 1:
        raise InputError(f"epochs must be 1 or more, not {epochs}", field="epochs")
    if steps is not None and steps < 0:
        raise InputError(f"steps must be 0 or more, not {steps}", field="steps")
    if most_workers < 1:
        raise InputError(f"most_workers must be 1 or more, not {most_workers}", field="most_workers")
    if not every_s > 0:
        raise InputError(f"every_s must be above 0, not {every_s}", field="every_s")
    where = Path(folder) if folder is not None else _folder_given()
    if where is not None:
        try:
            where.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{where} cannot be created: {error.strerror or error}", field="folder") from None
    return Loop(find_source(loader, most_workers), find_states(checkpoint), epochs, steps, where, every_s, seed)


def _say(text: str) -> None:
    """Write a line to standard error. Errors are ignored, so that a log on a full disk does not end the training."""
    with contextlib.suppress(OSError):
        print(f"cotenant: {text}", file=sys.stderr, flush=True)


def _folder_given() -> Path | None:
    text = os.environ.get(FOLDER_ENV, "")
    return Path(text) if text else None


def _attempt_given() -> int:
    text = os.environ.get(ATTEMPT_ENV, "")
    return int(text) if text.isdecimal() else 0


def _seed_of_process() -> int:
    torch = sys.modules.get("torch")
    return int(torch.initial_seed()) if torch is not None else randomness.derive("cotenant")
