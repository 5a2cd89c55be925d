"""The agent, a process that owns the GPUs of a node. This module creates all its parts and keeps them running."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from cotenant.abi.protocol import FLOOR_SOCKET
from cotenant.agent import processes
from cotenant.agent.audit.neighbours import Neighbours
from cotenant.agent.audit.processes import UnseenWatch
from cotenant.agent.audit.shares import ShareProof
from cotenant.agent.config import files as configs
from cotenant.agent.config.file_watch import FileWatch
from cotenant.agent.config.files import AgentConfig, InForce
from cotenant.agent.control.live import LivePage
from cotenant.agent.control.memory_orders import MemoryOrders
from cotenant.agent.control.operations import Operations
from cotenant.agent.control.owner_orders import OwnerOrders
from cotenant.agent.control.rows import Rows
from cotenant.agent.control.shortfalls import Shortfalls
from cotenant.agent.copies.links import Copies
from cotenant.agent.gate.floor import Floors
from cotenant.agent.ipc.control import ControlServer
from cotenant.agent.lifecycle.accounts import Accounts
from cotenant.agent.lifecycle.lasting import lasting
from cotenant.agent.lifecycle.lives import Lives
from cotenant.agent.lifecycle.reconfigure import Reconfigure
from cotenant.agent.lifecycle.state import StateFile, load, load_swap_budget
from cotenant.agent.lifecycle.takeover import take_over
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.mechanisms.slices import Slices
from cotenant.agent.memory.checkpoints import Checkpoints
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.pages import MemoryPages
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.parking import Parking
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.residents import Residents
from cotenant.agent.memory.space import SpaceMaker
from cotenant.agent.memory.whole import WholeProcesses
from cotenant.agent.memory_limits.enforcer import MemoryLimits
from cotenant.agent.owners.owners import Owners
from cotenant.agent.owners.slurm_ended import EndedJobs, job_file, why_held
from cotenant.agent.shims.requests import Requests
from cotenant.agent.shims.server import ShimServer
from cotenant.agent.slices.enforcer import SliceEnforcer
from cotenant.agent.tenants.host_memory import host_memory
from cotenant.agent.tenants.places import Place, place_of
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.stopping import kill
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.agent.turns.history import History
from cotenant.agent.turns.trace import TurnTrace
from cotenant.core.errors import InputError, WorkError
from cotenant.core.folders import CONTROL_SOCKET, STATE_FILE
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of, discover, within
from cotenant.policy.shares import QuotaSettings

LOG = logging.getLogger(__name__)
HOUSEKEEPING_S = 1.0
AGENT_NICE = -10
NOT_SLICED = "tenants of GPU %s take turns that the agent grants, instead of hardware time slices: %s"
TENANT_SOCKET_MODE = 0o666  # any user may connect, because the agent identifies a process by its cgroup


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """Options of one run of the agent."""

    folder: Path
    source: str | None = None  # FILE.yaml or gemini:FILE
    trace: Path | None = None
    socket_mode: int = 0o600
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpus: tuple[Gpu, ...] | None = None  # GPUs that the agent owns; None: those that the configuration names
    tenant_socket: Path | None = None  # a separate socket for containers, open to every user
    locate: Callable[[int], Place | None] = place_of  # finds the pod or job that a process belongs to
    http: str | None = None  # HOST:PORT of the live page and the metrics
    http_token: str | None = None  # bearer token for readers of the page and metrics
    strict: bool = False  # kill processes that use the GPUs without being tenants


class Agent:
    """A run of the agent. `await run()` returns when the agent was stopped. Only this class knows all parts of the
    agent: each part gets its dependencies as constructor arguments."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.folder = options.folder
        # created before the file is read, so that no later version of the file is missed
        self._file = FileWatch(configs.config_path(options.source)) if options.source else None
        self.in_force = InForce(self.load_config())
        config = self.in_force.config
        self.gpus = within(config.gpu_memory_bytes, options.gpus or self._discovered(config.gpus))
        self.mechanisms = mechanisms.make(self.folder, Use.TENANT, self.gpus)
        self.parked = ParkedTable()
        self.host = host_memory(config.swap_memory_bytes, load_swap_budget(self.folder / STATE_FILE))
        # hardware time slices can enforce only the default discipline, so tenants use them only under that one
        by_request = config.quota.discipline == QuotaSettings.discipline
        self.registry = Registry(self.gpus, self.mechanisms, self.host, self.parked, slices_first=by_request)
        self.ledger = Ledger()
        for gpu in self.gpus:
            self.ledger.gpu(gpu.uuid, gpu.memory_bytes)
        self.residents = Residents(self.registry, self.ledger, self.parked, self.in_force)
        path, tenants, counts = self.folder / STATE_FILE, self.registry.tenants, self.residents.counts
        self.state = StateFile(path, tenants, self.parked, counts, self.host, lambda: self.limits.closing())
        self.started_ns = time.monotonic_ns()
        self._stop = asyncio.Event()

    def load_config(self) -> AgentConfig:
        """Read the config file, overridden by the command line's values."""
        config = AgentConfig()
        if source := self.options.source:
            # imported here, because importing pydantic takes a tenth of a second
            from cotenant.agent.config.schema import load

            config = load(source)
        return configs.with_options(config, **self.options.overrides)

    def _discovered(self, names: tuple[str, ...]) -> tuple[Gpu, ...]:
        """The GPUs of these names. An InputError names what they are from: the option --gpus, or the file."""
        try:
            return discover(names)
        except InputError as error:
            if self._file is None or self.options.overrides.get("gpus") is not None:
                raise
            raise InputError(error.message, file=self._file.path, field="gpus") from None

    # -- running ---------------------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM, SIGINT or `stop`. `ready` is called when tenants can connect."""
        with contextlib.ExitStack() as closing:
            self._take_folder(closing)
            processes.raise_descriptor_limit()
            with contextlib.suppress(OSError):
                # the agent gets a high priority, because a GPU is idle while the agent waits for a processor
                os.setpriority(os.PRIO_PROCESS, 0, AGENT_NICE)
            trace = TurnTrace(self.options.trace) if self.options.trace is not None else None
            if trace is not None:
                closing.callback(trace.close)
            for mechanism in self.mechanisms.values():
                closing.callback(mechanism.close)
            self._make_turns(trace)
            self._make_memory()
            self._make_tenants()
            self._make_sockets()
            closing.callback(self._close_parts)
            await self._serve(ready)

    def stop(self) -> None:
        """Stop the agent. Tenants then wait or continue without limits, according to the setting `fail`."""
        self._stop.set()

    async def _serve(self, ready: Callable[[], None]) -> None:
        options, declared = self.options, {spec.name for spec in self.in_force.config.tenants}
        self.unseen.expect(key for saved in load(self.state.path) for key in saved.processes)
        take_over(self.state.path, declared, self.lives, self.owners, self.residents, self.parking, self.limits)
        self.ended.taken_over(self._drop)
        self.reconfigure.admit_declared()
        for mechanism in self.mechanisms.values():
            mechanism.taken_over()
        slices = self.mechanisms[Slices.name]
        assert isinstance(slices, Slices)
        for gpu in self.gpus:
            if why := slices.refusal(gpu):
                LOG.warning(NOT_SLICED, gpu.uuid, why)
        mode = TENANT_SOCKET_MODE if options.tenant_socket else options.socket_mode
        self.server.listen(mode)
        self.floors.listen(mode)
        await self.control.listen(options.socket_mode)
        await self.live.listen(options.http, options.http_token)
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        tasks = [asyncio.create_task(lasting(work)) for work in self._background()]
        if self._file is not None:
            tasks.append(asyncio.create_task(self.reconfigure.follow(self._file)))
        ready()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await self.control.close()
        await self.live.close()

    def _take_folder(self, closing: contextlib.ExitStack) -> None:
        """Create and lock the agent's folder. A held lock means that another agent runs there; without one, existing
        socket files were left by an agent that died.
        """
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True)
                # every user may enter the folder, whatever the umask is: the modes of its sockets restrict access
                self.folder.chmod(0o755)
            lock = os.open(self.folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WorkError(f"{self.folder}: cannot be used: {error.strerror}") from None
        closing.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown pid"
            raise WorkError(f"an agent ({holder}) already runs in {self.folder}; stop it, or choose --dir") from None
        with contextlib.suppress(OSError):  # on a full disk the pid cannot be written; the lock holds without it
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()}".encode(), 0)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _make_turns(self, trace: TurnTrace | None) -> None:
        config, gpus = self.in_force.config, list(self.registry.gpus)
        self.history = History(gpus, trace)
        self.broker = Broker(
            gpus, config.quota, inflight_ns=config.inflight_ns, residents=self.residents,
            on_turn=self.history.turn, on_fault=self.history.fault,
        )  # fmt: skip
        self.copies = Copies(config.copies)
        self.slices = SliceEnforcer(self.registry, self.history.warned, self._not_sliced)
        self.limits = MemoryLimits(self.folder, self.registry, self.history.warned, self.state.save_now)
        self.shortfalls = Shortfalls(self.registry, self.broker, self.slices, self.state.save)

    def _make_memory(self) -> None:
        residents, registry, broker, parked = self.residents, self.registry, self.broker, self.parked
        self.pages = MemoryPages(self.ledger, registry)
        self.accounts = Accounts(
            registry, self.ledger, self.pages, residents, broker, self.copies, self.slices, self.limits
        )
        whole = WholeProcesses(self.gpus, self.ledger)
        self.checkpoints = Checkpoints(whole, parked, residents, registry, self.host, self.ledger, broker, self.state)
        self.residency = Residency(
            residents, registry, self.ledger, parked, broker, self.checkpoints, self.in_force, self.state.save
        )
        self.space = SpaceMaker(self.residency, residents, registry, broker, parked)
        self.parking = Parking(
            self.checkpoints,
            parked,
            self.residency,
            residents,
            self.space,
            registry,
            broker,
            self.state,
            self.accounts.move,
        )

    def _make_tenants(self) -> None:
        registry, save = self.registry, self.state.save
        self.lives = Lives(registry, self.accounts, self.parked, self.history, save)
        self.owners = Owners(self.options.locate)
        self.ended = EndedJobs(self.owners, self.folder)
        limits, owners = self.limits, self.owners
        path = self.options.tenant_socket or self.folder / "agent.sock"
        others = Neighbours(self.folder, self.gpus)
        self.unseen = UnseenWatch(
            registry, owners, in_group=limits.tenant_in, bring_back=limits.bring_back, own=path, neighbours=others
        )
        self.proof = ShareProof(registry, self.unseen.tenant_of, limits.not_enforced)
        requests = Requests(
            registry,
            self.ledger,
            self.pages,
            self.residents,
            self.residency,
            self.space,
            self.host,
            self.broker,
            self.copies,
            self.slices,
            self.limits,
            self.in_force,
            self.history.warned,
        )
        self.server = ShimServer(path, registry, self.owners, requests, self.in_force, save, self.lives.maybe_remove)
        self.floors = Floors(
            path.with_name(FLOOR_SOCKET),
            registry.gpus,
            self.in_force.config.colocation,
            registry.by_connection,
            self.owners.in_container,
            lambda uuid: device_of(registry.gpus[uuid]).card(uuid),
        )
        self.reconfigure = Reconfigure(
            self.load_config,
            self._file.path if self._file is not None else None,
            self.in_force,
            registry,
            self.lives,
            self.broker,
            self.floors,
            self.copies,
            save,
        )

    def _make_sockets(self) -> None:
        registry, lives, floors, history = self.registry, self.lives, self.floors, self.history
        rows = Rows(
            self.folder,
            self.in_force,
            registry,
            self.host,
            self.ledger,
            self.parked,
            self.residents,
            self.broker,
            self.copies,
            self.slices,
            self.limits,
            floors,
            self.server,
            history,
            self.unseen,
            self.shortfalls,
            self.started_ns,
        )
        owned = OwnerOrders(self.owners, registry, lives, self.server.hear, self.state.save_now)
        self.let_go_of = owned.let_go_of
        operations = Operations(
            rows, registry, lives, floors, self.parked, history, self.server.path, self.state.save, self._release
        )
        memory = MemoryOrders(self.parking, self.parked, self.residency, self.residents, registry, self.broker)
        table = operations.table() | memory.table() | owned.table()
        self.control = ControlServer(self.folder / CONTROL_SOCKET, table, operations.launcher_gone, self.state.settle)
        self.live = LivePage(rows, registry, history, self.server, self.in_force)

    def _close_parts(self) -> None:
        self.unseen.neighbours.close()
        self.floors.close()
        self.state.save_now()
        self.lives.close()
        self.broker.close()
        self.checkpoints.close()
        self.residency.close()
        self.host.close()
        self.slices.close()
        self.server.close_all()
        self.copies.close()

    def _background(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        warned, strict = self.history.warned, self.options.strict
        unseen = partial(self.unseen.run, warned, strict=strict)
        jobs, proof = partial(self.ended.run, self.options.locate, self._drop), partial(self.proof.run, warned)
        watches = (partial(mechanism.watch, self._gpu_lost) for mechanism in self.mechanisms.values())
        checks = (self.shortfalls.run, self.residency.run, self.parking.run, self.limits.run, self._housekeeping)
        return jobs, unseen, proof, *checks, *watches

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _not_sliced(self, uuid: str, why: str) -> None:
        """Let a GPU's tenants take turns from now on, because the driver rejects control of its time slices."""
        self.lives.take_turns(uuid, why)
        LOG.warning(NOT_SLICED, uuid, why)

    def _gpu_lost(self, uuid: str, text: str) -> None:
        """Warn a GPU's tenants that they have lost the GPU, and log it."""
        LOG.error(text)
        for tenant in self.registry.on_gpu(uuid):
            tenant.warn(text)

    async def _release(self, tenant: Tenant) -> str:
        """Release a tenant if its pod or job has ended; otherwise return why the tenant stays."""
        why = await why_held(tenant, self.options.locate)
        if not why and tenant.owner is not None:  # it may have been released meanwhile
            self._drop(tenant)
        return why

    def _drop(self, tenant: Tenant) -> None:
        self.let_go_of(tenant)
        job_file(self.folder, tenant.name).unlink(missing_ok=True)

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if (trace := self.history.trace) is not None and (fault := trace.flush()):
                LOG.warning(fault)
            for gpu in self.copies.put_right():
                LOG.warning(f"{gpu}: a process had overwritten the shared memory of copy scheduling; it was restored")
            now_ns = time.monotonic_ns()
            for tenant in list(self.registry.tenants.values()):
                # the launcher enforces the timeout; the agent does so only after the launcher was killed
                late = tenant.timeout_s is not None and now_ns - tenant.created_ns > (tenant.timeout_s + 5) * 1e9
                if late and tenant.root is not None:
                    tenant.timeout_s = None
                    LOG.warning(f"tenant {tenant.name} exceeded its timeout and its launcher has ended: stopping it")
                    await kill(tenant, 10.0)
