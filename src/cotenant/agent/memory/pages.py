"""Writes how much GPU memory each tenant uses and may use into the pages that its processes share with the agent."""

from __future__ import annotations

from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant


class MemoryPages:
    """Writes tenants' used memory and limits into their processes' shared pages, and warns about refused memory."""

    def __init__(self, ledger: Ledger, registry: Registry) -> None:
        self._ledger, self._registry = ledger, registry

    def publish(self, tenant: Tenant, gpu: str) -> None:
        """Write a tenant's used memory and limit on a GPU into the shared pages of its processes."""
        used, limit = self._ledger.used(tenant.name, gpu), self._ledger.limit(tenant.name, gpu)
        for session, slot in tenant.slots_on(gpu):
            page = session.page.slots[slot]
            page.memory_used_bytes = used
            page.memory_limit_bytes = limit
        if self._ledger.keeps(gpu):
            self.publish_kept(gpu)

    def publish_kept(self, gpu: str) -> None:
        """Write into the shared pages of all processes on a GPU how much of its free memory is kept for other tenants.
        """
        for tenant in self._registry.on_gpu(gpu):
            kept, withheld = self._ledger.not_for(tenant.name, gpu), self._ledger.withheld(tenant.name, gpu)
            for session, slot in tenant.slots_on(gpu):
                page = session.page.slots[slot]
                page.memory_kept_bytes = kept
                page.memory_withheld_bytes = withheld

    def refused(self, tenant: Tenant, gpu: str, size: int) -> None:
        """Warn a tenant that its request for memory was refused because it exceeds the tenant's limit."""
        ledger, name = self._ledger, tenant.name
        limit, used = ledger.limit(name, gpu), ledger.used(name, gpu)
        if used + size > limit:
            why = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB in use"
        else:
            why = (
                f"{ledger.left(name, gpu) / 2**20:.0f} MiB left: {ledger.kept_from(name, gpu) / 2**20:.0f} "
                "MiB of the GPU are kept for latency-sensitive tenants"
            )
        tenant.warn(f"out of memory: {size / 2**20:.0f} MiB requested with {why}")

    def over(self, tenant: Tenant, gpu: str) -> None:
        """Warn a tenant that it exceeds its limit by memory that could be counted only after it was allocated."""
        limit, used = self._ledger.limit(tenant.name, gpu), self._ledger.used(tenant.name, gpu)
        tenant.warn(
            f"the tenant is over its memory limit: {used / 2**20:.0f} of {limit / 2**20:.0f} MiB in use (a graph's "
            "memory is counted after its launch)"
        )
