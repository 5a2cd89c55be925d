"""Locks, checkpoints, restores and unlocks sets of processes by the CUDA driver's checkpoint interface."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence

from cotenant.abi.protocol import MemoryFamily
from cotenant.agent import processes
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.parked import Parked
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.base import Gpu, uuid_bytes
from cotenant.devices.checkpoint import INVALID_VALUE, MAPS, OLDEST_DRIVER, Checkpointer, CheckpointError
from cotenant.devices.registry import device_of

LOG = logging.getLogger(__name__)

# Bytes per second. A slower checkpoint or restore is treated as stalled. Measured were 1.8e9 for a checkpoint and 4.3e9
# for a restore.
SLOWEST_BPS = 0.4e9
FREE_WITHIN_S = 3.0
SETTLE_WITHIN_S = 30.0


def within_s(size: int) -> float:
    """Return the time limit in seconds of a driver call that moves `size` bytes."""
    return 30 + size / SLOWEST_BPS


class WholeProcesses:
    """Checkpoints and restores sets of processes; each set as a whole."""

    def __init__(self, devices: Sequence[Gpu], ledger: Ledger) -> None:
        self._devices, self._ledger = devices, ledger
        self.checkpointer = Checkpointer(device_of(devices[0]).driver)

    # -- which processes can be checkpointed -----------------------------------------------------------------------

    async def able(self, name: str, tenant: Tenant | None) -> tuple[ProcessKey, ...]:
        """The processes to checkpoint for a tenant, or for a process `pid:N` and its descendants. Raises InputError,
        with nothing changed, if they cannot be checkpointed.
        """
        keys = self._processes(name, tenant)
        await self._refuse(name, tenant)
        return await self._probe(name, keys)

    def _processes(self, name: str, tenant: Tenant | None) -> tuple[ProcessKey, ...]:
        """Return the processes that have a CUDA context, with the tenant's program first."""
        if tenant is None:
            pid = name.removeprefix("pid:")
            key = processes.key_of(int(pid) if pid.isdigit() else 0)
            if not processes.alive(key):
                raise InputError(f"there is no tenant and no process {name!r}", field="NAME")
            keys = (key, *sorted(processes.descendants({key})))
            if key.pid == 1 or os.getpid() in {each.pid for each in keys} or self.checkpointer.pid == key.pid:
                raise InputError(
                    f"process {key.pid} is this agent, its helper or its ancestor, which could not be resumed if parked"
                )
            return keys
        mine = {s.process for s in tenant.sessions if any(s.page.slots[slot].contexts for slot in s.slots)}
        if not mine:
            raise InputError(f"{name} has no process that uses a GPU", field="NAME")
        return tuple(sorted(mine, key=lambda key: (key != tenant.root, key.pid)))

    async def _refuse(self, name: str, tenant: Tenant | None) -> None:
        """Raise InputError if the driver or the tenant's memory does not permit checkpoints."""
        try:
            version = (await self.checkpointer.order("version"))["version"]
        except CheckpointError as error:
            raise WorkError(f"parking is not possible here: {error}") from None
        if version < OLDEST_DRIVER:
            raise InputError(
                f"this driver speaks CUDA {version // 1000}.{version % 1000 // 10}; parking needs 12.8 (release 570)"
            )
        if tenant is None:
            return
        for gpu in tenant.gpus:
            if gpu.uuid.startswith("MIG-"):
                raise InputError(f"{name} runs on {gpu.uuid}; the driver cannot checkpoint processes on MIG devices")
            if self._ledger.families(name, gpu.uuid).get(MemoryFamily.MANAGED.name.lower(), 0):
                raise InputError(f"{name} uses managed memory, which the driver cannot checkpoint")

    async def _probe(self, name: str, keys: tuple[ProcessKey, ...]) -> tuple[ProcessKey, ...]:
        """Select the processes that the driver can checkpoint; it cannot if a process has no CUDA context. Raises
        InputError if there are none, or if another program has already checkpointed one.
        """
        able = []
        why = "all its processes have ended"
        for key in keys:
            try:
                state = await self.state(key)
            except CheckpointError as error:
                why = str(error)
                continue
            if state != "running":
                what = f"another program has {state} process {key.pid} of {name}"
                raise InputError(f"{what}; resume it with that program first")
            able.append(key)
        if not able:
            raise InputError(f"{name} has no process that the driver can checkpoint: {why}", field="NAME")
        return tuple(able)

    async def state(self, key: ProcessKey) -> str:
        """State of a process as the driver reports it: "running", "locked", "checkpointed" or "failed". Raises
        CheckpointError if the process has no CUDA context.
        """
        return str((await self.checkpointer.order("state", key.pid))["state"])

    async def free_bytes(self, uuids: tuple[str, ...]) -> int:
        """Sum of the free memory that the driver reports for these GPUs; without `uuids`, for all GPUs of the agent."""
        total = 0
        for gpu in self._devices:
            if uuids and gpu.uuid not in uuids:
                continue
            free = await asyncio.get_running_loop().run_in_executor(None, device_of(gpu).free_bytes, gpu.uuid)
            total += free or 0
        return total

    # -- checkpoint ------------------------------------------------------------------------------------------------

    async def checkpoint(self, keys: tuple[ProcessKey, ...], size: int, timeout_s: float) -> None:
        """Lock all processes, then checkpoint all. If the driver fails to lock or checkpoint one of them, restore those
        already checkpointed, unlock all, and raise CheckpointError.
        """
        locked: list[ProcessKey] = []
        done: list[ProcessKey] = []
        try:
            for key in keys:
                await self.checkpointer.order(
                    "lock", key.pid, within_s=timeout_s + 10, timeout_ms=int(timeout_s * 1000)
                )
                locked.append(key)
            for key in locked:
                await self.checkpointer.order("checkpoint", key.pid, within_s=within_s(size))
                done.append(key)
        except CheckpointError:
            for key in reversed(done):
                with contextlib.suppress(CheckpointError):
                    await self.checkpointer.order("restore", key.pid, within_s=within_s(size))
            for key in reversed(locked):
                with contextlib.suppress(CheckpointError):
                    await self.checkpointer.order("unlock", key.pid)
            raise

    # -- restore ---------------------------------------------------------------------------------------------------

    async def restore(self, parked: Parked, target: str | None) -> None:
        """Restore all parked processes, on the GPU `target` if given, then unlock all. Raises WorkError on failure."""
        await self._wait_for_memory(target or (parked.gpus[0] if parked.gpus else None), parked.size)
        onto: list[str] = []
        if target is not None and parked.gpus and target != parked.gpus[0]:
            onto = [uuid_bytes(parked.gpus[0]).hex(), uuid_bytes(target).hex()]
        alive = [key for key in parked.keys if processes.alive(key)]
        try:
            for key in alive:
                state = await self.state(key)
                if state == "failed":
                    raise CheckpointError(
                        f"the driver has lost the GPU state of process {key.pid}, which must be stopped"
                    )
                if state == "checkpointed":
                    await self._restore_one(key, within_s(parked.size), onto)
            for key in alive:
                if await self.state(key) == "locked":
                    await self.checkpointer.order("unlock", key.pid)
        except CheckpointError as error:
            raise WorkError(f"{parked.name} cannot be brought back: {error}") from None

    async def _restore_one(self, key: ProcessKey, limit_s: float, onto: list[str]) -> None:
        """Restore a process. `onto`: UUIDs of its old and its new GPU in hex; empty: it stays on its GPU.

        For a restore onto another GPU, the driver needs a map that says which GPU replaces which. Which GPUs the map
        must list depends on which GPUs the process sees, so the kinds of maps in MAPS are tried in order: the driver
        refuses a wrong map without effect.
        """
        faults = []
        for number, kind in enumerate(MAPS if onto else ("",)):
            try:
                await self.checkpointer.order("restore", key.pid, within_s=limit_s, onto=onto, map=kind)
            except CheckpointError as error:
                faults.append(f"{kind}: {error}" if onto else str(error))
                if error.code != INVALID_VALUE or await self.state(key) != "checkpointed":
                    break
            else:
                if number:
                    LOG.warning(
                        f"process {key.pid} was restored with a GPU map that lists {kind}; the driver refused other "
                        f"maps: {'; '.join(faults)}"
                    )
                return
        raise CheckpointError("; ".join(faults))

    async def _wait_for_memory(self, gpu: str | None, size: int) -> None:
        """Wait until the driver reports `size` bytes of a GPU as free, which takes a moment after an eviction. Raises
        WorkError if it does not within FREE_WITHIN_S.
        """
        deadline = time.monotonic() + FREE_WITHIN_S
        kind = next((device_of(each) for each in self._devices if each.uuid == gpu), None)
        while kind is not None and gpu is not None:
            free = await asyncio.get_running_loop().run_in_executor(None, kind.free_bytes, gpu)
            if free is None or free >= size + kind.spare_bytes:
                return
            if time.monotonic() > deadline:
                raise WorkError(
                    f"{size / 2**30:.1f} GiB are needed to resume, but only {free / 2**30:.1f} GiB of the GPU are free"
                )
            await asyncio.sleep(0.2)

    # -- after a restart of the agent ------------------------------------------------------------------------------

    async def settle(self, parked: Parked) -> bool:
        """Find out whether a set of processes that the previous agent was parking or resuming is parked. If the
        processes are only locked, unlock them and return False. Waits for calls of the driver in progress.
        """
        deadline = time.monotonic() + SETTLE_WITHIN_S
        while True:
            states = {}
            for key in parked.keys:
                with contextlib.suppress(CheckpointError):
                    if processes.alive(key):
                        states[key] = await self.state(key)
            if "checkpointed" in states.values() or "failed" in states.values():
                return True
            locked = [key for key, state in states.items() if state == "locked"]
            if not locked:
                return False
            for key in locked:
                with contextlib.suppress(CheckpointError):
                    await self.checkpointer.order("unlock", key.pid)
            if time.monotonic() > deadline:
                return True  # the next order to resume these processes will try again and report the driver's error
            await asyncio.sleep(0.2)

    def close(self) -> None:
        """End the helper process that calls the driver; checkpointed processes stay checkpointed."""
        self.checkpointer.close()
