"""Scheduling of copies over the PCIe links of a node's GPUs.

The tenants of a GPU share a copy page: shared memory with a queue per tenant, through which their processes agree on
whose copy goes next. The agent creates the page and assigns the queues.
"""

from __future__ import annotations

import itertools
from typing import Any

from cotenant.abi.copy_page import COPY_PAGE_BYTES, COPY_QUEUES, CopyRank
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.copies.page import CopyPage
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.policy.copies import CopySettings

MAX_PARTICIPANTS = 0xFFFF


def rank_of(spec: TenantSpec) -> CopyRank:
    """Return the rank of a tenant's queue on the copy page. Copies of latency-sensitive tenants go first. All others
    share the link by weight. The rank BEST_EFFORT also tells the tenant's processes to split their copies within the
    device into chunks, as is done for all tenants' copies over the link.
    """
    return CopyRank.AHEAD if spec.latency_sensitive else CopyRank.BEST_EFFORT if spec.best_effort else CopyRank.NORMAL


def asks_for_turns(spec: TenantSpec) -> bool:
    """Return whether this tenant requires that the copies of all tenants of its GPU be scheduled."""
    return spec.copy_weight is not None or spec.latency_sensitive


def _weight(spec: TenantSpec) -> float:
    return 1.0 if spec.copy_weight is None else spec.copy_weight


