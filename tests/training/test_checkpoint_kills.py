"""kill -9 at any moment of writing a checkpoint leaves the old one or the new one, whole."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.core.errors import WorkError
from cotenant.training.checkpoint import CheckpointStore, FencedError

# Saves steps 1, 2, 3 and kills itself at the K-th call that touches the disk. Prints each step after it was saved.
CHILD = """
import builtins, os, pathlib, signal, sys
from cotenant.training.checkpoint import CheckpointStore
folder, kill_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
calls = 0
def counted(function):
    def call(*args, **more):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)
    return call
store = CheckpointStore(folder)
store.save(1, {"weights": [1] * 50_000})
class Slow(list):  # a state that dies half-way through being written
    def __reduce__(self):
        counted(lambda: None)()
        return (list, ([2],))
for module, name in ((os, "fsync"), (os, "open"), (os, "close"), (pathlib.Path, "replace"), (pathlib.Path, "open"),
                     (pathlib.Path, "mkdir"), (pathlib.Path, "glob"), (os, "rmdir"), (os, "unlink")):
    setattr(module, name, counted(getattr(module, name)))
for step in (2, 3):
    store.save(step, {"weights": [step] * 50_000, "slow": Slow()})
    print(step, flush=True)
print("calls", calls, flush=True)
"""


def run_child(folder: Path, kill_at: int) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", CHILD, str(folder), str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.split("\n")


def test_killed_anywhere_the_last_checkpoint_is_whole(tmp_path: Path) -> None:
    code, lines = run_child(tmp_path / "whole", 10**9)
    assert code == 0
    calls = int(lines[-2].split()[1])
    assert calls >= 20
    seen = set()
    for kill_at in range(1, calls + 1):
        folder = tmp_path / str(kill_at)
        code, lines = run_child(folder, kill_at)
        assert code == -9
        told = [int(line) for line in lines if line.isdecimal()]
        saved = CheckpointStore(folder).load()
        assert saved is not None
        assert saved.remark is None  # no incomplete checkpoint had to be skipped
        assert saved.state["weights"] == [saved.step] * 50_000
        assert saved.step >= max(told, default=1)  # a step that was reported as saved is there
        seen.add(saved.step)
        # files that the killed process left must not prevent further saves
        CheckpointStore(folder).save(9, {"weights": [9]})
        again = CheckpointStore(folder).load()
        assert again is not None
        assert again.step == 9
    assert seen == {1, 2, 3}


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WorkError, match="step 2 could not be written: No space left on device"):
        store.save(2, {"a": 2})
    monkeypatch.undo()
    saved = store.load()
    assert saved is not None
    assert (saved.step, saved.state) == (1, {"a": 1})
    assert not list(tmp_path.rglob("*.part"))


def test_an_unreadable_last_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"a": step})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-3"]
    file = next((tmp_path / "step-3").iterdir())
    file.write_bytes(file.read_bytes()[:5])
    saved = store.load()
    assert saved is not None
    assert saved.step == 2
    assert saved.remark is not None
    assert "step-3 cannot be read" in saved.remark
    (tmp_path / "step-2" / file.name).write_bytes(b"")
    with pytest.raises(WorkError, match="remove the folder to start from step 0"):
        store.load()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(WorkError, match="cannot be read"):
        store.load()


def test_an_earlier_start_cannot_overwrite_a_later_one(tmp_path: Path) -> None:
    late, early = CheckpointStore(tmp_path, attempt=2), CheckpointStore(tmp_path, attempt=1)
    early.save(5, {"a": 5})
    late.save(6, {"a": 6})
    with pytest.raises(FencedError, match="start 2 of this job"):
        early.save(7, {"a": 7})
    assert late.step() == 6


def test_what_cannot_be_pickled_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(WorkError, match="step 1 could not be written"):
        store.save(1, {"a": lambda: None})
    assert store.load() is None
    assert not (tmp_path / "manifest.json").exists()


def test_ranks_commit_together_or_not_at_all(tmp_path: Path) -> None:
    """Rank 1 fails to write: rank 0 hears of it before it commits."""
    store = CheckpointStore(tmp_path, rank=0, world=2)
    with pytest.raises(WorkError, match="another rank"):
        store.save(1, {"a": 1}, together=lambda well: False)
    assert store.load() is None
    store.save(2, {"a": 2})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["step"], manifest["world"]) == (2, 2)
    saved = store.load()
    assert saved is not None
    assert (saved.world, saved.state) == (2, {"a": 2})
