"""Runs nvidia-cuda-mps-control: finds what the installed version can do, and sends commands to an MPS daemon."""

from __future__ import annotations

import csv
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cotenant.core.errors import WorkError

PATIENCE_S = 20
PIPE_FOLDER, LOG_FOLDER = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CLIENT_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"  # priority 0 is normal, 1 is lower; it is a hint, and nothing is preempted


@dataclass(frozen=True)
class Abilities:
    """What an MPS daemon of the installed version can do. `protocol`: version of its control protocol; 0 if MPS is not
    installed.
    """

    protocol: int
    multiuser: bool = False  # the MPS daemon can serve clients of several users
    shareable: bool = False  # SM partitions can lend SMs to other partitions and borrow SMs from them
    weights: bool = False  # time slices of the MPS servers can have weights


PARTITION_HELP = ("sm-partition", "create", "help")
SERVER_HELP = ("server", "set", "help")


def abilities(command: str) -> Abilities:
    """Find what the installed MPS can do from the help that its control command prints. No MPS daemon is started."""
    text = _help(command, "-h")
    if text is None:
        return Abilities(0)
    if "server" not in text.split() or "namespace" not in text.split():
        return Abilities(2)
    partitions, servers = (_help(command, *words) or "" for words in (PARTITION_HELP, SERVER_HELP))
    return Abilities(3, "--multiuser" in text, "shareable" in partitions, "timeslice-pct" in servers)


def _help(command: str, *words: str) -> str | None:
    """What the command prints with protocol 3 requested: empty if it knows only older protocols, None if the command is
    missing.
    """
    environment = os.environ | {"CUDA_MPS_PROTOCOL_VERSION": "3"}
    try:
        done = subprocess.run(
            [command, "-p", "3", *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


@dataclass(frozen=True)
class Control:
    """Starts and controls the MPS daemon whose pipes are in the folder `pipe`."""

    command: str
    pipe: Path
    log: Path
    protocol: int

    def folders(self) -> dict[str, str]:
        """Environment variables that must have the same values for the MPS daemon, its control command and its clients.
        """
        return {PIPE_FOLDER: str(self.pipe), LOG_FOLDER: str(self.log)}

    def start(self, *options: str, visible: str | None = None) -> None:
        """Start the MPS daemon and return when it runs. Raises WorkError if it fails. `visible`: the GPUs that the
        daemon may use.
        """
        for path in (self.pipe, self.log):
            # with protocol 2 a daemon serves only one user, and this mode keeps other users from its socket
            path.mkdir(parents=True, exist_ok=True, mode=0o700 if self.protocol == 2 else 0o755)
        added = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        code, _, error = self._run(["-d", *options], "", added)
        if code != 0:
            said = error.strip().splitlines()
            raise WorkError(f"mps: the control daemon did not start: {said[-1] if said else code}")

    def order(self, *words: str) -> str:
        """Send a command to the MPS daemon and return its answer. Raises WorkError if the daemon refuses it or does not
        run.
        """
        if self.protocol == 2:
            code, out, error = self._run([], " ".join(words) + "\n", {})
        else:
            code, out, error = self._run(list(words), "", {})
        if code != 0:
            raise WorkError(f"mps: the control daemon refused {' '.join(words)!r}: {error.strip() or code}")
        return out

    def rows(self, *words: str) -> list[list[str]]:
        """Send the MPS daemon a command that lists something (protocol 3); returns the rows of the table without its
        header.
        """
        return [row for row in csv.reader(self.order(*words, "--format=csv,noheader").splitlines()) if row]

    def answers(self) -> bool:
        """Return whether the MPS daemon runs and understands the control protocol `self.protocol`."""
        try:
            self.order(*(["get_server_list"] if self.protocol == 2 else ["server", "list", "--format=csv,noheader"]))
        except WorkError:
            return False
        return True

    def _run(self, words: list[str], text: str, added: dict[str, str]) -> tuple[int, str, str]:
        spoken = {"CUDA_MPS_PROTOCOL_VERSION": str(self.protocol)} if self.protocol != 2 else {}
        try:
            done = subprocess.run(
                [self.command, *words], input=text, env=os.environ | self.folders() | spoken | added,
                capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise WorkError(f"mps: {self.command} is not installed on this machine") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            said = " ".join(words) or text.strip()
            raise WorkError(f"mps: the control daemon does not answer {said!r}: {error}") from None
        return done.returncode, done.stdout, done.stderr or done.stdout
