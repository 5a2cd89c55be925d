"""The process that calls Ray: `python -m cotenant.core.ray_bridge FD`, started by ray_cluster.py.

It is separate, because Ray ends a process a minute after its cluster's head has died, and needs hundreds of megabytes.
It keeps handles of actors by name and makes no decisions.

Messages are pickled, on a socket. First the caller sends the address of the Ray cluster; the answer is "", or why the
cluster cannot be reached. `(number, op, *arguments)` is a call, `(number, outcome, value)` its answer; None, twice a
second, is a heartbeat. The caller sends None before it closes the socket.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from cotenant.core import logs

BEAT_S = 0.5
NAMESPACE = "cotenant"
# outcomes of a call to Ray; FAILED: the code of the actor raised an error; DEAD: the actor does not exist any more;
# AWAY: the actor cannot be reached now, or Ray raised another error
OK, FAILED, DEAD, AWAY = "ok", "failed", "dead", "away"


class Bridge:
    """Executes the calls to Ray of one process."""

    def __init__(self, ray: Any, connection: Connection) -> None:
        self.ray, self.connection = ray, connection
        self._actors: dict[str, Any] = {}
        self._sending = threading.Lock()
        self._slow = ThreadPoolExecutor(8)  # threads for calls that wait for Ray's head, which may be down

    def serve(self) -> None:
        """Execute calls until the caller closes the socket."""
        beat_s = 0.0
        with contextlib.suppress(EOFError, OSError):
            while True:
                if time.monotonic() - beat_s >= BEAT_S:
                    beat_s = time.monotonic()
                    self._send(None)
                if not self.connection.poll(BEAT_S):
                    continue
                message = self.connection.recv()
                if message is None:
                    break
                number, op, *arguments = message
                # calls of actors are made in this thread, one after the other, so that they keep their order
                if op == "call":
                    self._call(number, *arguments)
                else:
                    self._slow.submit(getattr(self, f"_{op}"), *arguments).add_done_callback(self._answerer(number))
        self._slow.shutdown(wait=False, cancel_futures=True)

    def _send(self, message: Any) -> None:
        # an OSError means that the caller has closed the socket; `serve` ends then
        with self._sending, contextlib.suppress(OSError):
            self.connection.send(message)

    def _call(self, number: int, actor: str, method: str, *arguments: Any) -> None:
        handle = self._actors.get(actor)
        if handle is None:
            self._send((number, DEAD, "there is no such actor"))
            return
        getattr(handle, method).remote(*arguments).future().add_done_callback(self._answerer(number))

    def _answerer(self, number: int) -> Callable[[Future[Any]], None]:
        return lambda done: self._answer(number, done)

    def _answer(self, number: int, done: Future[Any]) -> None:
        errors = self.ray.exceptions
        try:
            outcome, value = OK, done.result()
        except errors.RayTaskError as error:
            outcome, value = FAILED, first_line(error.cause)
        except errors.RayActorError as error:
            outcome, value = AWAY if isinstance(error, errors.ActorUnavailableError) else DEAD, first_line(error)
        except Exception as error:
            outcome, value = AWAY, first_line(error)
        self._send((number, outcome, value))

    def _nodes(self) -> list[dict[str, Any]]:
        found = [node for node in self.ray.nodes() if node["Alive"]]
        return sorted(found, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))

    def _actor(self, name: str, class_: type, arguments: tuple[Any, ...], node: str, options: dict[str, Any]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        placed = NodeAffinitySchedulingStrategy(node, soft=False)
        made = self.ray.remote(class_).options(
            num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=placed, **options
        )
        self._actors[name] = made.remote(*arguments)

    def _kill(self, name: str) -> None:
        handle = self._actors.pop(name, None)
        if handle is not None:
            self.ray.kill(handle)


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's text, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def main() -> None:
    """Serve the process that started this one until it closes the socket."""
    logs.configure()
    connection: Connection = Connection(int(sys.argv[1]))
    address = connection.recv()
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:
        connection.send(f"cannot reach Ray at {address}: {first_line(error)}")
        return
    # these signals often go to the whole process group, but this process must keep running until the caller has ended
    # its work
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection.send("")
    Bridge(ray, connection).serve()


if __name__ == "__main__":
    main()
