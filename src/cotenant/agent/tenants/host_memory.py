"""Host memory to which tenants' GPU memory is evicted: one memfd per tenant, within a budget of the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cotenant.agent.config.swap import GRANULE
from cotenant.core.errors import InputError, NoHostMemoryError


def _machine_bytes(field: str) -> list[int]:
    """The value of a field of /proc/meminfo; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        return [int(line.split()[1]) << 10 for line in file if line.startswith(field)]
    return []


def available_bytes() -> int:
    """Available memory of this machine as the kernel estimates it; 0 if unknown."""
    return sum(_machine_bytes("MemAvailable:"))


def total_bytes() -> int:
    """Memory of this machine, or the limit of this process's control group if that is smaller; 0 if unknown."""
    totals = _machine_bytes("MemTotal:")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        totals.append(int(file.read()))
    return min(totals, default=0)


def host_memory(budget_bytes: int | None, before_bytes: int | None = None) -> HostMemory:
    """The node's host memory for evicted GPU memory. Without a budget it is that of the previous agent (`before_bytes`)
    if tenants of it still run, since the memory of their programs is not available now, else half of the memory
    available now. Raises InputError if the budget exceeds the machine's memory, since the out-of-memory killer would
    end programs.
    """
    if budget_bytes is None:
        return HostMemory(available_bytes() // 2 if before_bytes is None else before_bytes)
    total = total_bytes()
    if total and budget_bytes > total:
        raise InputError(
            f"the budget of {budget_bytes / 2**30:.1f} GiB of host memory for swapping exceeds the "
            f"{total / 2**30:.1f} GiB of this machine",
            field="--swap-memory",
        )
    return HostMemory(budget_bytes)


@dataclass
class HostMemory:
    """The node's budget of host memory for evicted GPU memory, in bytes, and what is reserved for each tenant."""

    budget_bytes: int
    promised: dict[str, int] = field(default_factory=dict)
    _fds: dict[str, int] = field(default_factory=dict)

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget for evicted memory that are not reserved for a tenant."""
        return self.budget_bytes - sum(self.promised.values())

    def as_dict(self) -> dict[str, Any]:
        """The budget of host memory in JSON types, for --json."""
        return {"budget_bytes": self.budget_bytes, "promised_bytes": dict(self.promised), "left_bytes": self.left_bytes}

    def promise(self, tenant: str, size: int) -> None:
        """Reserve the host memory that a tenant needs if all its memory is evicted. Raises NoHostMemoryError if the
        budget is too small.
        """
        before = self.promised.get(tenant, 0)
        if size - before > self.left_bytes:
            raise NoHostMemoryError(
                f"{tenant} needs {size / 2**30:.1f} GiB of host memory for swapping, and "
                f"{self.left_bytes / 2**30:.1f} of {self.budget_bytes / 2**30:.1f} GiB are left: lower its "
                "memory, or raise the agent's --swap-memory",
                field="--memory",
            )
        self.promised[tenant] = size

    def check_room(self, name: str, size: int) -> None:
        """Raise InputError if a checkpoint of this size, which the driver keeps in host memory, would not fit now."""
        room = min(self.left_bytes, available_bytes() or size)
        if size > room:
            raise InputError(
                f"{name} holds {size / 2**30:.1f} GiB, but host memory has room for only {room / 2**30:.1f} GiB"
            )

    def resize(self, tenant: str, size: int) -> None:
        """Change what is reserved for a tenant. Raises InputError if it must grow but processes have already mapped it.
        """
        if tenant in self._fds and size > self.promised[tenant]:
            raise InputError(
                f"{tenant} runs with {self.promised[tenant] / 2**30:.1f} GiB of host memory for swapping, "
                "which cannot grow: restart it with more",
                field="--memory",
            )
        self.promise(tenant, size)

    def release(self, tenant: str) -> None:
        """Release a removed tenant's memory; processes that have it mapped keep it until they end."""
        self.promised.pop(tenant, None)
        fd = self._fds.pop(tenant, None)
        if fd is not None:
            os.close(fd)

    def memfd(self, tenant: str) -> tuple[int, int]:
        """Descriptor and size of a tenant's host memory, created on first use and sealed against shrinking."""
        size = self.promised.get(tenant, 0) // GRANULE * GRANULE
        if not size:
            return -1, 0
        if tenant not in self._fds:
            fd = os.memfd_create("cotenant-swap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._fds[tenant] = fd
        return self._fds[tenant], os.fstat(self._fds[tenant]).st_size

    def close(self) -> None:
        """Close the descriptors of all tenants' host memory."""
        for tenant in list(self._fds):
            self.release(tenant)


def widest_gap(taken: Iterable[tuple[int, int]], end: int) -> tuple[int, int]:
    """Start and length of the widest part of [0, end) that no (low, high) of `taken` overlaps."""
    best, at = (0, 0), 0
    for low, high in [*sorted(span for span in taken if span[1] > span[0]), (end, end)]:
        if low - at > best[1]:
            best = (at, low - at)
        at = max(at, high)
    return best
