"""The executor over Ray: on each node, one detached actor holds that node's `NodeJobs`. The actor requests no resources
of Ray.

Ray carries orders and reports and tracks membership, but schedules nothing. A connection that does not answer is
replaced in the background; the actors and jobs continue.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.core.ray_cluster import FailedCallError, LostCallError, RayCluster
from cotenant.fleet.executors import ray_head
from cotenant.fleet.executors.base import Executor, Orders
from cotenant.fleet.executors.node_actor import NodeActor
from cotenant.fleet.nodes import NodeSpec, node_from_dict

LOG = logging.getLogger(__name__)

ANSWER_S = 4.0
LOOK_EVERY_S = 1.0
START_S = 60.0
CLOSE_S = 2.0
LOG_FILE = "ray.log"
NO_GPU = "no node of the Ray cluster has a GPU; for a trial, --nodes spreads pretended nodes over it"
ERRORS = (LostCallError, FailedCallError, TimeoutError)


@dataclass
class Coming:
    """The start of an actor on a machine: the actor is made, and then asked for the description of its node."""

    step: Future[Any]
    home: str
    since_s: float
    made: bool = False


class RayExecutor(Executor):
    """Nodes of a Ray cluster. `address` None: a local cluster, started if absent and again when it dies. `pretend`:
    pretended nodes, whose GPUs have no devices, to be spread over the machines; None: each machine is a node with its
    own GPUs. `token_folder`: folder with the token of the cluster at `address`, if `ray_head` started that cluster.
    """

    name = "ray"

    def __init__(
        self, folder: Path, pretend: Sequence[NodeSpec] | None, address: str | None, token_folder: Path | None = None
    ) -> None:
        self.folder, self.address, self._token_folder, self._pretend = folder, address, token_folder, pretend
        folder.mkdir(parents=True, exist_ok=True)
        self._tag = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
        self._assigned: dict[str, str] = {}  # pretended node -> Ray's id of its machine
        self._machines = 0  # largest number of machines that the cluster has had
        self._cluster: RayCluster | None = None
        self._members: dict[str, NodeSpec] = {}
        self._homes: dict[str, str] = {}  # member -> Ray's id of its machine
        self._coming: dict[str, Coming] = {}
        # calls that had not returned when the controller stopped waiting for them
        self._late: dict[str, Future[Any]] = {}
        self._looked_s = -1e9
        self._lock = threading.Lock()
        self._fault = ""
        self._closing = threading.Event()
        self._connecting: threading.Thread | None = None
        try:
            self._connect()
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline:
                self._look()
                if not self._coming:
                    break
                wait([one.step for one in self._coming.values()], timeout=LOOK_EVERY_S)
            if not self._members:
                raise WorkError(NO_GPU)
        except (WorkError, *ERRORS) as error:
            self.close()
            if self.address is None:
                ray_head.stop(folder)
            raise error if isinstance(error, WorkError) else WorkError(f"Ray at {address}: {error}") from None

    # -- contract --------------------------------------------------------------------------------------------------

    def members(self) -> dict[str, NodeSpec]:
        return dict(self._members)

    def fault(self) -> str:
        return self._fault

    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        answers: dict[str, dict[str, Any] | None] = dict.fromkeys(orders)
        with self._lock:
            cluster = self._ready()
            if cluster is None:
                return answers
            calls = {}
            # a node ignores orders with a number that is not new; a monotonic clock gives higher numbers to the next
            # controller, too
            number = time.monotonic_ns()
            for name, wanted in orders.items():
                if (late := self._late.get(name)) is not None and not late.done():
                    continue
                self._late.pop(name, None)
                if name in self._members:
                    calls[name] = cluster.call(name, "exchange", epoch, number, json.dumps(wanted))
            wait(calls.values(), timeout=ANSWER_S)
            for name, call in calls.items():
                if not call.done():
                    self._late[name] = call
                    continue
                try:
                    answers[name] = json.loads(call.result())
                except ERRORS as error:
                    LOG.warning("node %s: %s", name, error)
                    self._drop(name)
                    self._looked_s = -1e9
        return answers

    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        with self._lock:
            cluster = self._ready()
            name = node if node in self._members else next(iter(self._members), None)
        if cluster is None or name is None:
            return b"", max(0, offset)
        try:
            raw, end = cluster.call(name, "read_log", path, offset).result(ANSWER_S)
        except ERRORS:
            return b"", max(0, offset)
        return raw, int(end)

    def close(self) -> None:
        self._closing.set()
        if self._connecting is not None:
            self._connecting.join()
        with self._lock:
            self._disconnect(CLOSE_S)

    def shutdown(self) -> None:
        with self._lock:
            if self._cluster is not None:
                wait([self._cluster.kill(name) for name in self._members], timeout=ANSWER_S)
        self.close()
        if self.address is None:
            ray_head.stop(self.folder)

    # -- the connection --------------------------------------------------------------------------------------------

    def _ready(self) -> RayCluster | None:
        """Return the connection to Ray, with the members of the cluster as they are now; None if there is no connection
        and a new one is being made.
        """
        if self._cluster is not None:
            try:
                self._look()
                self._fault = "" if self._members else "no node of the Ray cluster answers"
            except ERRORS:
                self._fault = "Ray does not answer; reconnecting"
                self._disconnect()
        busy = self._closing.is_set() or (self._connecting is not None and self._connecting.is_alive())
        if self._cluster is None and not busy:
            # done in the background, since connecting takes seconds and jobs need the controller in that time
            self._connecting = threading.Thread(target=self._reconnect, name="ray", daemon=True)
            self._connecting.start()
        return self._cluster

    def _reconnect(self) -> None:
        try:
            self._connect()
        except WorkError as error:
            self._fault = str(error)
            self._closing.wait(1.0)

    def _connect(self) -> None:
        address = self.address or ray_head.ensure(self.folder)
        environment = ray_head.environment(self.folder if self.address is None else self._token_folder)
        with (self.folder / LOG_FILE).open("ab") as log:
            self._cluster = RayCluster(address, environment=environment, log=log, cancelled=self._closing)

    def _disconnect(self, within_s: float = 0.0) -> None:
        cluster, self._cluster = self._cluster, None
        self._members, self._homes, self._coming, self._late = {}, {}, {}, {}
        self._looked_s = -1e9
        if cluster is not None:
            cluster.close(within_s)

    # -- membership ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Update the list of nodes: a new node gets an actor, a dead one loses its actor. Raises LostCallError, or
        TimeoutError if Ray does not answer.
        """
        assert self._cluster is not None
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            found = self._cluster.nodes().result(ANSWER_S)
            self._looked_s = time.monotonic()
            alive = {node["NodeID"]: node["NodeManagerAddress"] for node in found}
            for name in [n for n, home in self._homes.items() if home not in alive]:
                self._drop(name)
            wanted = self._own(alive) if self._pretend is None else self._pretended(self._pretend, list(alive))
            for name, (home, spec) in wanted.items():
                if name not in self._members and name not in self._coming:
                    self._create(name, home, spec, alive[home])
        self._arrive()

    def _own(self, alive: dict[str, str]) -> dict[str, tuple[str, NodeSpec | None]]:
        return {f"{address}-{home[:6]}": (home, None) for home, address in alive.items()}

    def _pretended(self, pretend: Sequence[NodeSpec], alive: list[str]) -> dict[str, tuple[str, NodeSpec | None]]:
        """Distribute pretended nodes evenly over the machines. Nodes that have a machine stay on it."""
        found: dict[str, tuple[str, NodeSpec | None]] = {}
        for i, spec in enumerate(pretend):
            known = self._assigned.get(spec.name)
            if known is not None and known not in alive and len(alive) < self._machines:
                continue  # the machine of the actor has gone, so the node is lost
            home = known if known in alive else alive[i % len(alive)] if alive else None
            if home is not None:
                found[spec.name] = (home, spec)
                self._assigned[spec.name] = home
        self._machines = max(self._machines, len(alive))
        return found

    def _create(self, name: str, home: str, spec: NodeSpec | None, address: str) -> None:
        """Create the actor of the node `name`, or reuse it if it exists. A new actor runs on the machine `home` (a Ray
        node) and on no other.
        """
        assert self._cluster is not None
        folder = str((self.folder / "nodes" / name).absolute())
        made = self._cluster.actor(
            name, NodeActor, (folder, name, None if spec is None else spec.to_dict(), address), home,
            name=f"cotenant-{self._tag}-{name}", lifetime="detached", get_if_exists=True, max_concurrency=2,
        )  # fmt: skip
        self._coming[name] = Coming(made, home, time.monotonic())

    def _arrive(self) -> None:
        """Find the actors that have finished starting, and add their nodes to the executor's members."""
        assert self._cluster is not None
        for name, one in list(self._coming.items()):
            if not one.step.done():
                if time.monotonic() - one.since_s > START_S:
                    del self._coming[name]
                continue
            try:
                found = one.step.result()
            except ERRORS as error:
                del self._coming[name]
                LOG.error("node %s: its actor does not start: %s", name, error)
                continue
            if not one.made:
                one.step, one.made = self._cluster.call(name, "facts"), True
                continue
            del self._coming[name]
            if found["gpus"]:
                self._members[name], self._homes[name] = node_from_dict(found), one.home

    def _drop(self, name: str) -> None:
        for known in (self._members, self._homes, self._late):
            known.pop(name, None)
