"""Temporary folders whose processes are killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cotenant.core.temporary import temporary_folder

HOLD = """
from cotenant.core.temporary import temporary_folder
with temporary_folder("test") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process with a temporary folder, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folders_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    killed, left = holder()
    other, kept = holder()
    try:
        another_kind = tmp_path / "cotenant-other-1"
        another_kind.mkdir()
        killed.kill()
        killed.communicate()
        assert left.exists()
        tidied: list[Path] = []
        with temporary_folder("test", lambda folder: tidied.append(folder / "file")) as mine:
            assert tidied == [left / "file"]
            assert set(tmp_path.iterdir()) == {mine, kept, another_kind}
        assert set(tmp_path.iterdir()) == {kept, another_kind}
        other.communicate("\n")
        assert set(tmp_path.iterdir()) == {another_kind}
    finally:
        other.kill()
        other.communicate()


def test_a_link_to_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "cotenant-test-1").symlink_to(tmp_path / "mine")
    with temporary_folder("test"):
        pass
    assert (tmp_path / "mine").is_dir()