class Copies:
    """The copy pages of all GPUs: shared memory through which the processes of a GPU's tenants schedule their copies.

    A GPU's page is created when a tenant first requires that copies be scheduled.
    """

    def __init__(self, settings: CopySettings) -> None:
        self.settings = settings
        self._pages: dict[str, CopyPage] = {}
        self._tenants: dict[str, dict[str, Tenant]] = {}  # UUID of a GPU -> name -> tenant
        # UUID of a GPU -> name of a tenant -> number of the tenant's queue on the copy page
        self._queues: dict[str, dict[str, int]] = {}
        self._participants: dict[tuple[Session, str], int] = {}
        self._numbers = itertools.cycle(range(1, MAX_PARTICIPANTS + 1))

    # -- tenants ---------------------------------------------------------------------------------------------------

    def join(self, tenant: Tenant) -> None:
        """Add a tenant that was admitted, or apply its changed weight."""
        for gpu in tenant.gpus:
            self._tenants.setdefault(gpu.uuid, {})[tenant.name] = tenant
            self._refresh(gpu.uuid)

    def leave(self, tenant: Tenant) -> None:
        """Free the queues of a tenant that was removed."""
        for gpu in tenant.gpus:
            self._leave_at(tenant, gpu.uuid)

    def _leave_at(self, tenant: Tenant, gpu: str) -> None:
        self._tenants.get(gpu, {}).pop(tenant.name, None)
        queue = self._queues.get(gpu, {}).pop(tenant.name, None)
        if queue is not None:
            self._pages[gpu].describe(queue, 0.0, CopyRank.NORMAL)
        self._refresh(gpu)

    def move(self, tenant: Tenant, gpu: str) -> None:
        """Free a tenant's queue on `gpu`, and assign it one on the GPU to which the tenant was moved. The tenant's
        processes request the new GPU's copy page later.
        """
        for session in tenant.sessions:
            self._drop_at(session, gpu)
        self._leave_at(tenant, gpu)
        self.join(tenant)

    def configure(self, settings: CopySettings) -> None:
        """Put new settings into effect from the next copy on."""
        self.settings = settings
        for page in self._pages.values():
            page.configure(settings)
        for gpu in self._tenants:
            self._refresh(gpu)

    def put_right(self) -> list[str]:
        """Restore the agent's fields in all copy pages. Returns the GPUs whose page a process had overwritten."""
        wrong = []
        for gpu, page in self._pages.items():
            tenants = self._tenants.get(gpu, {})
            claims = {
                queue: (_weight(tenants[name].spec), rank_of(tenants[name].spec))
                for name, queue in self._queues.get(gpu, {}).items()
                if name in tenants
            }
            if page.put_right(self.settings, claims):
                wrong.append(gpu)
        return wrong

    def is_on(self, gpu: str) -> bool:
        """Whether copies are scheduled on a GPU."""
        tenants = self._tenants.get(gpu, {}).values()
        return bool(tenants) and (self.settings.always or any(asks_for_turns(t.spec) for t in tenants))

    def flag(self, session: Session, gpu: str) -> int:
        """Return the flag for the slot of this GPU in a process's shared page: SlotFlag.COPIES if the process's copies
        on the GPU are scheduled, otherwise 0.
        """
        return SlotFlag.COPIES if self.is_on(gpu) and session.tenant.name in self._queues.get(gpu, {}) else 0

    def _refresh(self, gpu: str) -> None:
        """Assign queues to tenants that need them, and set SlotFlag.COPIES in the shared pages of their processes."""
        on = self.is_on(gpu)
        for tenant in self._tenants.get(gpu, {}).values():
            # a tenant that has a queue keeps the queue, even while copies on its GPU are not scheduled
            if on or tenant.name in self._queues.get(gpu, {}):
                self._give_queue(gpu, tenant)
            for session, slot in tenant.slots_on(gpu):
                page = session.page.slots[slot]
                flags = page.flags & ~SlotFlag.COPIES | self.flag(session, gpu)
                if flags != page.flags:
                    page.flags = flags

    def _give_queue(self, gpu: str, tenant: Tenant) -> None:
        if gpu not in self._pages:
            self._pages[gpu] = CopyPage(self.settings)
        page, queues = self._pages[gpu], self._queues.setdefault(gpu, {})
        if tenant.name not in queues:
            free = next((q for q in range(COPY_QUEUES) if q not in queues.values()), None)
            if free is None:
                tenant.warn(f"the tenant's copies are not scheduled: its GPU already has {COPY_QUEUES} tenants")
                return
            queues[tenant.name] = free
            page.clear(free)
        page.describe(queues[tenant.name], _weight(tenant.spec), rank_of(tenant.spec))

    # -- processes -------------------------------------------------------------------------------------------------

    def attach(self, session: Session, gpu: str) -> tuple[int, dict[str, int]] | None:
        """Answer a process's request for a GPU's copy page: the page's descriptor and the reply's fields. None if the
        process's tenant has no queue on that GPU, or if there are too many processes.
        """
        queue = self._queues.get(gpu, {}).get(session.tenant.name)
        if queue is None or not self.is_on(gpu):
            return None
        taken = set(self._participants.values())
        if (session, gpu) not in self._participants:
            if len(taken) >= MAX_PARTICIPANTS:
                return None
            self._participants[session, gpu] = next(n for n in self._numbers if n not in taken)
        number = self._participants[session, gpu]
        return self._pages[gpu].fd, {"queue": queue, "participant": number, "page_bytes": COPY_PAGE_BYTES}

    def drop(self, session: Session) -> None:
        """Free the slots that a process that has ended holds on copy pages, one for each of its chunks in flight. The
        process's session must have been removed from its tenant before.
        """
        for _, gpu in [key for key in self._participants if key[0] is session]:
            self._drop_at(session, gpu, last=not session.tenant.sessions)

    def _drop_at(self, session: Session, gpu: str, *, last: bool = True) -> None:
        number = self._participants.pop((session, gpu), None)
        queue = self._queues.get(gpu, {}).get(session.tenant.name)
        if number is not None and queue is not None:
            self._pages[gpu].drop(queue, number, last=last)

    def row(self, tenant: Tenant, gpu: str) -> dict[str, Any] | None:
        """Weight, rank and counters of a tenant's queue, for display; None if copies are not scheduled."""
        queue = self._queues.get(gpu, {}).get(tenant.name)
        if queue is None:
            return None
        weight = _weight(tenant.spec)
        rank = rank_of(tenant.spec).name.lower().replace("_", "-")
        return {"weight": weight, "rank": rank, **self._pages[gpu].counters(queue)}

    def close(self) -> None:
        """Close all copy pages. Processes keep their mappings and continue to schedule their copies."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()
