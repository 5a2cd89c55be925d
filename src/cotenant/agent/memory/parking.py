"""Parks tenants and other CUDA programs (suspends them and keeps the contents of their GPU memory in host memory), and
resumes them.

The processes of a tenant with `oversubscribe: swap` or `managed` swap their own memory, which is fast and keeps their
contexts. All other programs are checkpointed completely by the driver (`checkpoints.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from cotenant.agent.memory.checkpoints import LOCK_S, Checkpoints, StateFile
from cotenant.agent.memory.parked import Parked, ParkedTable, movable_first
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.residents import MOVED_BY_PROCESS, Residents
from cotenant.agent.memory.space import SpaceMaker
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.core.errors import InputError, NothingToDoError, WorkError


class Parking:
    """Parks and resumes tenants and other programs."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        parked: ParkedTable,
        residency: Residency,
        residents: Residents,
        space: SpaceMaker,
        registry: Registry,
        broker: Broker,
        state: StateFile,
        relocate: Callable[[Tenant, str], None],
    ) -> None:
        """`relocate` moves a parked tenant to another GPU, or raises InputError."""
        self._checkpoints, self._parked, self._residency, self._residents = checkpoints, parked, residency, residents
        self._space, self._registry, self._broker, self._state = space, registry, broker, state
        self._relocate = relocate
        self._busy: set[str] = set()

    # -- parking ---------------------------------------------------------------------------------------------------

    async def park(self, name: str, timeout_s: float = LOCK_S) -> dict[str, Any]:
        """Park a tenant, or the process that the name `pid:N` means. Raises InputError if that is impossible, WorkError
        if it failed.
        """
        await self._checkpoints.settled(name)
        with self._alone(name):
            tenant = self._tenant(name)
            if name in self._parked:
                raise NothingToDoError(f"{name} is already parked", field="NAME")
            if tenant is not None and (fault := await self._residents.all_reported([tenant])):
                raise WorkError(f"{name} cannot be parked: {fault}")
            parked = self._parked.rows.get(name)
            if parked is not None and tenant is not None:
                # the tenant is evicted already and would be restored at its next turn, so it must get no turn until it
                # is resumed
                self._broker.suspend(tenant)
            else:
                began = time.monotonic()
                if tenant is not None and tenant.spec.oversubscribe in MOVED_BY_PROCESS:
                    parked = self._parked.rows[name] = await self._move_out(tenant, timeout_s)
                else:
                    parked = await self._checkpoints.take(name, tenant, timeout_s, by_order=True)
                parked.out_s = time.monotonic() - began
            parked.by_order = True
            self._state.save_now()
            return parked.as_dict()

    async def _move_out(self, tenant: Tenant, timeout_s: float) -> Parked:
        gpu = tenant.gpus[0].uuid
        # a tenant without processes can be parked, too; processes that start later must wait
        started = bool(tenant.sessions)
        await self._checkpoints.still(tenant, timeout_s)
        before = 0
        if self._registry.tenants.get(tenant.name) is tenant:
            before = self._residents.refresh(gpu).occupants[tenant.name].resident_bytes
            if not await self._residency.evacuate(tenant, gpu):
                self._broker.unsuspend(tenant)
                why = next(iter(reversed(tenant.warnings)), "the tenant cannot be evicted")
                raise WorkError(f"{tenant.name} could not be moved: {why}")
        if self._registry.tenants.get(tenant.name) is not tenant or (started and not tenant.sessions):
            # nothing is parked any more, so processes of the tenant that connect later may get turns
            self._broker.unsuspend(tenant)
            raise WorkError(f"{tenant.name} ended while it was being parked")
        return Parked(tenant.name, "swap", (gpu,), before)

    # -- resuming --------------------------------------------------------------------------------------------------

    async def resume(self, name: str, gpu: str | None = None, timeout_s: float = 60.0) -> dict[str, Any]:
        """Resume a parked tenant or program, on `gpu` if given. Raises InputError if it is not parked or cannot be
        resumed on `gpu`; WorkError if it is being parked or resumed already, or if restoring its memory failed: then it
        stays parked.
        """
        await self._checkpoints.settled(name)
        with self._alone(name):
            parked = self._parked.rows.get(name)
            if parked is None:
                parked_now = ", ".join(self._parked.rows) or "none"
                raise NothingToDoError(f"{name} is not parked; parked are: {parked_now}", field="NAME")
            target = self._target(parked, gpu)
            tenant = self._tenant(name)
            began = time.monotonic()
            if tenant is not None and (target is None or target in parked.gpus):
                self._registry.check_fits(tenant.spec, tenant.gpus)
            if tenant is None:
                await self._checkpoints.restore(parked, target)
            else:
                await self._bring(tenant, parked, target, timeout_s)
            self._parked.rows.pop(name, None)
            self._state.save_now()
            return {"name": name, "method": parked.method, "gpus": [target] if target else list(parked.gpus),
                    "seconds": time.monotonic() - began}  # fmt: skip

    async def _bring(self, tenant: Tenant, parked: Parked, target: str | None, timeout_s: float) -> None:
        """Make space by evicting other tenants, then restore a parked tenant's memory."""
        home = tenant.gpus[0].uuid
        if target is None or target == home:
            return await self._return(tenant, home, timeout_s)
        if parked.method != "checkpoint":
            raise InputError(
                f"{tenant.name} swaps its own memory and stays on its GPU; only checkpointed tenants can change GPUs"
            )
        try:
            self._relocate(tenant, target)
        except InputError as error:
            raise InputError(error.message, field="--gpu") from None
        try:
            await self._return(tenant, target, timeout_s)
        except WorkError:
            # a tenant that could not be restored on the new GPU still belongs to its old GPU
            if self._parked.checkpointed_bytes(tenant.name) is not None:
                self._relocate(tenant, home)
                if self._registry.gated(tenant):
                    self._broker.suspend(tenant)
            raise

    async def _return(self, tenant: Tenant, home: str, timeout_s: float) -> None:
        fault = await self._space.until(
            tenant,
            home,
            lambda: self._residency.make_space(tenant, home),
            timeout_s,
            lambda: not self._residency.refusal,
            hold_off=True,
        )
        if fault is not None:
            raise WorkError(f"{tenant.name} cannot be brought back: {fault}")
        self._broker.unsuspend(tenant)

    # -- for schedulers --------------------------------------------------------------------------------------------

    async def preempt(self, names: list[str], gpu: str | None, free_bytes: int | None) -> dict[str, Any]:
        """Free GPU memory for a scheduler: park the named tenants in this order, or, without names, the tenants on
        `gpu`, lowest priority first. Ends when `free_bytes` bytes have been freed; None: parks all of them.
        """
        began = time.monotonic()
        if not names:
            if gpu is None:
                raise InputError("give tenants to preempt, or a GPU", field="--gpu")
            names = [tenant.name for tenant in movable_first(self._registry.on_gpu(gpu))]
        for name in names:
            self._tenant(name)
        done: list[dict[str, Any]] = []
        failed: dict[str, str] = {}
        for name in names:
            if name in self._parked.rows or (
                free_bytes is not None and sum(p["freed_bytes"] for p in done) >= free_bytes
            ):
                continue
            try:
                done.append(await self.park(name))
            except (InputError, WorkError) as error:
                failed[name] = str(error)
        freed = sum(parked["freed_bytes"] for parked in done)
        return {"parked": done, "failed": failed, "freed_bytes": freed, "seconds": time.monotonic() - began,
                "enough": not failed if free_bytes is None else freed >= free_bytes}  # fmt: skip

    # -- checks ----------------------------------------------------------------------------------------------------

    def _target(self, parked: Parked, gpu: str | None) -> str | None:
        if gpu is None:
            return parked.gpus[0] if parked.gpus else None
        found = self._registry.gpu_named(gpu)
        home = self._registry.gpus[parked.gpus[0]] if parked.gpus else found
        if home.name != found.name:
            raise InputError(
                f"{parked.name} was parked on a {home.name} and can only return to one of those", field="--gpu"
            )
        return found.uuid

    def _tenant(self, name: str) -> Tenant | None:
        tenant = self._registry.tenants.get(name)
        if tenant is None and not name.startswith("pid:"):
            known = ", ".join(list(self._registry.tenants)[:20]) or "none"
            raise InputError(
                f"there is no tenant {name!r} (a process is named pid:N); there are: {known}", field="NAME"
            )
        return tenant

    @contextlib.contextmanager
    def _alone(self, name: str) -> Any:
        """Context manager that allows only one order at a time for a name. Raises WorkError for a second one."""
        if name in self._busy:
            raise WorkError(f"{name} is already being parked or resumed")
        self._busy.add(name)
        try:
            yield
        finally:
            self._busy.discard(name)
