"""The loop without any framework: leases, progress, stopping and going on."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cotenant
from cotenant.core.errors import InputError, WorkError
from cotenant.training import contract
from cotenant.training.contract import PROGRESS_FILE, Lease, Progress, read_json, write_lease
from cotenant.training.loop import Loop


def read_progress(folder: Path) -> Progress | None:
    """The job's last report."""
    raw = read_json(folder / PROGRESS_FILE)
    return None if raw is None else Progress(**raw)


class Model:
    """A model whose weight depends on every batch, their order, and the random numbers of training."""

    def __init__(self) -> None:
        self.weight = 1.0

    def train(self, batch: int) -> float:
        self.weight = self.weight * 0.99 + batch * random.random()
        return self.weight

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


def shuffled(epoch: int) -> Iterator[int]:
    order = list(range(7))
    random.shuffle(order)
    yield from order


def run(folder: Path | None, loader: Any, stop_after: int | None = None, **more: Any) -> tuple[list[float], Loop, bool]:
    """Train; the losses, the loop, and whether it left early (after `stop_after` steps of this start)."""
    random.seed(5)
    model = Model()
    loop = cotenant.loop(loader, checkpoint={"model": model}, folder=folder, seed=3, **more)
    losses: list[float] = []
    code = None
    try:
        for batch in loop:
            losses.append(model.train(batch))
            if len(losses) == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as exit_:
        code = exit_.code
    assert code in (None, contract.PREEMPTED_EXIT)
    return losses, loop, code is not None


@pytest.fixture(autouse=True)
def _no_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (contract.FOLDER_ENV, contract.ATTEMPT_ENV, contract.CPUS_ENV, contract.MEMORY_ENV):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("loader", [shuffled, list(range(7)), range(7)])
def test_stopped_anywhere_it_goes_on_with_the_same_losses(tmp_path: Path, loader: Any) -> None:
    whole, _, _ = run(None, loader, epochs=3)
    assert len(whole) == 21
    for stop_after in (1, 6, 7, 8, 13, 20):
        folder = tmp_path / str(stop_after)
        first, loop, left = run(folder, loader, stop_after, epochs=3)
        assert left
        assert loop.step == stop_after
        rest, _, left = run(folder, loader, epochs=3)
        assert not left
        assert first + rest == whole


@settings(max_examples=25)
@given(stops=st.lists(st.integers(1, 9), max_size=6))
def test_stopped_any_number_of_times(tmp_path_factory: pytest.TempPathFactory, stops: list[int]) -> None:
    whole, _, _ = run(None, shuffled, epochs=3)
    folder, losses = tmp_path_factory.mktemp("job"), []
    for stop_after in [*stops, None]:
        more, _, _ = run(folder, shuffled, stop_after, epochs=3)
        losses += more
    assert losses == whole


def test_a_stop_at_the_very_end_and_a_start_after_the_end_do_no_harm(tmp_path: Path) -> None:
    run(tmp_path, shuffled, 21, epochs=3)
    rest, loop, left = run(tmp_path, shuffled, epochs=3)
    assert (rest, loop.step, left) == ([], 21, False)
    again, _, _ = run(tmp_path, shuffled, epochs=3)
    assert again == []


def test_killed_it_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """A checkpoint asked for inside a step is of the whole step; the steps after it are done again, alike."""
    whole, _, _ = run(None, shuffled, epochs=2)
    random.seed(5)
    model = Model()
    loop = cotenant.loop(shuffled, checkpoint={"model": model}, folder=tmp_path, seed=3, epochs=2)
    for number, batch in enumerate(loop):
        if number == 4:
            loop.save()
        model.train(batch)
        if number == 8:
            break  # as in a crash: nothing more is saved
    losses, loop, _ = run(tmp_path, shuffled, epochs=2)
    assert loop.step == 14
    assert losses == whole[5:]


