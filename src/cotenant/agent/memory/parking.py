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

from cotenant.agent import processes
from cotenant.agent.memory.moves import MoveCount
from cotenant.agent.memory.parked import Parked, movable_first
from cotenant.agent.memory.relocation import relocate
from cotenant.agent.memory.residency import MOVED_BY_PROCESS, Residency
from cotenant.agent.memory.whole import WholeProcesses
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.checkpoint import CheckpointError

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent
    from cotenant.agent.tenants.registry import Tenant

LOCK_S = 10.0
WISH_S = 1.0
MOST_UNKNOWN_BYTES = 2 << 30  # of a tenant's, beside what it is charged: others may free memory at the same time


class Parking:
    """Everything parked on this node."""

    def __init__(self, agent: Agent, residency: Residency) -> None:
        self.agent = agent
        self.residency = residency
        self.parked: dict[str, Parked] = {}
        self.whole = WholeProcesses(agent)
        self._under_way: dict[str, Parked] = {}  # being checkpointed
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._wishes: list[asyncio.Task[None]] = []
        self._busy: set[str] = set()
        residency.park, residency.unpark = self._park_for_others, self._unpark

    # -- leaving ---------------------------------------------------------------------------------------------------

    async def park(self, name: str, timeout_s: float = LOCK_S) -> dict[str, Any]:
        """Take a tenant (or pid:N) off its GPU. InputError where it cannot work, WorkError where it did not."""
        await self._settled(name)
        with self._alone(name):
            tenant = self._tenant(name)
            if name in self:
                raise InputError(f"{name} is parked already", field="NAME")
            if name in self.parked and tenant is not None:
                return self._keep_away(tenant, self.parked[name])
            began = time.monotonic()
            if tenant is not None and tenant.spec.oversubscribe in MOVED_BY_PROCESS:
                parked = await self._move_out(tenant, timeout_s)
            else:
                parked = await self._checkpoint(name, tenant, timeout_s, by_order=True)
            parked.out_s = time.monotonic() - began
            parked.by_order = True
            self.parked[name] = parked
            self.agent.save_now()
            return parked.as_dict()

    def _keep_away(self, tenant: Tenant, parked: Parked) -> dict[str, Any]:
        """It had made way for others, and would come back with its next turn: from now on with an order only."""
        parked.by_order = True
        self.agent.broker.suspend(tenant)
        self.agent.save_now()
        return parked.as_dict()

    async def _move_out(self, tenant: Tenant, timeout_s: float) -> Parked:
        gpu = tenant.gpus[0].uuid
        started = bool(tenant.sessions)  # one that has not come to its GPU yet is parked, too: before it takes any
        await self._still(tenant, timeout_s)
        before = self.residency.refresh(gpu).occupants[tenant.name].resident_bytes
        if not await self.residency.evacuate(tenant, gpu):
            self.agent.broker.unsuspend(tenant)
            raise WorkError(
                f"{tenant.name} could not be moved: {next(iter(reversed(tenant.warnings)), 'it cannot leave')}"
            )
        if started and not tenant.sessions:
            self.agent.broker.unsuspend(tenant)  # another process of it may come
            raise WorkError(f"{tenant.name} ended while it was being parked")
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

    async def _checkpoint(self, name: str, tenant: Tenant | None, timeout_s: float, *, by_order: bool) -> Parked:
        keys = await self.whole.able(name, tenant)
        uuids = tuple(gpu.uuid for gpu in tenant.gpus) if tenant is not None else ()
        size = sum(self.agent.ledger.used(name, uuid) for uuid in uuids)
        self.residency.host.check_room(name, size)
        gated = tenant is not None and self._gated(tenant)
        if tenant is not None and gated:
            await self._still(tenant, timeout_s)
        parked = Parked(name, "checkpoint", uuids, size, keys, by_order=by_order)
        free_before = await self.whole.free_bytes(uuids)
        self._under_way[name] = parked
        began = time.monotonic()
        try:
            if not self.agent.save_now():  # whoever comes after this agent has to know whom it may have stopped
                raise CheckpointError("the agent cannot write down that it is: its folder is full or read-only")
            await self.whole.checkpoint(keys, size, timeout_s)
        except CheckpointError as error:
            if tenant is not None and gated:
                self.agent.broker.unsuspend(tenant)
            raise WorkError(f"{name} cannot be parked: {error}") from None
        finally:
            del self._under_way[name]
            self.agent.save()
        seconds = time.monotonic() - began
        freed = await self.whole.free_bytes(uuids) - free_before
        # the ledger does not know a program that is no tenant, nor how large contexts are
        parked.size = max(size, min(freed, size + MOST_UNKNOWN_BYTES) if tenant is not None else freed)
        if tenant is not None:
            self.residency.parked[name] = parked.size
            self._count(name).add_whole(parked.size, out=True, seconds=seconds)
        return parked

    def _count(self, name: str) -> MoveCount:
        return self.residency.counts.setdefault(name, MoveCount())

    # -- coming back -----------------------------------------------------------------------------------------------

    async def resume(self, name: str, gpu: str | None = None, timeout_s: float = 60.0) -> dict[str, Any]:
        """Bring back what was parked, on `gpu` if given. What cannot be brought back stays parked."""
        await self._settled(name)
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
                await self.whole.restore(parked, target)
            else:
                await self._bring(tenant, parked, target, timeout_s)
            self.parked.pop(name, None)
            self.agent.save_now()
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
            try:
                relocate(self.agent, tenant, target)
            except InputError as error:
                raise InputError(error.message, field="--gpu") from None
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
        await self._settled(tenant.name)
        parked = self.parked.get(tenant.name)
        if parked is None:
            return "it is not parked"
        try:
            await self.whole.restore(parked, tenant.gpus[0].uuid if parked.gpus else None)
        except WorkError as error:
            return str(error)
        self._count(tenant.name).add_whole(parked.size, out=False)  # its time is the switch's
        self.residency.parked.pop(tenant.name, None)
        self.parked.pop(tenant.name, None)
        self.agent.save_now()
        return None

    def take_over(self, rows: list[dict[str, Any]]) -> None:
        """What the last agent had parked, or was parking, of tenants and processes that still live."""
        for row in rows:
            parked = Parked.from_dict(row)
            tenant = self.agent.registry.tenants.get(parked.name)
            if tenant is None and not (parked.name.startswith("pid:") and any(map(processes.alive, parked.keys))):
                continue
            self.parked[parked.name] = parked
            if tenant is not None:
                if parked.method == "checkpoint":
                    self.residency.parked[parked.name] = parked.size
                if parked.by_order and self._gated(tenant):
                    self.agent.broker.suspend(tenant)
            if parked.method == "checkpoint":
                self._settling[parked.name] = asyncio.get_running_loop().create_task(self._settle(parked))

    async def _settle(self, parked: Parked) -> None:
        """The driver knows better than the state file what has become of it."""
        still = await self.whole.settle(parked)
        if self.parked.get(parked.name) is not parked:
            return
        if still:
            if not parked.by_order:
                self._wishes.append(asyncio.get_running_loop().create_task(self._wish_for(parked)))
            return
        self.agent.log(f"{parked.name} runs: the last agent had not parked it, or had brought it back")
        self.parked.pop(parked.name)
        self.residency.parked.pop(parked.name, None)
        tenant = self.agent.registry.tenants.get(parked.name)
        if tenant is not None and self._gated(tenant):
            self.agent.broker.unsuspend(tenant)
        self.agent.save_now()

    async def _wish_for(self, parked: Parked) -> None:
        """A turn for one that made way for others: its stopped processes have no connection to ask for it."""
        while self.parked.get(parked.name) is parked and not parked.by_order:
            tenant = self.agent.registry.tenants.get(parked.name)
            if tenant is not None:
                self.agent.broker.wish(tenant)
            await asyncio.sleep(WISH_S)

    async def _settled(self, name: str) -> None:
        """What the last agent left is known before anything new is done with it."""
        if name in self._settling:
            await asyncio.wait({self._settling[name]})
            self._settling.pop(name, None)

    # -- for others ------------------------------------------------------------------------------------------------

    async def _park_for_others(self, tenant: Tenant) -> str | None:
        """For the residency: a tenant of kind `park` makes way. It comes back with its next turn."""
        try:
            parked = await self._checkpoint(tenant.name, tenant, LOCK_S, by_order=False)
        except (WorkError, InputError) as error:
            return str(error)
        self.parked[tenant.name] = parked
        self.agent.broker.unsuspend(tenant)
        self.agent.save_now()
        return None

    async def preempt(self, names: list[str], gpu: str | None, free_bytes: int | None) -> dict[str, Any]:
        """Free a GPU for a scheduler: these tenants, or on `gpu` as many as it takes, lowest priority first."""
        began = time.monotonic()
        if not names:
            if gpu is None:
                raise InputError("say whom to preempt, or on which GPU", field="--gpu")
            names = [tenant.name for tenant in movable_first(self.agent.registry.on_gpu(gpu))]
        for name in names:
            self._tenant(name)
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
        return bool(self.agent.mechanisms[tenant.spec.mechanism].capabilities.gated)

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

    def __contains__(self, name: object) -> bool:
        """Whether a tenant is away until it is resumed: nothing is promised to it meanwhile."""
        parked = self.parked.get(name) if isinstance(name, str) else None
        return parked is not None and parked.by_order

    def holds(self, tenant: Tenant) -> bool:
        """Whether a tenant is parked and a process of it lives."""
        parked = self.parked.get(tenant.name)
        return parked is not None and any(processes.alive(key) for key in parked.keys)

    def rows(self) -> list[dict[str, Any]]:
        """What is parked, and what may be, for the state file."""
        return [parked.as_dict() for parked in (self._under_way | self.parked).values()]

    def forget(self, tenant: Tenant) -> None:
        """A tenant has gone."""
        self.parked.pop(tenant.name, None)
        self.residency.forget(tenant)

    def close(self) -> None:
        """End the helper and all moves; what is parked stays parked and is in the state file."""
        for task in (*self._settling.values(), *self._wishes):
            task.cancel()
        self.residency.close()
        self.whole.close()
