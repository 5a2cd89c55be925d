"""A complete fleet in one process: nodes, executor, policy, controller and listener; the controller runs in a
thread.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError, WorkError
from cotenant.core.gpus import find_gpu
from cotenant.fleet.controller import answers
from cotenant.fleet.controller.controller import Controller, ControllerOptions
from cotenant.fleet.controller.planners import JobPlanner, Planner
from cotenant.fleet.controller.profiles import ProfileBook
from cotenant.fleet.controller.server import Listener
from cotenant.fleet.executors.base import Executor
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.noderuntime.inventory import agent_node, nodes_of_cluster, this_machine
from cotenant.fleet.nodes import NodeSpec, pretend_nodes
from cotenant.fleet.store.jobs import keep_store_url, take_lock
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import Profiles, load_profiles

LOG = logging.getLogger(__name__)

# imported only where they are needed, because a fleet on GPU machines runs without the packages behind them
if TYPE_CHECKING:
    from cotenant.core.record.record import Record
    from cotenant.fleet.controller.live import LivePort

PER_GPU_CPUS = 3.0
PER_GPU_MEMORY = 62_500_000_000
MOST_NODES = 10_000


@dataclass(frozen=True)
class FleetOptions:
    """Options of a fleet, the same as those of `cotenant fleet up` (docs/howto/fleet.md). Times in seconds, sizes in
    bytes.

    `gpu`: pretend (pretended nodes), real (this machine with whole GPUs), agent (`agents`: folders of agents, one per
    node), or machines (those of the Ray cluster at `address`, with their real GPUs). `cluster`: pretended nodes as a
    Cluster. `profiles`: profiles to plan with, as a set or a file. `planner`: a planner to use instead of `policy`.
    `store`: URL of a PostgreSQL database for the jobs; None: the jobs are stored in the folder.
    """

    folder: Path
    store: str | None = None
    nodes: int = 1
    gpus_per_node: int = 2
    cpus_per_node: float | None = None
    memory_per_node: int | None = None
    gpu: str = "pretend"
    gpu_model: str = "A100-40GB"
    agents: tuple[str, ...] = ()
    cluster: Cluster | None = None
    executor: str = "local"
    address: str | None = None
    lease_s: float = 300.0
    keep_s: float = 120.0
    grace_s: float = 30.0
    early: bool = True
    policy: JobPolicy = field(default_factory=lambda: JobPolicy(sticky=True))
    profiles: Profiles | str | None = None
    default_profile: str | None = None
    planner: Planner | None = None
    port: int | None = None
    http: str | None = None  # HOST:PORT of the live page and the metrics
    http_token: str | None = None
    autostart: bool = True


def node_specs(options: FleetOptions) -> tuple[NodeSpec, ...]:
    """The nodes that the options describe; InputError names the option."""
    if options.gpu == "agent":
        return tuple(agent_node(f"node-{i}", Path(folder)) for i, folder in enumerate(options.agents))
    if options.gpu == "real":
        return (this_machine(),)
    if options.cluster is not None:
        return nodes_of_cluster(options.cluster)
    if not 1 <= options.nodes <= MOST_NODES:
        raise InputError(f"{options.nodes} is not between 1 and {MOST_NODES:,}", field="nodes")
    if not 1 <= options.gpus_per_node <= 64:
        raise InputError(f"{options.gpus_per_node} is not between 1 and 64", field="gpus-per-node")
    model = find_gpu(options.gpu_model, "gpu")
    gpus = options.gpus_per_node
    cpus = PER_GPU_CPUS * gpus if options.cpus_per_node is None else options.cpus_per_node
    memory = PER_GPU_MEMORY * gpus if options.memory_per_node is None else options.memory_per_node
    return pretend_nodes(options.nodes, gpus, model.name, model.memory_bytes, cpus, memory)


def make_executor(options: FleetOptions) -> Executor:
    """Create the executor that the options name."""
    if options.executor == "local":
        from cotenant.fleet.executors.local import LocalExecutor

        return LocalExecutor(options.folder, node_specs(options))
    if options.executor == "ray":
        from cotenant.fleet.executors.on_ray import RayExecutor

        nodes = None if options.gpu == "machines" else node_specs(options)
        return RayExecutor(options.folder, nodes, options.address)
    raise InputError(f"must be local or ray, not {options.executor!r}", field="executor")


class Fleet:
    """A fleet in this process: `with Fleet(options) as fleet`. The controller runs in a thread; jobs are processes that
    outlive it until their leases end.
    """

    def __init__(
        self, options: FleetOptions, executor: Executor | None = None, waiting: Callable[[], None] = lambda: None
    ) -> None:
        """`waiting` is called while another controller leads; the constructor returns once the other controller has
        ended.
        """
        self.options = options
        options.folder.mkdir(parents=True, exist_ok=True)
        shared = options.profiles if isinstance(options.profiles, Profiles) else load_profiles(options.profiles)
        self.profiles = ProfileBook(shared, options.default_profile)
        self.planner: Planner = options.planner or JobPlanner(options.policy, self.profiles, options.lease_s)
        settings = ControllerOptions(options.folder, options.lease_s, options.keep_s, options.grace_s, options.early)
        if options.store is not None:
            keep_store_url(options.folder, options.store)
        lock = take_lock(options.folder, waiting)  # the lock is taken before anything is started on the nodes
        try:
            made = executor or make_executor(options)
        except BaseException:
            lock.release()
            raise
        self.controller = Controller(settings, made, self.planner, lock)
        self.listener: Listener | None = None
        self.live: LivePort | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._describe()

    def _describe(self) -> None:
        source = self.options.profiles if isinstance(self.options.profiles, str) else None
        known = self.controller.executor.members()
        before = json.loads(self.controller.store.meta("run") or "{}")
        nodes = {n["name"]: n for n in before.get("nodes", [])} | {n: s.to_dict() for n, s in known.items()}
        run = {
            "policy": self.planner.describe(),
            "lease_s": self.options.lease_s,
            "profiles": source,
            "default_profile": self.options.default_profile,
            "nodes": list(nodes.values()),
        }
        self.controller.store.set_meta("run", json.dumps(run))
        self.controller.store.commit()

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the controller in a thread; returns after its first contact with its nodes."""
        self.planner.warm_up()
        ready = threading.Event()

        def work() -> None:
            try:
                self.controller.run(ready.set)
            except BaseException as error:
                self._error = error
                LOG.critical("the controller ended: %s", error)
            ready.set()

        self._thread = threading.Thread(target=work, name="fleet controller", daemon=True)
        self._thread.start()
        ready.wait()
        if self._error is not None:
            raise WorkError(str(self._error))
        self.listener = Listener(self.controller, port=self.options.port)
        if self.options.http is not None:
            from cotenant.fleet.controller.live import LivePort

            try:
                self.live = LivePort(self.controller, self.controller.call, self.options.http, self.options.http_token)
            except (InputError, WorkError):
                self.stop()
                raise
            LOG.info("live page and metrics at %s", self.live.url)
        if self.options.autostart:
            self.begin()

    def begin(self) -> None:
        """Start the fleet's clock, or let it continue."""
        self.controller.call(self.controller.begin)

    def stop(self) -> None:
        """End the controller; jobs continue until their leases end."""
        self._close_listeners()
        if self._thread is None:
            self.controller.close()
            return
        self.controller.stop()
        self._thread.join()

    def join(self) -> None:
        """Wait until the controller ends by itself. Raises WorkError if it failed."""
        assert self._thread is not None
        self._thread.join()
        self._close_listeners()
        if self._error is not None:
            raise WorkError(str(self._error))

    def _close_listeners(self) -> None:
        if self.live is not None:
            self.live.close()
            self.live = None
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def down(self, within_s: float = 30.0) -> None:
        """Checkpoint and stop all jobs, then end the controller. The next fleet in this folder continues the jobs."""
        self.controller.call(lambda: self.controller.drain(within_s))
        self.join()

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.down(min(5.0, self.options.grace_s))
        elif self.listener is not None:
            self.listener.close()

    # -- work ------------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, arrival_s: float | None = None) -> str:
        """Queue a job that arrives at `arrival_s` by the fleet's clock, or now. Returns its id."""
        return self.submit_all([spec], None if arrival_s is None else [arrival_s])[0]

    def submit_all(self, specs: Sequence[JobSpec], arrivals_s: Sequence[float] | None = None) -> list[str]:
        """Queue many jobs in one call; returns their ids."""
        arrivals = None if arrivals_s is None else list(arrivals_s)
        return self.controller.call(lambda: self.controller.submit(list(specs), arrivals))

    def cancel(self, job_id: str) -> str:
        """Cancel a job by its id."""
        return self.controller.call(lambda: self.controller.cancel(job_id))

    def queue(self, everything: bool = True) -> list[dict[str, Any]]:
        """Return the fleet's jobs, by default including finished ones."""
        return self.controller.call(lambda: answers.queue(self.controller, everything=everything))

    def job(self, job_id: str) -> dict[str, Any]:
        """One job."""
        return next(row for row in self.queue() if row["id"] == job_id)

    def status(self) -> dict[str, Any]:
        """The fleet."""
        return self.controller.call(lambda: answers.status(self.controller)) | {"pid": os.getpid()}

    def wait(self, timeout_s: float) -> bool:
        """Wait until all jobs have ended; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._error is not None:
                raise WorkError(str(self._error))
            if not self.controller.call(lambda: bool(self.controller.table.jobs)):
                return True
            time.sleep(0.05)
        return False

    def record(self, out: Path | None = None) -> Record:
        """The run so far as a record, in the format of simulated runs."""
        from cotenant.fleet.controller.recording import record_of

        return record_of(self.options.folder, out, self.profiles)