def test_periodic_checkpoints_are_between_steps(tmp_path: Path) -> None:
    whole, _, _ = run(None, shuffled, epochs=2)
    random.seed(5)
    model = Model()
    loop = cotenant.loop(shuffled, checkpoint={"model": model}, folder=tmp_path, seed=3, epochs=2, every_s=1e-9)
    losses = []
    for batch in loop:
        if len(losses) == 9:
            break  # as in a crash: nothing more is saved
        losses.append(model.train(batch))
    rest, _, _ = run(tmp_path, shuffled, epochs=2)
    assert losses + rest == whole


class Clock:
    """A clock that a test moves, in place of the module `time`: a slow machine then costs no lease its time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic


class TestLease:
    """What whoever started the job says while it runs."""

    STEP_S = 1 / 256

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        for module in ("loop", "leases"):
            monkeypatch.setattr(f"cotenant.training.{module}.time", self.clock)

    def steps(self, folder: Path, change: Any, most: int = 400) -> tuple[Loop, int | None]:
        loop = cotenant.loop(lambda epoch: range(most), checkpoint=Model(), folder=folder)
        try:
            for number in loop:
                self.clock.now_s += self.STEP_S
                change(number, loop)
        except SystemExit as exit_:
            return loop, int(exit_.code or 0)
        return loop, None

    def test_stop_is_seen_within_a_moment(self, tmp_path: Path) -> None:
        def change(number: int, loop: Loop) -> None:
            if number == 10:
                write_lease(tmp_path, 0, Lease(stop=True))

        loop, code = self.steps(tmp_path, change)
        assert code == 75
        assert 11 <= loop.step <= 24  # the loop looks at its lease every 50 ms
        progress = read_progress(tmp_path)
        assert progress is not None
        assert (progress.state, progress.step, progress.checkpoint_step) == ("preempted", loop.step, loop.step)

    def test_it_ends_by_itself_where_nobody_renews_it(self, tmp_path: Path) -> None:
        write_lease(tmp_path, 0, Lease(until_s=self.clock.now_s + 60 * self.STEP_S))
        loop, code = self.steps(tmp_path, lambda *_: None)
        assert code == 75
        assert loop.step == 60

    def test_it_goes_on_while_it_is_renewed(self, tmp_path: Path) -> None:
        first_end_s = self.clock.now_s + 1.5
        write_lease(tmp_path, 0, Lease(until_s=first_end_s))

        def renew(number: int, loop: Loop) -> None:
            if number == 0:
                write_lease(tmp_path, 0, Lease(until_s=first_end_s + 600.0))

        loop, code = self.steps(tmp_path, renew)
        assert (code, loop.step) == (None, 400)
        assert self.clock.now_s > first_end_s

    def test_a_later_start_of_the_job_ends_this_one_without_a_checkpoint(self, tmp_path: Path) -> None:
        def change(number: int, loop: Loop) -> None:
            if number == 10:
                write_lease(tmp_path, 0, Lease(attempt=1))

        _, code = self.steps(tmp_path, change)
        assert code == 75
        assert not (tmp_path / "checkpoint").exists()

    def test_a_lease_of_the_start_before_is_not_ours(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_lease(tmp_path, 0, Lease(stop=True, attempt=0))
        monkeypatch.setenv(contract.ATTEMPT_ENV, "1")
        loop, code = self.steps(tmp_path, lambda *_: None, most=40)
        assert (code, loop.step) == (None, 40)

    def test_other_cores_and_memory_are_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(contract.CPUS_ENV, "3")
        monkeypatch.setenv(contract.MEMORY_ENV, "1000")
        seen = []

        def change(number: int, loop: Loop) -> None:
            seen.append((loop.lease.cpus, loop.lease.memory_bytes))
            if number == 5:
                write_lease(tmp_path, 0, Lease(cpus=6.5))

        self.steps(tmp_path, change, most=60)
        assert seen[0] == (3.0, 1000)
        assert seen[-1] == (6.5, 1000)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stop": 1, "cpus": "many", "until_s": NaN}'])
    def test_a_lease_that_makes_no_sense_changes_nothing(self, tmp_path: Path, content: bytes) -> None:
        contract.lease_file(tmp_path).write_bytes(content)
        loop, code = self.steps(tmp_path, lambda *_: None, most=30)
        assert (code, loop.step) == (None, 30)


def test_a_data_set_learns_the_memory_of_the_lease_and_of_each_change(tmp_path: Path) -> None:
    seen: list[int] = []

    class Data:
        def set_memory_budget(self, memory_bytes: int) -> None:
            seen.append(memory_bytes)

    class Loader:
        dataset: Any = Data()

        def __iter__(self) -> Iterator[int]:
            return iter(range(300))

    write_lease(tmp_path, 0, Lease(memory_bytes=1000))
    for step in cotenant.loop(Loader(), folder=tmp_path):
        if step == 20:
            write_lease(tmp_path, 0, Lease(memory_bytes=3000))
        time.sleep(0.002)
    assert seen == [1000, 3000]


def test_progress_is_told(tmp_path: Path) -> None:
    loop = cotenant.loop(range(40), checkpoint=Model(), folder=tmp_path, epochs=2)
    for _ in loop:
        time.sleep(0.02)
        progress = read_progress(tmp_path)
        assert progress is not None
        assert progress.state == "running"
        assert progress.total_steps == 80
        assert progress.fraction == progress.step / 80
        assert 0 <= loop.step - progress.step <= 40  # half a second of steps, and a margin for slow machines
    progress = read_progress(tmp_path)
    assert progress is not None
    assert (progress.state, progress.fraction, progress.checkpoint_step, progress.epoch) == ("finished", 1.0, 80, 2)


class FullDisk(io.StringIO):
    """Standard error of a job whose log lies on the same full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.training.checkpoint import CheckpointStore

    def full(*_: object, **__: object) -> None:
        raise WorkError("the checkpoint of step 1 could not be written: No space left on device")

    monkeypatch.setattr(CheckpointStore, "save", full)
    monkeypatch.setattr("sys.stderr", FullDisk())
    losses, _, left = run(tmp_path, shuffled, 4)
    assert (len(losses), left) == (4, True)
    progress = read_progress(tmp_path)
    assert progress is not None
    assert progress.problem is not None
    assert "No space left" in progress.problem
    assert progress.checkpoint_step is None


