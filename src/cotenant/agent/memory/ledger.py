"""Counts GPU memory by tenant: memory is reserved before it is allocated, and committed afterwards. When a process
ends, its memory is not counted any more.

The ledger only counts; the shim reports what the driver allocated, by family (pools, VMM handles, contexts, ...). The
ledger has a sum for each tenant and GPU, since the processes of a tenant share one limit. It also has sums for each
process, which are subtracted when the process ends. A process is identified by the number of its connection to the
agent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.abi.protocol import NO_LIMIT, MemoryFamily

HOST = "host"  # used as key instead of a GPU's UUID for pinned host memory
MAX_RESERVATIONS = 4096  # largest number of outstanding reservations of one process


@dataclass
class _Holding:
    """GPU memory that a process holds, and reservations for memory that it has not allocated yet."""

    tenant: str
    held: dict[tuple[str, int], int] = field(default_factory=dict)  # (gpu, family) -> bytes
    pending: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # reservation -> (gpu, family, bytes)


class Ledger:
    """Counts GPU memory by tenant and process. If a process reports more memory as freed than it holds, only what it
    holds is subtracted.
    """

    def __init__(self) -> None:
        self._caps: dict[tuple[str, str], int] = {}  # (tenant, gpu) -> memory limit in bytes
        self._used: dict[tuple[str, str], int] = {}  # (tenant, gpu) -> bytes committed or reserved
        self._kept: dict[tuple[str, str], int] = {}  # (tenant, gpu) -> bytes that are kept free for the tenant
        self._movable: set[str] = set()  # tenants whose contents can be swapped
        self._processes: dict[int, _Holding] = {}
        self._totals: dict[str, int] = {}
        self._next = 0

    def gpu(self, gpu: str, total_bytes: int) -> None:
        """Set the size of a GPU's memory; no tenant's limit on that GPU exceeds it."""
        self._totals[gpu] = total_bytes

    def cap(self, tenant: str, gpu: str, cap_bytes: int | None) -> None:
        """Set or remove a tenant's memory limit on a GPU. A tenant that holds more than its new limit keeps that
        memory, but is refused more.
        """
        if cap_bytes is None:
            self._caps.pop((tenant, gpu), None)
        else:
            self._caps[(tenant, gpu)] = cap_bytes

    def keep(self, tenant: str, gpu: str, size: int | None, *, movable: bool = False) -> None:
        """Keep `size` bytes of a GPU free for a tenant (None: nothing). `movable`: its memory can be swapped."""
        if size is None:
            self._kept.pop((tenant, gpu), None)
        else:
            self._kept[(tenant, gpu)] = size
        (self._movable.add if movable else self._movable.discard)(tenant)

    def leave(self, tenant: str, gpu: str) -> None:
        """Remove the limit and the kept memory of a tenant on a GPU that it has left."""
        self._caps.pop((tenant, gpu), None)
        self._kept.pop((tenant, gpu), None)

    def kept_from(self, tenant: str, gpu: str) -> int:
        """Bytes of a GPU that are kept for other tenants and that these tenants do not use yet."""
        kept = [(name, size) for (name, g), size in self._kept.items() if g == gpu and name != tenant]
        return sum(max(0, size - self.used(name, gpu)) for name, size in kept)

    def keeps(self, gpu: str) -> bool:
        """Whether memory of that GPU is kept for a tenant."""
        return any(g == gpu for _, g in self._kept)

    def not_for(self, tenant: str, gpu: str) -> int:
        """Free bytes of a GPU that are kept for other tenants; 0 for a swappable tenant, which may use them."""
        return 0 if tenant in self._movable else self.kept_from(tenant, gpu)

    def withheld(self, tenant: str, gpu: str) -> int:
        """Bytes within a tenant's limit that it cannot allocate because they are kept for other tenants; 0 if it has no
        limit.
        """
        limit = self.limit(tenant, gpu)
        return max(0, limit - self.used(tenant, gpu) - self.left(tenant, gpu)) if limit != NO_LIMIT else 0

    def left(self, tenant: str, gpu: str) -> int:
        """Return how many bytes a tenant may still allocate on a GPU on which memory is kept for other tenants;
        NO_LIMIT if none is kept, or if the tenant is swappable.
        """
        total, kept = self._totals.get(gpu), self.kept_from(tenant, gpu)
        if total is None or not kept or tenant in self._movable:
            return NO_LIMIT
        fixed = sum(n for (name, g), n in self._used.items() if g == gpu and name not in self._movable)
        return max(0, total - fixed - kept)

    def join(self, process: int, tenant: str) -> None:
        """Begin to count memory for a process of a tenant."""
        self._processes.setdefault(process, _Holding(tenant))

    def limit(self, tenant: str, gpu: str) -> int:
        """The tenant's limit on a GPU, at most the GPU's size; NO_LIMIT if it has no limit."""
        cap = self._caps.get((tenant, gpu))
        if cap is None:
            return NO_LIMIT
        return min(cap, self._totals.get(gpu, cap))

    def used(self, tenant: str, gpu: str) -> int:
        """Bytes charged to the tenant on that GPU."""
        return self._used.get((tenant, gpu), 0)

    def held(self, process: int, gpu: str, family: int) -> int:
        """Bytes held by one process in a family on that GPU, without reservations."""
        holding = self._processes.get(process)
        return holding.held.get((gpu, family), 0) if holding else 0

    def asked(self, tenant: str, gpu: str, family: int) -> int:
        """Bytes of a memory family that a tenant's processes have reserved and not committed."""
        asked = [p for h in self._processes.values() if h.tenant == tenant for p in h.pending.values()]
        return sum(size for g, f, size in asked if (g, f) == (gpu, family))

    def total_used(self, gpu: str) -> int:
        """Bytes charged to all tenants on that GPU."""
        return sum(n for (_, g), n in self._used.items() if g == gpu)

    def reserve(self, process: int, gpu: str, family: int, size: int) -> int | None:
        """Reserve memory. Returns the reservation's number (from 1), or None if the tenant's limit, or memory kept for
        other tenants, does not allow it. Contexts are never refused.
        """
        holding = self._processes[process]
        if len(holding.pending) >= MAX_RESERVATIONS:
            return None
        used = self.used(holding.tenant, gpu)
        if family != MemoryFamily.CONTEXT and used + size > self.limit(holding.tenant, gpu):
            return None
        if family != MemoryFamily.CONTEXT and gpu != HOST and size > self.left(holding.tenant, gpu):
            return None
        self._next += 1
        holding.pending[self._next] = (gpu, family, size)
        self._charge(holding.tenant, gpu, size)
        return self._next

    def commit(self, process: int, reservation: int, size: int) -> bool:
        """Replace a reservation by the bytes actually allocated. Returns False if the process has no such reservation.
        """
        holding = self._processes[process]
        pending = holding.pending.pop(reservation, None)
        if pending is None:
            return False
        gpu, family, reserved = pending
        self._charge(holding.tenant, gpu, size - reserved)
        if size:
            holding.held[(gpu, family)] = holding.held.get((gpu, family), 0) + size
        return True

    def reserving(self, tenant: str) -> bool:
        """Whether a process of the tenant has a reservation, so that its call to the driver has not returned yet."""
        return any(holding.pending for holding in self._processes.values() if holding.tenant == tenant)

    def take(self, process: int, gpu: str, family: int, size: int) -> None:
        """Charge memory that was allocated without a reservation (graphs, a pool that grew by itself), even beyond the
        limit.
        """
        holding = self._processes[process]
        self._hold(holding, gpu, family, holding.held.get((gpu, family), 0) + size)

    def release(self, process: int, gpu: str, family: int, size: int) -> int:
        """Count memory that a process has freed. Returns the credited bytes: at most what it held in that family."""
        holding = self._processes[process]
        held = holding.held.get((gpu, family), 0)
        credited = min(held, size)
        self._hold(holding, gpu, family, held - credited)
        return credited

    def state(self, process: int, gpu: str, family: int, size: int) -> None:
        """Set the bytes of a family that a process holds, as it reports them after a reconnection."""
        self._hold(self._processes[process], gpu, family, size)

    def rehome(self, process: int, gpu: str, target: str) -> None:
        """Charge what a process held on one GPU to another GPU, to which the driver restored it."""
        holding = self._processes[process]
        for (held_on, family), size in list(holding.held.items()):
            if held_on == gpu:
                self._hold(holding, gpu, family, 0)
                self._hold(holding, target, family, holding.held.get((target, family), 0) + size)

    def drop(self, process: int) -> dict[str, int]:
        """Remove a process with everything that it held or reserved. Returns the bytes that became free, by GPU."""
        holding = self._processes.pop(process, None)
        freed: dict[str, int] = {}
        if holding is None:
            return freed
        for gpu, _, size in holding.pending.values():
            freed[gpu] = freed.get(gpu, 0) + size
        for (gpu, _), size in holding.held.items():
            freed[gpu] = freed.get(gpu, 0) + size
        for gpu, size in freed.items():
            self._charge(holding.tenant, gpu, -size)
        return freed

    def forget(self, tenant: str) -> None:
        """Remove the limits and charges of a tenant that has ended."""
        self._movable.discard(tenant)
        for table in (self._caps, self._used, self._kept):
            for key in [key for key in table if key[0] == tenant]:
                del table[key]

    def families(self, tenant: str, gpu: str) -> dict[str, int]:
        """Bytes held by a tenant on a GPU, by family name."""
        sums: dict[str, int] = {}
        for holding in self._processes.values():
            if holding.tenant == tenant:
                for (g, family), size in holding.held.items():
                    if g == gpu:
                        name = MemoryFamily(family).name.lower()
                        sums[name] = sums.get(name, 0) + size
        return sums

    def _hold(self, holding: _Holding, gpu: str, family: int, size: int) -> None:
        before = holding.held.pop((gpu, family), 0)
        if size:
            holding.held[(gpu, family)] = size
        self._charge(holding.tenant, gpu, size - before)

    def _charge(self, tenant: str, gpu: str, change: int) -> None:
        key = (tenant, gpu)
        used = self._used.get(key, 0) + change
        assert used >= 0, "more memory was released than had been charged"
        if used:
            self._used[key] = used
        else:
            self._used.pop(key, None)
