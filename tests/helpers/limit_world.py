"""The part of an agent that limits memory, on a software GPU of a machine with driver 615."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.memory_limits.enforcer import MemoryLimits as LimitsPart
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import ControlGroup, Tenant
from cotenant.devices.base import Gpu
from cotenant.devices.cards import GPU_IS_LOST, NO_LIMIT, MemoryLimits, NvmlError
from cotenant.devices.registry import device
from cotenant.softgpu.cgroups import FolderCgroups

GIB = 1 << 30


class PlainCard:
    """A card that limits any group and keeps the limits. While it is `lost`, it refuses every call."""

    def __init__(self) -> None:
        self.limits: dict[Path, int] = {}
        self.lost = False

    def set_memory_limits(self, group: Path, soft: int, hard: int) -> None:
        assert group.is_dir()
        self._check()
        self.limits[group] = hard

    def memory_limits(self, group: Path) -> MemoryLimits:
        self._check()
        return MemoryLimits(0, self.limits.get(group, NO_LIMIT), 0)

    def _check(self) -> None:
        if self.lost:
            raise NvmlError("NVML error 15", GPU_IS_LOST)


class World:
    """That part, with control groups in a folder; `groups` changes them as another program would."""

    def __init__(self, folder: Path, *, dmem: bool = True, more: tuple[Gpu, ...] = (), **parts: Any) -> None:
        """`more`: GPUs besides the software GPU; `parts` must have a `card` and a `find` for them."""
        self.groups = FolderCgroups.make(folder / "cgroup", dmem=dmem, memory_bytes=16 * GIB)
        self.gpu = device("soft").gpus()[0]
        self.registry = Registry([self.gpu, *more], mechanisms.make(folder, Use.TENANT))
        self.warnings: list[str] = []
        self.limits = LimitsPart(folder, self.registry, self.warned, **parts)

    def warned(self, tenant: Tenant, text: str) -> None:
        tenant.warn(text)
        self.warnings.append(text)

    # -- what the agent does on its event loop, until all orders to the driver have been carried out ------------------

    def begin(self, tenant: Tenant, pid: int) -> None:
        asyncio.run(self.limits.begin(tenant, pid))

    def came(self, tenant: Tenant, pid: int) -> None:
        asyncio.run(self.limits.came(tenant, pid))

    def end(self, tenant: Tenant) -> None:
        asyncio.run(self._swept(lambda: self.limits.end(tenant)))

    def rest(self, tenant: Tenant) -> None:
        asyncio.run(self._swept(lambda: self.limits.rest(tenant)))

    def clean(self, left: Iterable[ControlGroup]) -> None:
        asyncio.run(self._swept(lambda: self.limits.clean(left)))

    def look(self) -> None:
        asyncio.run(self.limits._watch.look())

    def leave(self, tenant: Tenant, gpu: Gpu) -> None:
        self.limits.leave(tenant, gpu)
        self.limits._applied.give(lambda: None).result()

    async def _swept(self, call: Callable[[], None]) -> None:
        call()
        await asyncio.gather(*self.limits._sweeps)

    # ------------------------------------------------------------------------------------------------------------------

    def tenant(self, name: str = "one", **spec: object) -> Tenant:
        return self.registry.admit(TenantSpec(name, **{"memory_bytes": GIB} | spec), 0)  # type: ignore[arg-type]

    def group(self, *names: str) -> Path:
        path = self.groups.root
        for name in names:
            path = path / name
            if not path.exists():
                self.groups.create(path)
        return path

    def limit(self, group: Path) -> str:
        return self.groups.read(group, "dmem.max").split()[1]
