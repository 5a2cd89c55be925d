"""`for batch in cotenant.loop(loader, checkpoint=...)`: a training loop that can be stopped, moved and resumed exactly.

After every step the loop reads its lease, reports its progress, and saves a checkpoint if one is due or requested. When
asked to stop, it saves and ends the process with exit code 75; started again with the same folder, it resumes at the
next batch.
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

REPORT_S = 0.5  # interval between reports of progress


class Loop:
    """One training loop of a process; see `cotenant.loop` for what it is given. Iterate over it once.

    `step`: whole steps done since the beginning of training; `epoch`: the current one, from 0; `lease`: what the job
    may use at the moment.
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
        self._batch = 0  # number of the next batch in its epoch
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
        """What this process may use: the latest lease, or else the one that it was started with."""
        return self._watch.lease

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training; None where the loader cannot tell."""
        length = self._source.length()
        total = None if length is None else length * self._epochs
        return total if self._steps is None else self._steps if total is None else min(self._steps, total)

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise RuntimeError("a loop can be iterated over only once; create another one for more training")
        self._begun = True
        self._gang = find_gang()
        # one of several processes that do not communicate: each saves its own checkpoints
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
        """Ask for a checkpoint; it is made when the current step is done (in a gang: one step later)."""
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

    # ---- going on

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
                    ended = False  # resume with new workers at the next batch
                    break
            if ended:
                self.epoch += 1
                self._batch = 0

    def _other_workers(self, before: Lease) -> bool:
        """Whether the lease requires other worker processes, because the number of cores or the memory budget
        changed."""
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

    # ---- beginning and ending

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
                    _say(f"{saved.remark}; going on from step {saved.step}")
                state = saved.state
                self._states.put(state["objects"])
                self.step = self._saved_step = saved.step
                self.epoch, self._batch, self._seed = state["epoch"], state["batch"], state["seed"]
                if self._gang.rank < saved.world:
                    randomness.put(state["random"])
                else:  # a new rank: random numbers that no other rank uses, but reproducible
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
        """Save; if the disk fails, training continues and the report says so. A job that was replaced ends."""
        try:
            self._save()
        except FencedError as error:
            raise SystemExit(f"cotenant: {error}") from None
        except WorkError as error:
            self._saved_s = time.monotonic()  # retry at the next interval
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
            if not self._mute:  # print it once per outage
                _say(f"progress could not be told: {error.strerror or error}")
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
    """Iterate over the batches of `epochs` epochs (at most `steps` of them), so that training can be stopped anywhere
    and resumed exactly.

    `loader`: a torch DataLoader, a sequence of batches, an iterable, or a function from the epoch to an iterable.
    `checkpoint`: what training changes, by name: `{"model": model, "optimizer": optimizer, "scheduler": scheduler}`;
    anything with `state_dict` and `load_state_dict`, and random generators of numpy and torch. Saved beside it: the
    place in the data and the random state of Python, numpy and torch. None: nothing is saved.
    `folder`: where; by default the job's folder that the fleet gives, and outside of a fleet nothing is saved.
    `every_s`: seconds between checkpoints while running. `seed`: of the order of the data; by default torch's initial
    seed, so `torch.manual_seed` before governs it. `most_workers`: a DataLoader that has workers gets as many as the
    job has cores, at most this many.
    InputError for arguments that cannot be right, WorkError for a checkpoint that cannot be read.
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
    """Write to standard error if possible: a log on the same full disk must not end the training."""
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