def test_a_disk_that_takes_no_reports_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cotenant.training.loop.write_progress", full)
    monkeypatch.setattr("cotenant.training.loop.REPORT_S", 0.0)
    run(tmp_path, shuffled)
    assert capsys.readouterr().err.count("the progress report could not be written: No space left on device") == 1


def test_nonsense_in_the_environment_is_nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (contract.ATTEMPT_ENV, contract.CPUS_ENV, contract.MEMORY_ENV, "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "many")
    _, loop, _ = run(tmp_path, shuffled)
    assert (loop.lease.cpus, loop.lease.memory_bytes, loop.lease.attempt) == (None, None, 0)


def test_sigterm_is_the_programs_again_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path, shuffled)
    assert signal.getsignal(signal.SIGTERM) is before


def test_wrong_arguments_are_one_sentence(tmp_path: Path) -> None:
    for arguments, field in (
        ({"loader": iter([1])}, "loader"),
        ({"loader": 5}, "loader"),
        ({"loader": [1], "checkpoint": {"model": 7}}, "checkpoint.model"),
        ({"loader": [1], "epochs": 0}, "epochs"),
        ({"loader": [1], "every_s": float("nan")}, "every_s"),
        ({"loader": [1], "steps": -1}, "steps"),
        ({"loader": [1], "folder": "/proc/none"}, "folder"),
    ):
        with pytest.raises(InputError) as caught:
            cotenant.loop(arguments.pop("loader"), **arguments)
        assert caught.value.field == field


def test_another_program_does_not_take_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, shuffled, 3)
    with pytest.raises(WorkError, match="holds model, and the program asks for optimizer"):
        for _ in cotenant.loop(shuffled, checkpoint={"optimizer": Model()}, folder=tmp_path):
            pass


def test_the_loop_needs_the_standard_library_alone() -> None:
    code = "import sys, cotenant; cotenant.loop([1]); print(sorted(m for m in ('numpy', 'typer', 'polars', 'torch')"
    code += " if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
