"""The agent: one process per node that owns its GPUs. Puts the parts together and keeps them running."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.abi.protocol import FLOOR_SOCKET
from cotenant.agent import processes, reconfigure
from cotenant.agent.config import files as configs
from cotenant.agent.config.file_watch import FileWatch
from cotenant.agent.config.files import AgentConfig, TenantSpec
from cotenant.agent.gate.floor import Floors
from cotenant.agent.ipc.control import Caller, ControlServer
from cotenant.agent.ipc.server import ShimServer
from cotenant.agent.live import Live, promise
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.memory.backing import host_memory
from cotenant.agent.memory.ledger import HOST, Ledger
from cotenant.agent.memory.parking import Parking
from cotenant.agent.memory.residency import Residency
from cotenant.agent.operations import Operations
from cotenant.agent.owners.holders import Place, place_of
from cotenant.agent.tenants import state
from cotenant.agent.tenants.orphans import Heirs
from cotenant.agent.tenants.registry import Registry, Tenant
from cotenant.agent.tenants.takeover import take_over
from cotenant.agent.turns.broker import Broker
from cotenant.agent.turns.trace import TurnTrace
from cotenant.core.errors import WorkError
from cotenant.devices.gpus import Gpu, discover, within
from cotenant.policy.shares import Ended

WATCH_S = 0.25
HOUSEKEEPING_S = 1.0
SAVE_WITHIN_S = 0.05
MAX_DEPARTED = 256
AGENT_NICE = -10
TENANT_SOCKET_MODE = 0o666  # who a process is, its cgroup says, whichever user it runs as


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """How to run: where, from which config, with which overrides."""

    folder: Path
    source: str | None = None  # FILE.yaml or gemini:FILE
    trace: Path | None = None
    socket_mode: int = 0o600
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpus: tuple[Gpu, ...] | None = None  # given instead of discovered
    tenant_socket: Path | None = None  # for containers: apart from the control socket, open to every user
    locate: Callable[[int], Place | None] = place_of  # the pod or job of a process
    http: str | None = None  # HOST:PORT of the live page and the metrics
    http_token: str | None = None  # what their readers must show
    log: Callable[[str], None] = lambda text: print(f"cotenant agent: {text}", file=sys.stderr, flush=True)


class Agent:
    """One run of the agent. `await run()` returns when it was told to stop."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.log = options.log
        self.folder = options.folder
        self.config = self.load_config()
        self.gpus = within(self.config.gpu_memory_bytes, options.gpus or discover(self.config.gpus))
        self.mechanisms = mechanisms.make(self.folder, Use.TENANT)
        self.registry = Registry(self.gpus, self.mechanisms, host_memory(self.config.swap_memory_bytes))
        self.ledger = Ledger()
        for gpu in self.gpus:
            self.ledger.gpu(gpu.uuid, gpu.memory_bytes)
        self.trace: TurnTrace | None = None
        self.started_ns = time.monotonic_ns()
        self.turn_count = 0
        self.config_fault = ""
        self.departed: dict[str, list[str]] = {}  # warnings of tenants that have ended, for their launchers
        self.broker: Broker
        self.server: ShimServer
        self.floors: Floors
        self.heirs: Heirs
        self.live = Live(self)
        self._stop = asyncio.Event()
        self._saved_fault = ""
        self._save_timer: asyncio.TimerHandle | None = None
        self._lock: int | None = None
        self._root_fds: dict[str, int] = {}

    def load_config(self) -> AgentConfig:
        """The config file as it is now, with the command line's values over it."""
        source = self.options.source
        return configs.with_options(configs.load(source) if source else AgentConfig(), **self.options.overrides)

    # -- running ---------------------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM, SIGINT or `stop`. `ready` is called once tenants can connect."""
        self._take_folder()
        _raise_descriptor_limit()
        with contextlib.suppress(OSError):
            # while the agent waits for a processor, a GPU waits for the agent
            os.setpriority(os.PRIO_PROCESS, 0, AGENT_NICE)
        try:
            if self.options.trace is not None:
                self.trace = TurnTrace(self.options.trace)
            self._start_parts()
            self.operations = Operations(self)
            control = ControlServer(self.folder / "control.sock", self.operations.table(), self.launcher_gone, self.log)
            take_over(self)
            reconfigure.admit_declared(self, self.config.tenants)
            self.server.listen(TENANT_SOCKET_MODE if self.options.tenant_socket else self.options.socket_mode)
            self.floors.listen(TENANT_SOCKET_MODE if self.options.tenant_socket else self.options.socket_mode)
            await control.listen(self.options.socket_mode)
            await self.live.listen()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                    loop.add_signal_handler(number, self.stop)
            tasks = [asyncio.create_task(self._housekeeping())]
            tasks += [asyncio.create_task(kind.watch(self._gpu_lost)) for kind in self.mechanisms.values()]
            if self.options.source:
                tasks.append(asyncio.create_task(self._watch(configs.config_path(self.options.source))))
            ready()
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            await control.close()
            await self.live.close()
        finally:
            self._end()

    def stop(self) -> None:
        """End the run; tenants then do what `fail` says."""
        self._stop.set()

    def _start_parts(self) -> None:
        self.broker = Broker(
            [gpu.uuid for gpu in self.gpus],
            self.config.quota,
            inflight_ns=self.config.inflight_ns,
            on_turn=self._turn_ended,
            on_fault=self._tenant_fault,
        )
        self.server = ShimServer(
            self.options.tenant_socket or self.folder / "agent.sock",
            self.config,
            self.registry,
            self.broker,
            self.ledger,
            self.log,
            self.maybe_remove,
            self.save,
            self.options.locate,
        )
        self.residency = self.server.residency = Residency(self, self.registry.host, self.config.most_moving)
        self.broker.before_grant = self.residency.before_grant
        self.parking = Parking(self, self.residency)
        self.heirs = Heirs(self.registry.tenants, self.maybe_remove, self.save)
        self.registry.away = self.parking
        floor_path = self.server.path.with_name(FLOOR_SOCKET)
        gpus = [gpu.uuid for gpu in self.gpus]
        self.floors = Floors(
            floor_path, gpus, self.config.colocation, self.server.tenant_of, self.log, self.server.holders.in_container
        )

    def _end(self) -> None:
        if hasattr(self, "floors"):
            self.floors.close()
        if hasattr(self, "server"):
            self.save_now()
            self.heirs.close()
            self.broker.close()
            self.parking.close()
            self.server.close_all()
        for mechanism in self.mechanisms.values():
            mechanism.close()
        if self.trace is not None:
            self.trace.close()
        for fd in self._root_fds.values():
            os.close(fd)
        if self._lock is not None:
            os.close(self._lock)

    def _take_folder(self) -> None:
        """Make the folder and lock it: a socket file left by a dead agent is stale, a held lock is a live agent."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._lock = os.open(self.folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WorkError(f"{self.folder}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown pid"
            raise WorkError(f"an agent ({holder}) already runs in {self.folder}; stop it, or choose --dir") from None
        with contextlib.suppress(OSError):  # on a full disk the lock holds without its label
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"pid {os.getpid()}".encode(), 0)

    # -- tenants ---------------------------------------------------------------------------------------------------

    def add_tenant(self, spec: TenantSpec, uid: int, *, token: str | None = None, declared: bool = False) -> Tenant:
        """Admit a tenant and open its accounts."""
        tenant = self.registry.admit(spec, uid, token=token, declared=declared)
        tenant.created_ns = time.monotonic_ns()
        self.open_accounts(tenant)
        self.live.decided(f"{spec.name} admitted: {promise(spec)}")
        return tenant

    def change_tenant(self, tenant: Tenant, spec: TenantSpec) -> str:
        """Change a tenant's promise; returns from when on it holds."""
        when = self.registry.resize(tenant, spec)
        self.open_accounts(tenant)
        self.live.decided(f"{tenant.name} changed: {promise(spec)}; holds {when}")
        self.save()
        return when

    def open_accounts(self, tenant: Tenant) -> None:
        """Make a tenant's promise true on its GPUs."""
        for gpu in tenant.gpus:
            self.ledger.cap(tenant.name, gpu.uuid, tenant.cap_bytes(gpu))
            movable = tenant.spec.oversubscribe != "none"
            self.ledger.keep(tenant.name, gpu.uuid, tenant.kept_bytes, movable=movable)
            self.server.publish_memory(tenant, gpu.uuid)
            self.server.publish_kept(gpu.uuid)
        if self.mechanisms[tenant.spec.mechanism].capabilities.gated:
            self.broker.join(tenant)
        self.server.copies.join(tenant)

    def set_root(self, tenant: Tenant, key: processes.ProcessKey) -> None:
        """The program of a tenant runs; from now on the tenant lives as long as the program or any of its processes."""
        tenant.root = key
        fd = processes.pidfd(key)
        if fd is None:
            tenant.root = None
            self.heirs.watch(tenant, key.pid)
            return
        self._root_fds[tenant.name] = fd
        asyncio.get_running_loop().add_reader(fd, self._root_ended, tenant)

    def _root_ended(self, tenant: Tenant) -> None:
        fd = self._root_fds.pop(tenant.name, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        group = tenant.root.pid if tenant.root is not None else None
        tenant.root = None
        self.heirs.watch(tenant, group)

    def maybe_remove(self, tenant: Tenant) -> None:
        """Remove a tenant that has no program, no processes and no launcher any more. Declared and held ones stay."""
        root_lives = tenant.root is not None and tenant.name in self._root_fds
        alive = root_lives or tenant.sessions or self.parking.holds(tenant)
        if tenant.declared or tenant.holder is not None or tenant.left_behind:
            return
        if alive or tenant.launching:
            return
        if self.registry.tenants.get(tenant.name) is not tenant:
            return
        if tenant.name in self.broker.turns.gpus[tenant.gpus[0].uuid].accounts:
            self.broker.leave(tenant)
        self.ledger.forget(tenant.name)
        for gpu in tenant.gpus:
            self.server.publish_kept(gpu.uuid)
        self.registry.remove(tenant)
        self.server.copies.leave(tenant)
        self.parking.forget(tenant)
        self.live.decided(f"{tenant.name} left")
        self.departed[tenant.name] = list(tenant.warnings)
        if len(self.departed) > MAX_DEPARTED:
            del self.departed[next(iter(self.departed))]
        self.save()

    def launcher_gone(self, caller: Caller) -> None:
        """A control connection closed: what it registered and never started goes."""
        for name in caller.registered:
            tenant = self.registry.tenants.get(name)
            if tenant is not None and tenant.launching:
                tenant.launching = False
                self.maybe_remove(tenant)

    # -- config and state ------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state file soon: many changes at once are one write."""
        if self._save_timer is None:
            self._save_timer = asyncio.get_running_loop().call_later(SAVE_WITHIN_S, self.save_now)

    def save_now(self) -> bool:
        """Write the state file; a full disk is reported once and does not stop anything. Whether it was written."""
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None
        try:
            tenants, counts = self.registry.tenants.values(), self.residency.counts
            state.save(self.folder / "state.json", tenants, self.parking.rows(), counts)
            self._saved_fault = ""
        except OSError as error:
            if not self._saved_fault:
                self.log(f"{self.folder}/state.json cannot be written ({error.strerror}): a restart would lose tenants")
            self._saved_fault = str(error)
        return not self._saved_fault

    def _gpu_lost(self, uuid: str, text: str) -> None:
        """The tenants of a GPU have lost it."""
        self.log(text)
        for tenant in self.registry.on_gpu(uuid):
            tenant.warn(text)

    async def _watch(self, path: Path) -> None:
        watch = FileWatch(path)
        while True:
            await asyncio.sleep(WATCH_S)
            if watch.changed():
                try:
                    reconfigure.reload(self)
                except Exception as error:  # a fault of ours must not end the watch: the next version would go unseen
                    self.config_fault = f"{path}: cannot be taken: {error!r}"
                    self.log(f"the new configuration is not taken: {error!r}")

    # -- events ----------------------------------------------------------------------------------------------------

    def _turn_ended(self, ended: Ended) -> None:
        self.turn_count += 1
        self.live.turn(ended)
        if self.trace is not None:
            self.trace.turn(ended)

    def _tenant_fault(self, name: str, text: str) -> None:
        tenant = self.registry.tenants.get(name)
        if tenant is not None:
            self.server.warn(tenant, text)
            self.live.decided(f"{name}: {text}")

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if self.trace is not None:
                fault = self.trace.flush()
                if fault:
                    self.log(fault)
            for gpu in self.server.copies.put_right():
                self.log(f"{gpu}: a process had overwritten the page of turns on the link; put right")
            now_ns = time.monotonic_ns()
            for tenant in list(self.registry.tenants.values()):
                # the launcher keeps the timeout; this is for one that was killed
                late = tenant.timeout_s is not None and now_ns - tenant.created_ns > (tenant.timeout_s + 5) * 1e9
                if late and tenant.root is not None:
                    tenant.timeout_s = None
                    self.log(f"tenant {tenant.name} is over its timeout and its launcher has gone: stopping it")
                    Operations(self).kill(tenant, 10.0)

    def host_used(self, tenant: Tenant) -> int:
        """Pinned host memory of a tenant, bytes."""
        return self.ledger.used(tenant.name, HOST)


def _raise_descriptor_limit() -> None:
    """Two descriptors per process of a tenant: take what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
