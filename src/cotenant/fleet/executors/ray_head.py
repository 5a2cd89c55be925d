"""A local Ray cluster for the fleet: one head node, in a session of its own, reused by later controllers."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

from cotenant.agent.processes import ProcessKey, alive, descendants, key_of
from cotenant.core.errors import WorkError
from cotenant.fleet.store.jobs import LOCK_FILE

STATE_FILE = "ray.json"
TOKEN_FILE = "ray-token"
READY_S = 90.0
WATCH_S = 1.0
UNUSED_S = 120.0
OBJECT_STORE_BYTES = 80 << 20  # size of Ray's object store; it is small, because nothing large passes through Ray here


def environment(folder: Path | None = None) -> dict[str, str]:
    """Environment of Ray's processes. `folder`: folder of the fleet's own Ray cluster, with the token that the cluster
    requires, since it listens on all addresses.
    """
    own = {}
    if folder is not None:
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str((folder / TOKEN_FILE).absolute())}
    return (
        os.environ
        | own
        | {
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_METRICS_COLLECTION": "0",
            "RAY_DEDUP_LOGS": "0",
            # jobs run in sessions of their own and must not end with the actor that started them
            "RAY_kill_child_processes_on_worker_exit": "0",
            "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "0",
            "RAY_process_group_cleanup_enabled": "0",
        }
    )


def ensure(folder: Path) -> str:
    """Address of the Ray cluster that belongs to the folder. Starts the cluster if it does not run. Raises WorkError if
    it does not start."""
    known = _known(folder)
    if known is not None:
        return known
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    descriptor = os.open(folder / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    place = _place(folder)
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        "--node-ip-address=127.0.0.1", f"--temp-dir={place}", "--num-cpus=1", "--num-gpus=0",
        f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-dashboard=false", "--disable-usage-stats",
    ]  # fmt: skip
    with (folder / "ray-head.log").open("ab") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "cotenant.fleet.executors.ray_head", str(folder), *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment(folder),
        )  # fmt: skip
    key = key_of(head.pid)
    state = {"port": port, "pid": key.pid, "start_ticks": key.start_ticks, "temp_dir": str(place)}
    (folder / STATE_FILE).write_text(json.dumps(state))
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and head.poll() is None:
        if _listens(port):
            return f"127.0.0.1:{port}"
        time.sleep(0.1)
    stop(folder)
    raise WorkError(f"a local Ray cluster did not start; see {folder / 'ray-head.log'}")


def _place(folder: Path) -> Path:
    """A folder for Ray's sockets, with a short path, since socket paths are limited to about 100 bytes. Raises
    WorkError if another user owns it.
    """
    place = Path("/tmp") / f"cotenant-ray-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:10]}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise WorkError(f"{place} does not belong to this user; remove it")
    return place


def stop(folder: Path) -> None:
    """End all processes of the Ray cluster that belongs to the folder."""
    key = _head(folder)
    if key is not None and alive(key):
        below = descendants({key})
        _signal(key, signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and any(alive(k) for k in below | {key}):
            time.sleep(0.05)
        for left in below | {key}:
            _signal(left, signal.SIGKILL)
    if key is not None:
        shutil.rmtree(_place(folder), ignore_errors=True)
    (folder / STATE_FILE).unlink(missing_ok=True)


def _known(folder: Path) -> str | None:
    """Return the address of a running Ray cluster in this folder. The files of a dead cluster are removed."""
    key = _head(folder)
    if key is None:
        return None
    port = json.loads((folder / STATE_FILE).read_text())["port"]
    if alive(key) and _listens(port):
        return f"127.0.0.1:{port}"
    stop(folder)
    return None


def _head(folder: Path) -> ProcessKey | None:
    try:
        state = json.loads((folder / STATE_FILE).read_text())
        return ProcessKey(int(state["pid"]), int(state["start_ticks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False


def _signal(key: ProcessKey, number: int) -> None:
    if alive(key):
        try:
            os.kill(key.pid, number)
        except (ProcessLookupError, PermissionError):
            return


def watch(folder: Path, command: list[str]) -> int:
    """Run the head node, and end it if no controller has held the folder for UNUSED_S, so that a killed controller
    leaves no cluster behind. Running jobs do not need the head node.
    """
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    unused_since: float | None = None
    while child.poll() is None:
        time.sleep(WATCH_S)
        if _held(folder):
            unused_since = None
            continue
        unused_since = unused_since or time.monotonic()
        if time.monotonic() - unused_since > UNUSED_S:
            child.terminate()
    return int(child.returncode)


def _held(folder: Path) -> bool:
    """Whether the controller that last took the folder still runs."""
    try:
        pid = int((folder / LOCK_FILE).read_text().removeprefix("pid "))
    except (OSError, ValueError):
        return False
    return alive(key_of(pid))


if __name__ == "__main__":
    sys.exit(watch(Path(sys.argv[1]), sys.argv[2:]))
