"""A connection to a Ray cluster, through a separate process (ray_bridge.py) that alone uses Ray: Ray ends the process
that uses it when the cluster ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from cotenant.core.errors import WorkError
from cotenant.core.ray_bridge import BEAT_S, DEAD, FAILED, OK

LOG = logging.getLogger(__name__)
BRIDGE = "cotenant.core.ray_bridge"
CONNECT_S = 120.0
# a bridge process that is silent for more seconds than this has failed; pauses between two heartbeats are shorter
SILENT_S = 20.0


class FailedCallError(Exception):
    """Raised if the code of an actor raised an error, while the actor and its node still exist."""


class LostCallError(Exception):
    """Raised if no answer to a call will come: the actor, its node or the connection is gone. `dead`: the actor will
    not come back.
    """

    def __init__(self, why: str, *, dead: bool = False) -> None:
        super().__init__(why)
        self.dead = dead


class RayCluster:
    """One connection to a Ray cluster, for use by any thread. Futures of calls raise FailedCallError or LostCallError.
    """

    def __init__(
        self,
        address: str,
        *,
        environment: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Connect to the Ray cluster. WorkError if the cluster cannot be reached, or if `cancelled` is set meanwhile.
        """
        self.lost = threading.Event()
        self._closing = False
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", BRIDGE, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=environment,
            )  # fmt: skip
        why = self._hello(address, cancelled or threading.Event())
        if why:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            raise WorkError(why)
        threading.Thread(target=self._read, name="cotenant-ray", daemon=True).start()
        threading.Thread(target=_write, args=(self._connection, self._orders), daemon=True).start()

    def _hello(self, address: str, cancelled: threading.Event) -> str:
        try:
            self._connection.send(address)
            deadline = time.monotonic() + CONNECT_S
            while not self._connection.poll(BEAT_S) and time.monotonic() < deadline and not cancelled.is_set():
                pass
            return self._connection.recv() if self._connection.poll() else f"Ray at {address} does not answer"
        except (EOFError, OSError):
            return f"the process that connects to Ray at {address} ended at once: see its output above"

    def nodes(self) -> Future[list[dict[str, Any]]]:
        """Return the living nodes as Ray describes them, sorted by host name."""
        return self._order("nodes")

    def actor(self, name: str, class_: type, arguments: tuple[Any, ...], node: str, /, **options: Any) -> Future[None]:
        """Create an actor that reserves no CPU or GPU, on the node with this id. `call` finds the actor by `name`.
        `options`: other options of Ray for actors.
        """
        return self._order("actor", name, class_, arguments, node, options)

    def call(self, actor: str, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of an actor. Calls reach the actor in the order in which they were made."""
        return self._order("call", actor, method, *arguments)

    def kill(self, actor: str) -> Future[None]:
        """End an actor of the Ray cluster."""
        return self._order("kill", actor)

    def close(self, within_s: float = 0.0) -> None:
        """End the connection to the Ray cluster. The bridge process is killed if it has not ended after `within_s`
        seconds.
        """
        self._closing = True
        self._orders.put(None)
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end()

    def _order(self, *order: Any) -> Future[Any]:
        future: Future[Any] = Future()
        # this call cannot be cancelled: it always ends by an answer, or by the end of the connection
        future.set_running_or_notify_cancel()
        with self._lock:
            number = next(self._numbers)
            if not self.lost.is_set():
                self._calls[number] = future
                self._orders.put((number, *order))
                return future
        future.set_exception(LostCallError("the connection to Ray has ended"))
        return future

    def _read(self) -> None:
        try:
            while self._connection.poll(SILENT_S):
                message = self._connection.recv()
                if message is not None:
                    self._answered(*message)
            LOG.warning("the process that calls Ray hangs")
        except (EOFError, OSError):
            pass
        if not self._closing:
            self._process.kill()
            self._process.wait()
        self._end()
        self._connection.close()

    def _answered(self, number: int, outcome: str, value: Any) -> None:
        with self._lock:
            future = self._calls.pop(number, None)
        if future is None:
            return
        if outcome == OK:
            future.set_result(value)
        elif outcome == FAILED:
            future.set_exception(FailedCallError(value))
        else:
            future.set_exception(LostCallError(value, dead=outcome == DEAD))

    def _end(self) -> None:
        with self._lock:
            self.lost.set()
            calls, self._calls = list(self._calls.values()), {}
            self._orders.put(None)
        for future in calls:
            future.set_exception(LostCallError("the connection to Ray has ended"))


def _write(connection: Connection, orders: queue.SimpleQueue[Any]) -> None:
    """Write messages to the bridge process in a thread, so that a bridge that hangs does not block the caller."""
    with contextlib.suppress(OSError, ValueError):
        order = ()
        while order is not None:
            order = orders.get()
            connection.send(order)
