"""Where Cotenant keeps what it makes: a variable each, the XDG folders otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cotenant.core import folders
from cotenant.core.errors import WorkError
from cotenant.core.folders import agent_folder, cache_folder, fleet_folder, own_agent_folder
from cotenant.policy import compiled

VARIABLES = ("COTENANT_DIR", "COTENANT_FLEET", "COTENANT_CACHE", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home-of-a-user")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(folders, "MACHINE_AGENT", Path("/nowhere"))


def test_the_xdg_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fleet_folder() == Path("/home-of-a-user/.local/state/cotenant/fleet")
    assert cache_folder() == Path("/home-of-a-user/.cache/cotenant")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/r")
    assert (fleet_folder(), cache_folder(), agent_folder()) == (
        Path("/s/cotenant/fleet"), Path("/c/cotenant"), Path("/r/cotenant")
    )  # fmt: skip


def test_a_relative_xdg_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == Path("/home-of-a-user/.cache/cotenant")


def test_a_variable_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES[:3]:
        monkeypatch.setenv(name, f"/x/{name}")
    assert (agent_folder(), fleet_folder(), cache_folder()) == (
        Path("/x/COTENANT_DIR"), Path("/x/COTENANT_FLEET"), Path("/x/COTENANT_CACHE")
    )  # fmt: skip


def test_the_agent_of_root_is_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    assert agent_folder() == folders.MACHINE_AGENT


def test_a_user_without_an_agent_reaches_the_machine_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, runtime = tmp_path / "machine", tmp_path / "runtime"
    monkeypatch.setattr(folders, "MACHINE_AGENT", machine)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    for folder in (machine, runtime / "cotenant"):
        folder.mkdir(parents=True)
    assert agent_folder() == runtime / "cotenant", "there is no agent at all"
    (machine / "state.json").touch()
    assert agent_folder() == machine, "its agent is being restarted"
    (machine / "control.sock").touch()
    assert agent_folder() == machine
    assert own_agent_folder() == runtime / "cotenant", "an agent of this user starts there nonetheless"
    (runtime / "cotenant" / "control.sock").touch()
    assert agent_folder() == runtime / "cotenant", "the user's own agent goes first"
    monkeypatch.setenv("COTENANT_DIR", "/x")
    assert agent_folder() == Path("/x")


def test_the_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can make a folder under /tmp beforehand, and its agent would say what a program is started with."""
    user = 10**6 + os.getpid()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    folder = agent_folder()
    assert folder == Path(f"/tmp/cotenant-{user}")
    folder.mkdir()
    try:
        with pytest.raises(WorkError, match="does not belong to this user"):
            agent_folder()
    finally:
        folder.rmdir()


def test_kernels_are_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_CACHE", str(tmp_path))
    assert compiled.cache_folder().parent == tmp_path / "kernels"


def test_a_user_without_a_home_is_told_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(WorkError, match=r"\$COTENANT_CACHE"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/cotenant")
