"""Moves tenants and other programs off their GPUs and back by the CUDA driver's checkpoint.

To move a tenant off, all its processes are locked, then all are checkpointed. If the driver fails to lock or checkpoint
one of them, the others are restored and unlocked. To move a tenant back, all its processes are restored, then all are
unlocked. A restore begins only when enough GPU memory is free, because the driver does not survive a restore without
enough memory. An agent that restarts takes over what its predecessor had checkpointed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from cotenant.agent import processes
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.parked import Parked, ParkedTable
from cotenant.agent.memory.residents import Residents
from cotenant.agent.memory.whole import WholeProcesses
from cotenant.agent.tenants.host_memory import HostMemory
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.core.background import spawn
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.checkpoint import CheckpointError

LOG = logging.getLogger(__name__)

LOCK_S = 10.0
WISH_S = 1.0
# A checkpoint may free more memory than the ledger has counted for the tenant. At most this much of the difference is
# added to the tenant's size, because other tenants may have freed memory at the same time.
MOST_UNKNOWN_BYTES = 2 << 30


class StateFile(Protocol):
    """The state file, from which a restarted agent learns what is parked."""

    def save(self) -> None:
        """Write the state file soon, so that it lists what is parked."""

    def save_now(self) -> bool:
        """Write the state file now; returns whether it could be written."""


class Checkpoints:
    """Checkpoints and restores tenants and other programs of this node."""

    def __init__(
        self,
        whole: WholeProcesses,
        parked: ParkedTable,
        residents: Residents,
        registry: Registry,
        host: HostMemory,
        ledger: Ledger,
        broker: Broker,
        state: StateFile,
    ) -> None:
        self._whole, self._parked, self._residents, self._registry = whole, parked, residents, registry
        self._host, self._ledger, self._broker, self._state = host, ledger, broker, state
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._wishes: set[asyncio.Task[None]] = set()

    async def still(self, tenant: Tenant, timeout_s: float) -> None:
        """Grant the tenant no more turns, and wait until its present turn has ended. If that takes longer than
        `timeout_s`, the tenant may have turns again and WorkError is raised.
        """
        broker = self._broker
        broker.suspend(tenant)
        deadline = time.monotonic() + timeout_s
        while any(broker.holds(tenant, gpu.uuid) for gpu in tenant.gpus):
            if time.monotonic() > deadline:
                broker.unsuspend(tenant)
                raise WorkError(f"the GPU work of {tenant.name} did not end within {timeout_s:g} s")
            await asyncio.sleep(0.002)

    async def take(self, name: str, tenant: Tenant | None, timeout_s: float, *, by_order: bool) -> Parked:
        """Checkpoint a tenant, or the process that the name `pid:N` means. Raises InputError if that is impossible,
        WorkError if it failed.
        """
        keys = await self._whole.able(name, tenant)
        uuids = tuple(gpu.uuid for gpu in tenant.gpus) if tenant is not None else ()
        size = sum(self._ledger.used(name, uuid) for uuid in uuids)
        self._host.check_room(name, size)
        gated = tenant is not None and self._registry.gated(tenant)
        if tenant is not None and gated:
            await self.still(tenant, timeout_s)
        parked = Parked(name, "checkpoint", uuids, size, keys, by_order=by_order)
        free_before = await self._whole.free_bytes(uuids)
        self._parked.under_way[name] = parked
        began = time.monotonic()
        try:
            # saved before the checkpoint, so that a restarted agent knows which processes it may find checkpointed
            if not self._state.save_now():
                raise CheckpointError("the agent cannot save its state: its folder is full or read-only")
            await self._whole.checkpoint(keys, size, timeout_s)
        except CheckpointError as error:
            if tenant is not None and gated:
                self._broker.unsuspend(tenant)
            raise WorkError(f"{name} cannot be parked: {error}") from None
        finally:
            del self._parked.under_way[name]
            self._state.save()
        seconds = time.monotonic() - began
        freed = await self._whole.free_bytes(uuids) - free_before
        # the ledger does not have the charges of programs that are not tenants, nor the real size of contexts
        parked.size = max(size, min(freed, size + MOST_UNKNOWN_BYTES) if tenant is not None else freed)
        self._parked.rows[name] = parked
        if tenant is not None:
            self._residents.count(name).add_whole(parked.size, out=True, seconds=seconds)
        return parked

    async def restore(self, parked: Parked, target: str | None) -> None:
        """Restore a parked tenant or process, on the GPU `target` if given. If the restore fails, the tenant or process
        stays parked and WorkError is raised.
        """
        await self._whole.restore(parked, target)

    # -- for other parts of the agent ------------------------------------------------------------------------------

    async def evict(self, tenant: Tenant) -> str | None:
        """Evict a tenant with `oversubscribe: park` until its next turn, which begins with its restore. Returns a
        sentence on failure.

        A program that is in a call of the driver at that moment is stopped there and cannot request its next turn, so
        the agent requests that turn.
        """
        try:
            parked = await self.take(tenant.name, tenant, LOCK_S, by_order=False)
        except (WorkError, InputError) as error:
            return str(error)
        self._wish(parked, while_reserving=True)
        self._broker.unsuspend(tenant)
        self._state.save_now()
        return None

    async def bring(self, tenant: Tenant) -> str | None:
        """Restore a tenant for which space has been made. Returns a sentence on failure."""
        await self.settled(tenant.name)
        parked = self._parked.rows.get(tenant.name)
        if parked is None:
            return "the tenant is not parked"
        try:
            await self.restore(parked, tenant.gpus[0].uuid if parked.gpus else None)
        except WorkError as error:
            return str(error)
        # the restore is counted without its time: residency.py counts the time of the whole switch of tenants, of which
        # this restore is a part
        self._residents.count(tenant.name).add_whole(parked.size, out=False)
        self._parked.rows.pop(tenant.name, None)
        self._state.save_now()
        return None

    # -- after a restart of the agent ------------------------------------------------------------------------------

    def expect(self, rows: list[dict[str, Any]]) -> None:
        """Count tenants as parked before they are admitted again: others may have been given their GPU memory."""
        self._parked.rows.update({parked.name: parked for parked in map(Parked.from_dict, rows)})

    def take_over(self) -> None:
        """Take over tenants and processes that the previous agent had parked or was parking."""
        for parked in list(self._parked.rows.values()):
            tenant = self._registry.tenants.get(parked.name)
            if tenant is None and not (parked.name.startswith("pid:") and any(map(processes.alive, parked.keys))):
                del self._parked.rows[parked.name]
                continue
            if tenant is not None and parked.by_order and self._registry.gated(tenant):
                self._broker.suspend(tenant)
            if parked.method == "checkpoint":
                self.settles(parked.name, self._settle(parked))

    def settles(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do work for which `settled` then waits."""
        self._settling[name] = asyncio.get_running_loop().create_task(work)

    def settling(self, name: str) -> bool:
        """Whether such work is in progress."""
        return name in self._settling and not self._settling[name].done()

    async def settled(self, name: str) -> None:
        """Wait until this agent has found in which state the previous agent left the processes of a tenant, or of the
        process that the name `pid:N` means.
        """
        if name in self._settling:
            await asyncio.wait({self._settling[name]})
            self._settling.pop(name, None)

    async def _settle(self, parked: Parked) -> None:
        """Ask the driver whether the processes of a row of the state file are really checkpointed."""
        still = await self._whole.settle(parked)
        if self._parked.rows.get(parked.name) is not parked:
            return
        if still:
            if not parked.by_order:
                self._wish(parked)
            return
        LOG.info(f"{parked.name} is not parked: the previous agent had not finished parking, or had resumed it")
        self._parked.rows.pop(parked.name)
        tenant = self._registry.tenants.get(parked.name)
        if tenant is not None and self._registry.gated(tenant):
            self._broker.unsuspend(tenant)
        self._state.save_now()

    def _wish(self, parked: Parked, *, while_reserving: bool = False) -> None:
        spawn(self._wishes, self._wish_for(parked, while_reserving))

    async def _wish_for(self, parked: Parked, while_reserving: bool) -> None:
        """Request turns for an evicted tenant, whose stopped processes cannot do so. `while_reserving`: only while one
        of its processes is allocating memory."""
        while self._parked.rows.get(parked.name) is parked and not parked.by_order:
            tenant = self._registry.tenants.get(parked.name)
            if tenant is not None and (not while_reserving or self._ledger.reserving(parked.name)):
                self._broker.wish(tenant)
            await asyncio.sleep(WISH_S)

    def close(self) -> None:
        """End the helper process that calls the driver. Parked tenants stay parked; the state file lists them."""
        for task in (*self._settling.values(), *self._wishes):
            task.cancel()
        self._whole.close()
