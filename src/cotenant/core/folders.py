"""Default folders of Cotenant. An environment variable can replace each of them.

| folder | variable | default |
|---|---|---|
| a node's agent: sockets, state | COTENANT_DIR | /run/cotenant for root, else cotenant/ in the XDG runtime folder |
| the fleet: jobs, logs, checkpoints | COTENANT_FLEET | cotenant/fleet in the XDG state folder |
| compiled kernels of the simulator | COTENANT_CACHE | cotenant/ in the XDG cache folder |
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from cotenant.core.errors import WorkError

# every user may trust the agent that uses this folder, since only root can create folders below /run
MACHINE_AGENT = Path("/run/cotenant")
CONTROL_SOCKET = "control.sock"
# the agent's state file, which is still there after the agent has ended
STATE_FILE = "state.json"
# a file in the fleet's folder; if the fleet's store is a database server, it contains the server's URL
STORE_URL = "store"


def agent_folder() -> Path:
    """Return the folder of the agent that this user's commands contact: the user's own agent if it runs, else the
    machine's.
    """
    # an agent that is being restarted has no socket; `exists` is also False if the user may not read the folder
    has_machine_agent = any(os.path.exists(MACHINE_AGENT / name) for name in (CONTROL_SOCKET, STATE_FILE))
    try:
        own = own_agent_folder()
    except WorkError:  # a folder of another user cannot be used
        if has_machine_agent:
            return MACHINE_AGENT
        raise
    if os.environ.get("COTENANT_DIR") or not has_machine_agent or os.path.exists(own / CONTROL_SOCKET):
        return own
    return MACHINE_AGENT


def own_agent_folder() -> Path:
    """Return the folder for the sockets of an agent started by this user."""
    if named := os.environ.get("COTENANT_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return MACHINE_AGENT
    runtime = _xdg("XDG_RUNTIME_DIR")
    return runtime / "cotenant" if runtime else _own(Path(f"/tmp/cotenant-{os.geteuid()}"))


def fleet_folder() -> Path:
    """Return the folder of this user's fleet."""
    named = os.environ.get("COTENANT_FLEET")
    return Path(named) if named else _below_home("XDG_STATE_HOME", ".local/state", "COTENANT_FLEET") / "fleet"


def cache_folder() -> Path:
    """Return the folder for this user's compiled code."""
    named = os.environ.get("COTENANT_CACHE")
    return Path(named) if named else _below_home("XDG_CACHE_HOME", ".cache", "COTENANT_CACHE")


def _xdg(variable: str) -> Path | None:
    """Return the base folder that an environment variable of the XDG specification names; None if it is not set or has
    a relative path, which the specification requires to be ignored.
    """
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else None


def _below_home(variable: str, default: str, own_variable: str) -> Path:
    base = _xdg(variable)
    if base is None:
        try:
            base = Path.home() / default
        except RuntimeError:
            raise WorkError(f"this user has no home folder: set ${own_variable} to another folder") from None
    return base / "cotenant"


def _own(folder: Path) -> Path:
    """Return the folder. Raises WorkError if it belongs to another user: that user's agent could then decide how this
    user's programs are started.
    """
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise WorkError(f"{folder} does not belong to this user: set another folder with COTENANT_DIR or --dir")
    return folder
