"""Runs Ray on the machines of a lab: a head and nodes with addresses of their own, and Cotenant's programs with
them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from netlab import Lab, child_of
from waiting import wait_for

from cotenant.fleet.executors import ray_head

PORT = 6379
START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=0",
         "--object-store-memory=80000000", "--disable-usage-stats")  # fmt: skip
PLACE = "/tmp/ray"  # where Ray keeps sockets and logs
SMALL_DISK = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=32m ray {PLACE} && exec "$@"', "sh")
LONG_S = 300.0  # seconds; longer than any fault takes, even on a machine with other work


class RayLab:
    """A lab whose first machine runs Ray's head. `folder`: for logs. `offsets_s`: offsets of the monotonic clocks.
    `small`: a machine with a small disk of its own for Ray."""

    def __init__(
        self, folder: Path, names: tuple[str, ...], offsets_s: Mapping[str, int] = MappingProxyType({}), small: str = ""
    ) -> None:
        pytest.importorskip("ray")
        self.folder, self.names, self.small, self._numbers = folder, names, small, itertools.count()
        self.lab = Lab(names)
        for name, offset_s in offsets_s.items():
            self.lab.machines[name].offset_s = offset_s
        Path(PLACE).mkdir(mode=0o1777, exist_ok=True)
        self.rays: dict[str, subprocess.Popen[bytes]] = {}
        for machine in self.lab.machines.values():  # Ray takes the address of the default route as its own
            subprocess.run(["ip", "-n", machine.space, "route", "add", "default", "via", "10.77.0.254"], check=True)
        self.address = f"{self.lab.machines[names[0]].address}:{PORT}"
        try:
            for name in names:
                self.ray(name)
        except BaseException:
            self.end()
            raise

    def ray(self, name: str) -> None:
        """Start Ray on a machine, and wait until it runs."""
        if name in self.rays:
            self.rays[name].kill()
            self.rays[name].wait()
        own = f"--node-ip-address={self.lab.machines[name].address}"
        where = ("--head", f"--port={PORT}", "--include-dashboard=false") if name == self.names[0] else (
            f"--address={self.address}",)  # fmt: skip
        disk = SMALL_DISK if name == self.small else ()
        self.rays[name] = self.start(name, *disk, *START, own, *where, word="Ray runtime started")

    def pids(self, name: str, word: str = "") -> set[int]:
        """Processes of a machine; with `word`, only those whose command line contains it."""
        space = self.lab.machines[name].space
        listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True)
        found = set()
        for pid in listed.stdout.split():
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
        return found

    def kill(self, name: str, word: str = "", number: int = signal.SIGKILL) -> None:
        """Send a signal to these processes."""
        for pid in self.pids(name, word):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def filler(self) -> Path:
        """A file that fills the small disk."""
        path = Path(f"/proc/{child_of(self.rays[self.small])}/root{PLACE}/filler")
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        return path

    def start(self, name: str, *command: str, word: str) -> subprocess.Popen[bytes]:
        """Start a program on a machine, and wait until it has printed a word."""
        log = self.folder / f"{name}-{next(self._numbers)}.log"
        # Ray would require a token if an earlier `ray.init` of this user has stored one.
        env = ray_head.environment() | {"RAY_AUTH_MODE": "disabled"}
        with log.open("ab") as out:
            started = self.lab.machines[name].start(*command, stdout=out, stderr=out, env=env)
        text = lambda: log.read_text(errors="replace")  # noqa: E731
        wait_for(lambda: word in text() or started.poll() is not None, LONG_S, f"{word!r} in {log}")
        assert word in text(), text()
        return started

    def ours(self, name: str, *words: str, word: str) -> subprocess.Popen[bytes]:
        """Start the `cotenant` command on a machine."""
        return self.start(name, sys.executable, "-m", "cotenant.cli.main", *words, word=word)

    def end(self) -> None:
        """End all that runs there."""
        self.lab.end()
