"""The folders that Cotenant makes where no option names one. Each has one variable that puts it elsewhere.

| folder | variable | else |
|---|---|---|
| a node's agent: sockets, state | COTENANT_DIR | /run/cotenant for root, else cotenant/ in the XDG runtime folder |
| the fleet: jobs, logs, checkpoints | COTENANT_FLEET | cotenant/fleet in the XDG state folder |
| what is compiled when it is used: the simulator's kernels | COTENANT_CACHE | cotenant/ in the XDG cache folder |
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from cotenant.core.errors import WorkError

MACHINE_AGENT = Path("/run/cotenant")  # below /run only root makes folders, so its agent can be trusted by every user
CONTROL_SOCKET = "control.sock"


def agent_folder() -> Path:
    """Where the agent is that this user's commands reach: the user's own where one runs, else the machine's."""
    has_machine_agent = os.path.exists(MACHINE_AGENT / CONTROL_SOCKET)  # False, too, where this user may not look
    try:
        own = own_agent_folder()
    except WorkError:  # somebody else made it
        if has_machine_agent:
            return MACHINE_AGENT
        raise
    if os.environ.get("COTENANT_DIR") or not has_machine_agent or os.path.exists(own / CONTROL_SOCKET):
        return own
    return MACHINE_AGENT


def own_agent_folder() -> Path:
    """Where an agent that this user starts has its sockets."""
    if named := os.environ.get("COTENANT_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return MACHINE_AGENT
    runtime = _xdg("XDG_RUNTIME_DIR")
    return runtime / "cotenant" if runtime else _own(Path(f"/tmp/cotenant-{os.geteuid()}"))


def fleet_folder() -> Path:
    """Where the fleet of this user lives."""
    named = os.environ.get("COTENANT_FLEET")
    return Path(named) if named else _below_home("XDG_STATE_HOME", ".local/state", "COTENANT_FLEET") / "fleet"


def cache_folder() -> Path:
    """Where this user's compiled code is kept."""
    named = os.environ.get("COTENANT_CACHE")
    return Path(named) if named else _below_home("XDG_CACHE_HOME", ".cache", "COTENANT_CACHE")


def _xdg(variable: str) -> Path | None:
    """A base folder of the XDG specification, which has relative paths ignored."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else None


def _below_home(variable: str, default: str, own_variable: str) -> Path:
    base = _xdg(variable)
    if base is None:
        try:
            base = Path.home() / default
        except RuntimeError:
            raise WorkError(f"this user has no home folder: name another folder in ${own_variable}") from None
    return base / "cotenant"


def _own(folder: Path) -> Path:
    """The folder, if it is this user's: an agent decides what a tenant's program is started with."""
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise WorkError(f"{folder} is not a folder of this user: name another one with COTENANT_DIR or --dir")
    return folder
