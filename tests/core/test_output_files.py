"""Where output files go: a link stays a link, what is no file is written and not replaced."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from waiting import WITHIN_S

from cotenant.core.errors import InputError
from cotenant.core.files import atomic_file, check_writable


def test_a_pipe_is_written_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    with atomic_file(pipe) as file:
        file.write("job,jct_s\n")
    reader.join(WITHIN_S)
    assert read == ["job,jct_s\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    check_writable(pipe)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real.csv", tmp_path / "link.csv"
    if exists:
        real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    check_writable(link)
    with atomic_file(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == "new"
    assert os.listdir(tmp_path / "elsewhere") == ["real.csv"]


def test_an_error_leaves_the_file_behind_a_link_as_it_was(tmp_path: Path) -> None:
    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    with pytest.raises(ZeroDivisionError), atomic_file(link) as file:
        file.write(f"half {1 / 0}")
    assert real.read_text(encoding="utf-8") == "old"
    assert sorted(os.listdir(tmp_path)) == ["link.csv", "real.csv"]


def test_a_link_to_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "gone" / "real.csv")
    with pytest.raises(InputError, match="cannot write"):
        check_writable(link)
    with pytest.raises(InputError, match="cannot write"), atomic_file(link):
        pass


@pytest.mark.parametrize("name", ["out.csv", "odd[1].csv"])
def test_what_a_killed_writer_left_is_cleared_and_that_of_a_living_one_is_not(tmp_path: Path, name: str) -> None:
    done = subprocess.Popen(["true"])
    done.wait()  # so that its process number is free again
    dead, alive = tmp_path / f".{name}.part-{done.pid}", tmp_path / f".{name}.part-{os.getppid()}"
    other = tmp_path / f".x{name}.part-{done.pid}"
    for file in (dead, alive, other):
        file.write_text("half", encoding="utf-8")
    with atomic_file(tmp_path / name) as file:
        file.write("whole")
    assert set(os.listdir(tmp_path)) == {name, alive.name, other.name}
