"""Parking: a tenant, or any CUDA program, off its GPU and back, by its own moves or by the driver's checkpoint.

A tenant that moves its own memory (swap, managed) leaves by that: fast, its context stays. Everybody else is
checkpointed whole: all processes are locked, then all are checkpointed; on return all are restored, then all unlocked.
Whatever fails on the way out is undone; on the way back nothing is restored before its memory is free, because the
driver does not survive a restore that finds too little.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from cotenant.model.errors import InputError, WorkError
from cotenant.node import gpus, processes
from cotenant.node.checkpoint import OLDEST_DRIVER, Checkpointer, CheckpointError
from cotenant.node.parked import Parked, movable_first
from cotenant.node.processes import ProcessKey
from cotenant.node.relocation import relocate
from cotenant.node.residency import MOVED_BY_PROCESS, Residency
from cotenant.node.wire import Family

if TYPE_CHECKING:
    from cotenant.node.agent import Agent
    from cotenant.node.tenants import Tenant

LOCK_S = 10.0
SLOWEST_BPS = 0.4e9  # a checkpoint or restore slower than this has stopped (measured: 1.8e9 and 4.3e9)
FREE_WITHIN_S = 10.0
SPARE_BYTES = 256 << 20


class Parking:
    """Everything parked on this node."""

    def __init__(self, agent: Agent, residency: Residency) -> None:
        self.agent = agent
        self.residency = residency
        self.parked: dict[str, Parked] = {}
        self.checkpointer = Checkpointer(any(gpu.soft for gpu in agent.gpus))
        self._busy: set[str] = set()
        residency.park, residency.unpark = self._park_for_others, self._unpark

    # -- leaving ---------------------------------------------------------------------------------------------------

    async def park(self, name: str, timeout_s: float = LOCK_S) -> dict[str, Any]:
        """Take a tenant (or pid:N) off its GPU. InputError where it cannot work, WorkError where it did not."""
        with self._alone(name):
            if name in self.parked:
                raise InputError(f"{name} is parked already", field="NAME")
            tenant = self._tenant(name)
            began = time.monotonic()
            if tenant is not None and tenant.spec.oversubscribe in MOVED_BY_PROCESS:
                parked = await self._move_out(tenant, timeout_s)
            else:
                parked = await self._checkpoint(name, tenant, timeout_s)
            parked.out_s = time.monotonic() - began
            self.parked[name] = parked
            self.agent.save()
            return parked.as_dict()

    async def _move_out(self, tenant: Tenant, timeout_s: float) -> Parked:
        gpu = tenant.gpus[0].uuid
        await self._still(tenant, timeout_s)
        before = self.residency.refresh(gpu).occupants[tenant.name].resident_bytes
        if not await self.residency.evacuate(tenant, gpu):
            self.agent.broker.unsuspend(tenant)
            raise WorkError(
                f"{tenant.name} could not be moved: {next(iter(reversed(tenant.warnings)), 'it cannot leave')}"
            )
        return Parked(tenant.name, "swap", (gpu,), before)

    async def _still(self, tenant: Tenant, timeout_s: float) -> None:
        """No turns for the tenant from now on, and its last one over."""
        broker = self.agent.broker
        broker.suspend(tenant)
        deadline = time.monotonic() + timeout_s
        while any(broker.holds(tenant, gpu.uuid) for gpu in tenant.gpus):
            if time.monotonic() > deadline:
                broker.unsuspend(tenant)
                raise WorkError(f"the GPU work of {tenant.name} did not end within {timeout_s:g} s")
            await asyncio.sleep(0.002)

    async def _checkpoint(self, name: str, tenant: Tenant | None, timeout_s: float) -> Parked:
        keys = self._processes(name, tenant)
        await self._refuse(name, tenant)
        keys = await self._probe(name, keys)
        uuids = tuple(gpu.uuid for gpu in tenant.gpus) if tenant is not None else ()
        size = sum(self.agent.ledger.used(name, uuid) for uuid in uuids)
        self.residency.host.check_room(name, size)
        gated = tenant is not None and self._gated(tenant)
        if tenant is not None and gated:
            await self._still(tenant, timeout_s)
        try:
            keys = await self._lock_and_checkpoint(keys, size, timeout_s)
        except CheckpointError as error:
            if tenant is not None and gated:
                self.agent.broker.unsuspend(tenant)
            raise WorkError(f"{name} cannot be parked: {error}") from None
        if tenant is not None:
            self.residency.parked[name] = size
        return Parked(name, "checkpoint", uuids, size, keys)

    async def _lock_and_checkpoint(
        self, keys: tuple[ProcessKey, ...], size: int, timeout_s: float
    ) -> tuple[ProcessKey, ...]:
        """Lock all, then checkpoint all; what was done is undone when one of them fails."""
        locked: list[ProcessKey] = []
        done: list[ProcessKey] = []
        try:
            for key in keys:
                await self.checkpointer.order(
                    "lock", key.pid, within_s=timeout_s + 10, timeout_ms=int(timeout_s * 1000)
                )
                locked.append(key)
            for key in locked:
                await self.checkpointer.order("checkpoint", key.pid, within_s=30 + size / SLOWEST_BPS)
                done.append(key)
        except CheckpointError:
            for key in reversed(done):
                with contextlib.suppress(CheckpointError):
                    await self.checkpointer.order("restore", key.pid, within_s=30 + size / SLOWEST_BPS)
            for key in reversed(locked):
                with contextlib.suppress(CheckpointError):
                    await self.checkpointer.order("unlock", key.pid)
            raise
        return tuple(locked)

    # -- where it cannot work --------------------------------------------------------------------------------------

    async def _refuse(self, name: str, tenant: Tenant | None) -> None:
        """A clear no before anything is touched."""
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
                raise InputError(f"{name} runs on the MIG device {gpu.uuid}; the driver does not checkpoint those")
            if self.agent.ledger.families(name, gpu.uuid).get(Family.MANAGED.name.lower(), 0):
                raise InputError(f"{name} uses managed memory; the driver does not checkpoint that")

    async def _probe(self, name: str, keys: tuple[ProcessKey, ...]) -> tuple[ProcessKey, ...]:
        """Those of the processes that the driver could checkpoint: a child may have no context, an MPS client none of
        its own."""
        able = []
        why = "they are gone"
        for key in keys:
            try:
                state = (await self.checkpointer.order("state", key.pid))["state"]
            except CheckpointError as error:
                why = str(error)
                continue
            if state != "running":
                raise InputError(f"process {key.pid} of {name} is {state} already, and not by this agent")
            able.append(key)
        if not able:
            raise InputError(f"{name} has no process that the driver can checkpoint: {why}", field="NAME")
        return tuple(able)

    def _processes(self, name: str, tenant: Tenant | None) -> tuple[ProcessKey, ...]:
        """Processes with a CUDA context, the tenant's program first."""
        if tenant is None:
            pid = name.removeprefix("pid:")
            key = processes.key_of(int(pid) if pid.isdigit() else 0)
            if not processes.alive(key):
                raise InputError(f"there is no tenant and no process {name!r}", field="NAME")
            return (key, *sorted(processes.descendants({key})))
        keys = {s.process for s in tenant.sessions if any(s.page.slots[slot].contexts for slot in s.slots)}
        if not keys:
            raise InputError(f"{name} has no process that uses a GPU", field="NAME")
        return tuple(sorted(keys, key=lambda key: (key != tenant.root, key.pid)))

    # -- coming back -----------------------------------------------------------------------------------------------

    async def resume(self, name: str, gpu: str | None = None, timeout_s: float = 60.0) -> dict[str, Any]:
        """Bring back what was parked, on `gpu` if given. What cannot be brought back stays parked."""
        with self._alone(name):
            parked = self.parked.get(name)
            if parked is None:
                raise InputError(f"{name} is not parked; parked are: {', '.join(self.parked) or 'none'}", field="NAME")
            target = self._target(parked, gpu)
            tenant = self._tenant(name)
            began = time.monotonic()
            if tenant is not None and (target is None or target in parked.gpus):
                self.agent.registry.readmit(tenant)
            if tenant is None:
                await self._restore(parked, target)
            else:
                await self._bring(tenant, parked, target, timeout_s)
            self.parked.pop(name, None)
            self.agent.save()
            return {"name": name, "method": parked.method, "gpus": [target] if target else list(parked.gpus),
                    "seconds": time.monotonic() - began}  # fmt: skip

    async def _bring(self, tenant: Tenant, parked: Parked, target: str | None, timeout_s: float) -> None:
        """Room first, at the cost of whoever can leave; then the contents."""
        home = tenant.gpus[0].uuid
        if target is not None and target != home:
            if parked.method != "checkpoint":
                raise InputError(
                    f"{tenant.name} moves its own memory and stays on its GPU; only checkpoints change GPUs"
                )
            relocate(self.agent, tenant, target)
            try:
                return await self._return(tenant, target, timeout_s)
            except WorkError:
                if tenant.name in self.residency.parked:  # still whole, and on its old GPU's account
                    relocate(self.agent, tenant, home)
                    if self._gated(tenant):
                        self.agent.broker.suspend(tenant)
                raise
        return await self._return(tenant, home, timeout_s)

    async def _return(self, tenant: Tenant, home: str, timeout_s: float) -> None:
        fault = await self.residency.maker.until(
            tenant,
            home,
            lambda: self.residency.make_free(tenant, home),
            timeout_s,
            lambda: not self.residency.refusal,
            hold_off=True,
        )
        if fault is not None:
            raise WorkError(f"{tenant.name} cannot be brought back: {fault}")
        self.agent.broker.unsuspend(tenant)

    async def _unpark(self, tenant: Tenant) -> str | None:
        """For the residency: restore a tenant whose room has been made. A sentence when it fails."""
        parked = self.parked.get(tenant.name)
        if parked is None:
            return "it is not parked"
        try:
            await self._restore(parked, tenant.gpus[0].uuid if parked.gpus else None)
        except WorkError as error:
            return str(error)
        self.residency.parked.pop(tenant.name, None)
        self.parked.pop(tenant.name, None)
        self.agent.save()
        return None

    async def _restore(self, parked: Parked, target: str | None) -> None:
        """Restore all, then unlock all."""
        await self._wait_for_memory(target or (parked.gpus[0] if parked.gpus else None), parked.size)
        onto: list[str] = []
        if target is not None and parked.gpus and target != parked.gpus[0]:
            onto = [gpus.uuid_bytes(parked.gpus[0]).hex(), gpus.uuid_bytes(target).hex()]
        alive = [key for key in parked.keys if processes.alive(key)]
        try:
            for key in alive:
                state = (await self.checkpointer.order("state", key.pid))["state"]
                if state == "failed":
                    raise CheckpointError(
                        f"the driver has lost the GPU state of process {key.pid}: it has to be stopped"
                    )
                if state == "checkpointed":
                    within_s = 30 + parked.size / SLOWEST_BPS
                    await self.checkpointer.order("restore", key.pid, within_s=within_s, onto=onto)
            for key in alive:
                if (await self.checkpointer.order("state", key.pid))["state"] == "locked":
                    await self.checkpointer.order("unlock", key.pid)
        except CheckpointError as error:
            raise WorkError(f"{parked.name} cannot be brought back: {error}") from None

    async def _wait_for_memory(self, gpu: str | None, size: int) -> None:
        """Do not restore before the driver has that much free: what has just left may take a moment."""
        deadline = time.monotonic() + FREE_WITHIN_S
        while gpu is not None:
            free = await asyncio.get_running_loop().run_in_executor(None, gpus.free_bytes, gpu)
            if free is None or free >= size + SPARE_BYTES:
                return
            if time.monotonic() > deadline:
                raise WorkError(
                    f"{size / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB of its GPU are free; it stays parked"
                )
            await asyncio.sleep(0.2)

    def take_over(self, rows: list[dict[str, Any]]) -> None:
        """What the last agent had parked, of tenants and processes that still live."""
        for row in rows:
            parked = Parked.from_dict(row)
            tenant = self.agent.registry.tenants.get(parked.name)
            if tenant is None and not (parked.name.startswith("pid:") and any(map(processes.alive, parked.keys))):
                continue
            self.parked[parked.name] = parked
            if tenant is None:
                continue
            if parked.method == "checkpoint":
                self.residency.parked[parked.name] = parked.size
            if tenant.spec.oversubscribe != "park" and self._gated(tenant):
                self.agent.broker.suspend(tenant)

    # -- for others ------------------------------------------------------------------------------------------------

    async def _park_for_others(self, tenant: Tenant) -> str | None:
        """For the residency: a tenant of kind `park` makes way. It comes back with its next turn."""
        try:
            parked = await self._checkpoint(tenant.name, tenant, LOCK_S)
        except (WorkError, InputError) as error:
            return str(error)
        self.parked[tenant.name] = parked
        self.agent.broker.unsuspend(tenant)
        self.agent.save()
        return None

    async def preempt(self, names: list[str], gpu: str | None, free_bytes: int | None) -> dict[str, Any]:
        """Free a GPU for a scheduler: these tenants, or on `gpu` as many as it takes, lowest priority first."""
        began = time.monotonic()
        if not names:
            if gpu is None:
                raise InputError("say whom to preempt, or on which GPU", field="--gpu")
            names = [tenant.name for tenant in movable_first(self.agent.registry.on_gpu(gpu))]
        done: list[dict[str, Any]] = []
        failed: dict[str, str] = {}
        for name in names:
            if name in self.parked or (free_bytes is not None and sum(p["freed_bytes"] for p in done) >= free_bytes):
                continue
            try:
                done.append(await self.park(name))
            except (InputError, WorkError) as error:
                failed[name] = str(error)
        freed = sum(parked["freed_bytes"] for parked in done)
        return {"parked": done, "failed": failed, "freed_bytes": freed, "seconds": time.monotonic() - began,
                "enough": not failed if free_bytes is None else freed >= free_bytes}  # fmt: skip

    # -- small things ----------------------------------------------------------------------------------------------

    def _target(self, parked: Parked, gpu: str | None) -> str | None:
        if gpu is None:
            return parked.gpus[0] if parked.gpus else None
        known = self.agent.registry.gpus
        found = known.get(gpu) or next((g for g in known.values() if str(g.index) == gpu), None)
        if found is None:
            raise InputError(f"this agent has no GPU {gpu!r}; it has {', '.join(known)}", field="--gpu")
        if parked.gpus and known[parked.gpus[0]].name != found.name:
            raise InputError(
                f"{parked.name} was parked on a {known[parked.gpus[0]].name} and can only come back on one of those",
                field="--gpu",
            )
        return found.uuid

    def _tenant(self, name: str) -> Tenant | None:
        tenant = self.agent.registry.tenants.get(name)
        if tenant is None and not name.startswith("pid:"):
            known = ", ".join(list(self.agent.registry.tenants)[:20]) or "none"
            raise InputError(
                f"there is no tenant {name!r} (a plain process is pid:N); there are: {known}", field="NAME"
            )
        return tenant

    def _gated(self, tenant: Tenant) -> bool:
        return bool(self.agent.mechanisms[tenant.spec.mechanism].capabilities().gated)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Any:
        """One order at a time for a name."""
        if name in self._busy:
            raise WorkError(f"{name} is being parked or resumed already")
        self._busy.add(name)
        try:
            yield
        finally:
            self._busy.discard(name)

    def holds(self, tenant: Tenant) -> bool:
        """Whether a tenant is parked and a process of it lives."""
        parked = self.parked.get(tenant.name)
        return parked is not None and any(processes.alive(key) for key in parked.keys)

    def rows(self) -> list[dict[str, Any]]:
        """What is parked, for the state file."""
        return [parked.as_dict() for parked in self.parked.values()]

    def forget(self, tenant: Tenant) -> None:
        """A tenant has gone."""
        self.parked.pop(tenant.name, None)
        self.residency.forget(tenant)

    def close(self) -> None:
        """End the helper and all moves; what is parked stays parked and is in the state file."""
        self.residency.close()
        self.checkpointer.close()
