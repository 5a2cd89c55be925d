"""The part of an agent that limits memory, on a software GPU of a machine with driver 615."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.memory_limits.enforcer import MemoryLimits
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.devices.registry import device
from cotenant.softgpu.cgroups import FolderCgroups

GIB = 1 << 30


class World:
    """That part, with control groups in a folder; `groups` changes them as another program would."""

    def __init__(self, folder: Path, *, dmem: bool = True, **parts: Any) -> None:
        self.groups = FolderCgroups.make(folder / "cgroup", dmem=dmem, memory_bytes=16 * GIB)
        self.gpu = device("soft").gpus()[0]
        self.registry = Registry([self.gpu], mechanisms.make(folder, Use.TENANT))
        self.warnings: list[str] = []
        self.limits = MemoryLimits(folder, self.registry, self.warned, **parts)

    def warned(self, tenant: Tenant, text: str) -> None:
        tenant.warn(text)
        self.warnings.append(text)

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
