"""The agent and the programs of `cotenant bench colocation`. Depending on the scheme, LS and BE programs run
concurrently or in time slices."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.bench.driver import LIBRARY_VARIABLE
from cotenant.bench.harness import Bench, Program
from cotenant.bench.overhead import core_of_its_own


class Rig:
    """Context manager: runs an agent, LS clients and BE programs. `together`: the programs run concurrently under MPS,
    else in time slices. `pinned`: all BE programs launch from one core, and all other processes of the benchmark avoid
    that core, because the choice of the core changes a program's speed more than the shim does."""

    def __init__(
        self, gpus: str, *, together: bool, pinned: bool = False, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.together, self.pinned = together, pinned
        self.core: int | None = None
        self.bench = Bench(gpus, settings or {})
        self.mechanism = mechanisms.choose(Use.TENANT, concurrent=together)
        self._stack = ExitStack()

    def __enter__(self) -> Rig:
        with ExitStack() as entered:
            if self.pinned:
                self.core = entered.enter_context(core_of_its_own())
            entered.enter_context(self.bench)
            with ControlClient(self.bench.folder) as client:
                gpu = client.call("status")["gpus"][0]
            self._stack = entered.pop_all()
        self.uuid, self.name = str(gpu["uuid"]), str(gpu["name"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _native(self, name: str, arguments: list[str], sms: float) -> Program:
        if self.together:
            spec = TenantSpec(name, limit=sms, mechanism=self.mechanism)
            return self.bench.tenant(name, spec, core=self.core, program=arguments, shim=False)
        return self.plain(name, arguments)

    def plain(self, name: str, arguments: list[str]) -> Program:
        """Start any module as a program without the agent and without MPS."""
        device = self.bench.device
        more = device.environment([self.uuid]) | {LIBRARY_VARIABLE: str(device.driver())}
        return self.bench.start(name, arguments, self.bench.environment | more, self.core)

    def ls(self, name: str = "ls", *, sms: float = 1.0, batch: int = 4) -> Program:
        """Start a latency-sensitive (LS) client without the shim, as workers of `cotenant serve` run. After `join` it
        reports activity.
        """
        return self._native(name, ["cotenant.bench.ls_client", self.bench.backend, str(batch)], sms)

    def join(self, ls: Program, work_class: str = "unknown") -> None:
        """Let a ready latency-sensitive (LS) client report activity to the agent, as work of that class."""
        ls.ask(f"floor {self.bench.folder} {self.uuid} {work_class}")

    def be_native(self, name: str = "be-native", *, sms: float = 1.0) -> Program:
        """Start a best-effort (BE) program without the shim."""
        return self._native(name, ["cotenant.bench.be_loads", self.bench.backend], sms)

    def be(
        self, name: str = "be", *, sms: float = 1.0, below: bool = False, work_sms: int = 0, kernels: str = ""
    ) -> Program:
        """Start an unmodified best-effort (BE) program as a tenant under the shim."""
        spec = TenantSpec(
            name,
            limit=sms,
            priority=-1 if below else 0,
            mechanism=self.mechanism,
            best_effort=True,
            work_sms=work_sms,
            kernels=kernels,
        )
        return self.tenant(spec, ["cotenant.bench.be_loads", self.bench.backend])

    def tenant(self, spec: TenantSpec, arguments: list[str]) -> Program:
        """Start any module as a tenant under the shim."""
        return self.bench.tenant(spec.name, spec, core=self.core, program=arguments)

    def scheme(self, name: str, **changes: Any) -> dict[str, Any]:
        """Apply a co-location scheme to the GPU. Returns the agent's answer."""
        with ControlClient(self.bench.folder) as client:
            return client.call("colocation", scheme=name, **changes)

    def tenants(self) -> dict[str, dict[str, Any]]:
        """Return the agent's rows about its tenants, by name."""
        return {row["name"]: row for row in self.bench.tenants()}
