"""Several machines simulated on one: network namespaces with addresses of their own, joined by a switch that can fail.

Each namespace has one TAP device. The switch is a thread of this process that reads the frames and passes them on, late
or not at all, for each direction by itself. So it needs no qdisc (netem is not in every kernel), and a seed decides
which frame is lost. Needs root and /dev/net/tun. Clocks differ by time namespaces (monotonic, boottime).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
_labs = itertools.count()


def needs_lab() -> None:
    """Skip the test if this machine cannot create namespaces."""
    if os.geteuid() != 0 or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("network namespaces with TAP devices need root and /dev/net/tun")
    absent = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} of iproute2 and util-linux are not installed")
    if subprocess.run(["unshare", "--net", "--time", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this kernel or container gives no network and time namespaces")


@dataclass
class Link:
    """One direction between two machines."""

    cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0


@dataclass
class Machine:
    """A namespace. `offset_s`: offset of its monotonic clock."""

    name: str
    space: str
    address: str
    offset_s: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def inside(self) -> tuple[str, ...]:
        """Words to put before a command that is to run in the namespace."""
        enter = ("nsenter", f"--net=/run/netns/{self.space}")
        if not self.offset_s:
            return enter
        offset = str(self.offset_s)
        return (*enter, "unshare", "--time", "--monotonic", offset, "--boottime", offset, "--fork", "--kill-child")

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Move the calling thread into the network of the namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.space}") as there:
            assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(here.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

    def start(self, *command: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start a process in the namespace. `end` kills the processes that remain."""
        process = subprocess.Popen([*self.inside(), *command], stdin=subprocess.DEVNULL, **more)
        self.processes.append(process)
        return process


class Lab:
    """Machines by name, all in one network."""

    def __init__(self, names: tuple[str, ...], seed: int = 0) -> None:
        needs_lab()
        self.random = random.Random(seed)
        self.links: dict[tuple[str, str], Link] = {}
        self.machines: dict[str, Machine] = {}
        self._names, self._taps = list(names), []
        self._late: list[tuple[float, int, int, bytes]] = []
        self._order, self._closed = itertools.count(), threading.Event()
        number = next(_labs)
        for i, name in enumerate(names):
            space = f"ct{os.getpid()}-{number}-{name}"
            self.machines[name] = Machine(name, space, f"10.77.0.{i + 1}")
            self._taps.append(self._tap(f"ct{os.getpid() % 100000}n{number % 100}x{i}", space, i))
        self._thread = threading.Thread(target=self._switch, name="switch", daemon=True)
        self._thread.start()

    def _tap(self, device: str, space: str, i: int) -> int:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH14s", device.encode(), IFF_TAP | IFF_NO_PI, b""))
        _ip("netns", "add", space)
        _ip("link", "set", device, "netns", space)
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", device, "address", f"02:00:00:00:00:{i:02x}", "mtu", "1500", "up")
        _ip("-n", space, "addr", "add", f"10.77.0.{i + 1}/24", "dev", device)
        return fd

    # -- faults ----------------------------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> Link:
        """The link from one machine to another, which the caller may change."""
        return self.links.setdefault((source, target), Link())

    def both(self, one: str, other: str) -> tuple[Link, Link]:
        """Both directions."""
        return self.link(one, other), self.link(other, one)

    def isolate(self, name: str) -> None:
        """Cut a machine off from all others."""
        for other in self._names:
            if other != name:
                for link in self.both(name, other):
                    link.cut = True

    def heal(self) -> None:
        """Restore all links."""
        self.links.clear()

    # -- the switch ------------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for i, fd in enumerate(self._taps):
                selector.register(fd, selectors.EVENT_READ, i)
            while not self._closed.is_set():
                wait_s = min(0.2, max(0.0, self._late[0][0] - time.monotonic())) if self._late else 0.2
                for key, _ in selector.select(wait_s):
                    with contextlib.suppress(OSError):
                        self._forward(key.data, os.read(key.fd, 65536))
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, target, frame = heapq.heappop(self._late)
                    self._deliver(target, frame)

    def _forward(self, source: int, frame: bytes) -> None:
        several = frame[0] & 1
        for target in range(len(self._taps)) if several else (frame[5],):
            if target == source or target >= len(self._taps):
                continue
            link = self.links.get((self._names[source], self._names[target]))
            if link is None:
                self._deliver(target, frame)
            elif not link.cut and self.random.random() >= link.loss:
                heapq.heappush(self._late, (time.monotonic() + link.delay_s, next(self._order), target, frame))

    def _deliver(self, target: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # the device is down
            os.write(self._taps[target], frame)

    # -- end -------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Kill what runs in the namespaces, and remove them."""
        for machine in self.machines.values():
            listed = subprocess.run(["ip", "netns", "pids", machine.space], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            for process in machine.processes:
                process.kill()
                process.wait()
        self._closed.set()
        self._thread.join()
        for fd in self._taps:
            os.close(fd)
        for machine in self.machines.values():
            _ip("netns", "del", machine.space)


def child_of(process: subprocess.Popen[bytes]) -> int:
    """The program behind `unshare --fork`, or the process itself."""
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if found and "unshare" in Path(f"/proc/{process.pid}/cmdline").read_text():
            return int(found[0])
    return process.pid


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
