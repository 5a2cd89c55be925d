"""Parks tenants and other CUDA programs (suspends them and keeps the contents of their GPU memory in host memory), and
resumes them.

The processes of a tenant with `oversubscribe: swap` or `managed` swap their own memory, which is fast and keeps their
contexts. All other programs are checkpointed completely by the driver (`checkpoints.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cotenant.agent.memory.checkpoints import LOCK_S, Checkpoints, StateFile
from cotenant.agent.memory.parked import Parked, ParkedTable, movable_first
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.residents import MOVED_BY_PROCESS, Residents
from cotenant.agent.memory.space import SpaceMaker
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.agent.turns.hold import PARKED, RETRY
from cotenant.core.errors import InputError, NothingToDoError, WorkError

LOG = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25  # time between two checks whether parked tenants have memory on their GPUs
MOST_ROUNDS = 5  # how often a tenant that is parked is evicted at most, if it allocates memory meanwhile


@dataclass(frozen=True)
class _Leaving:
    """A suspended tenant whose turn has ended and whose memory is to be evicted. `started`: whether it had processes;
    `size`: bytes that it had on its GPU; `waited_s`: time in seconds until its turn had ended; `until_s`: the time of
    the monotonic clock until which its GPU work is waited for.
    """

    tenant: Tenant
    started: bool
    size: int
    waited_s: float
    until_s: float


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
            parked = await self._park(name, timeout_s)
            self._state.save_now()
            return parked.as_dict()

    async def _park(self, name: str, timeout_s: float) -> Parked:
        tenant = self._tenant(name)
        if name in self._parked:
            raise NothingToDoError(f"{name} is already parked", field="NAME")
        await self._reported(tenant)
        parked = self._parked.rows.get(name)
        if parked is not None and tenant is not None:
            # the tenant is evicted already and would be restored at its next turn, so it must get no turn until it is
            # resumed
            self._broker.suspend(tenant)
        else:
            began = time.monotonic()
            if tenant is not None and tenant.spec.oversubscribe in MOVED_BY_PROCESS:
                parked = self._parked.rows[name] = await self._move_out(await self._stilled(tenant, timeout_s))
            else:
                parked = await self._checkpoints.take(name, tenant, timeout_s, by_order=True)
            parked.out_s = time.monotonic() - began
        parked.by_order = True
        return parked

    async def _reported(self, tenant: Tenant | None) -> None:
        """Wait until all memory of a tenant that is to be parked is known. Raises WorkError if it stays unknown."""
        if tenant is not None and (fault := await self._residents.all_reported([tenant])):
            raise WorkError(f"{tenant.name} cannot be parked: {fault}")

    async def _stilled(self, tenant: Tenant, timeout_s: float) -> _Leaving:
        """Suspend a tenant, and wait for the end of its turn."""
        began = time.monotonic()
        # a tenant without processes can be parked, too; processes that start later must wait
        started = bool(tenant.sessions)
        await self._checkpoints.still(tenant, timeout_s)
        size = 0
        if self._registry.tenants.get(tenant.name) is tenant:
            size = self._residents.refresh(tenant.gpus[0].uuid).occupants[tenant.name].resident_bytes
        return _Leaving(tenant, started, size, time.monotonic() - began, began + timeout_s)

    async def _move_out(self, leaving: _Leaving) -> Parked:
        """Evict what a suspended tenant still has on its GPU. If that fails, the tenant may have turns again."""
        tenant = leaving.tenant
        gpu = tenant.gpus[0].uuid
        there = self._registry.tenants.get(tenant.name) is tenant
        if there and not await self._evacuated(tenant, gpu, leaving.until_s):
            self._broker.unsuspend(tenant)
            why = next(iter(reversed(tenant.warnings)), "the tenant cannot be evicted")
            if self._residency.is_busy(tenant):
                why = "GPU work that one of its processes launched while no agent ran has not ended"
            raise WorkError(f"{tenant.name} could not be moved: {why}")
        if self._registry.tenants.get(tenant.name) is not tenant or (leaving.started and not tenant.sessions):
            # nothing is parked any more, so processes of the tenant that connect later may get turns
            self._broker.unsuspend(tenant)
            raise WorkError(f"{tenant.name} ended while it was being parked")
        return Parked(tenant.name, "swap", (gpu,), leaving.size)

    async def _evacuated(self, tenant: Tenant, gpu: str, until_s: float) -> bool:
        """Evict a tenant, also memory that it was allocating when the eviction began. Returns whether that succeeded.

        After a restart of the agent, a process refuses to evict memory until its work of the time without an agent has
        ended. It is waited for until `until_s`, a time of the monotonic clock.
        """
        for _ in range(MOST_ROUNDS):
            evict = partial(self._residency.evacuate, tenant, gpu)
            if not await self._residency.while_busy(tenant, evict, until_s):
                return False
            if not self._residents.here_bytes(tenant, gpu):
                break
        return True

    # -- resuming --------------------------------------------------------------------------------------------------

    async def resume(
        self, name: str, gpu: str | None = None, timeout_s: float = 60.0, instead_of: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Resume a parked tenant or program, on `gpu` if given. Raises InputError if it is not parked or cannot be
        resumed on `gpu`; WorkError if it is being parked or resumed already, or if restoring its memory failed: then it
        stays parked.

        Tenants in `instead_of` are parked, while it returns if that is possible, and stay parked if its return fails.
        The answer then has those that are parked (`parked`), and why others are not (`failed`).
        """
        if name in instead_of or len(set(instead_of)) < len(instead_of):
            raise InputError("each tenant can be named only once", field="instead_of")
        for each in (name, *instead_of):
            await self._checkpoints.settled(each)
        with self._alone(name, *instead_of):
            parked = self._parked.rows.get(name)
            if parked is None:
                parked_now = ", ".join(self._parked.rows) or "none"
                raise NothingToDoError(f"{name} is not parked; parked are: {parked_now}", field="NAME")
            target = self._target(parked, gpu)
            tenant = self._tenant(name)
            began = time.monotonic()
            if tenant is not None and (target is None or target in parked.gpus):
                self._registry.check_fits(tenant.spec, tenant.gpus, without=instead_of)
            rows, failed = await self._make_way(tenant, parked, target, instead_of)
            if tenant is None:
                await self._checkpoints.restore(parked, target)
            else:
                # no space is waited for that a tenant that cannot be parked keeps
                await self._bring(tenant, parked, target, timeout_s if not failed else 0.0)
            self._parked.rows.pop(name, None)
            self._state.save_now()
            found = {"name": name, "method": parked.method, "gpus": [target] if target else list(parked.gpus),
                     "seconds": time.monotonic() - began}  # fmt: skip
            return found | ({"parked": [row.as_dict() for row in rows], "failed": failed} if instead_of else {})

    async def _make_way(
        self, tenant: Tenant | None, parked: Parked, target: str | None, names: Sequence[str]
    ) -> tuple[list[Parked], dict[str, str]]:
        """Park tenants for one that is to be resumed. Returns the parked ones, and why others are not parked.

        Tenants whose processes swap their own memory leave the GPU while the memory of `tenant` returns, if its
        processes do so, too. The others are parked before.
        """
        home = tenant.gpus[0].uuid if tenant is not None and parked.method == "swap" else None
        rows: list[Parked] = []
        failed: dict[str, str] = {}
        together: list[Tenant] = []
        for name in names:
            other = self._registry.tenants.get(name)
            if other is not None and home is not None and target in (None, home) and self._swaps_on(other, home):
                together.append(other)
                continue
            try:
                rows.append(await self._park(name, LOCK_S))
            except NothingToDoError:
                rows.append(self._parked.rows[name])
            except InputError as error:
                failed[name] = error.message
            except WorkError as error:
                failed[name] = str(error)
        stilled = await asyncio.gather(*map(self._ready_to_leave, together), return_exceptions=True)
        leaving = [found for found in stilled if isinstance(found, _Leaving)]
        failed |= {o.name: str(e) for o, e in zip(together, stilled, strict=True) if isinstance(e, BaseException)}
        if leaving and tenant is not None and home is not None:
            counts = [self._residents.count(each.tenant.name) for each in leaving]
            before = [count.elapsed_ns for count in counts]
            # if this fails, the victims are evicted below, and the return is tried again afterwards
            try:
                fault = await self._residency.make_space(tenant, home, leave=[each.tenant.name for each in leaving])
            except Exception as error:  # if the agent fails here, the victims must not stay suspended for ever
                fault = f"the agent failed: {error!r}"
            LOG.info(f"{tenant.name} returns instead of {', '.join(names)}: {fault or 'all memory was moved'}")
            for each, count, began_ns in zip(leaving, counts, before, strict=True):
                try:
                    self._check_answering(each.tenant)
                    row = self._parked.rows[each.tenant.name] = await self._move_out(each)
                except WorkError as error:
                    failed[each.tenant.name] = str(error)
                    continue
                row.out_s, row.by_order = each.waited_s + (count.elapsed_ns - began_ns) / 1e9, True
                rows.append(row)
        if names:
            self._state.save_now()
        return rows, failed

    def _swaps_on(self, tenant: Tenant, gpu: str) -> bool:
        """Whether a tenant that is not parked can leave this GPU while another one returns."""
        mine = tenant.gpus[0].uuid == gpu and tenant.spec.oversubscribe in MOVED_BY_PROCESS
        return mine and tenant.name not in self._parked

    def _check_answering(self, tenant: Tenant) -> None:
        """Raise WorkError, and let a suspended tenant have turns, if one of its processes did not answer an order."""
        if self._residents.mute.intersection(session.number for session in tenant.sessions):
            self._broker.unsuspend(tenant)
            raise WorkError(f"{tenant.name} could not be moved: one of its processes does not answer")

    async def _ready_to_leave(self, tenant: Tenant) -> _Leaving:
        await self._reported(tenant)
        return await self._stilled(tenant, LOCK_S)

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
        for why in (PARKED, RETRY):
            self._broker.unsuspend(tenant, why)

    # -- after a restart of the agent ------------------------------------------------------------------------------

    def expect(self, rows: list[dict[str, Any]]) -> None:
        """Count tenants as parked before they are admitted again: others may have been given their GPU memory."""
        self._checkpoints.expect(rows)

    def take_over(self) -> None:
        """Take over tenants and processes that the previous agent had parked or was parking. What parked tenants have
        restored while no agent ran, as the setting `fail: open` lets them, is evicted again.
        """
        self._checkpoints.take_over()
        for parked in self._parked.rows.values():
            if parked.by_order and parked.method == "swap":
                self._checkpoints.settles(parked.name, self._evict_again(parked))

    async def run(self) -> None:
        """Evict what parked tenants have on their GPUs after all: memory that a process was about to allocate when its
        tenant was parked, and that of a process which came back to a restarted agent later than others.
        """
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            for parked in list(self._parked.rows.values()):
                tenant = self._registry.tenants.get(parked.name)
                swapped = parked.by_order and parked.method == "swap" and parked.name not in self._busy
                if tenant is None or not swapped or time.monotonic() < parked.quiet_until_s:
                    continue
                if self._residents.here_bytes(tenant, parked.gpus[0]) and not self._checkpoints.settling(parked.name):
                    self._checkpoints.settles(parked.name, self._evict_again(parked))

    async def _evict_again(self, parked: Parked) -> None:
        tenant, gpu = self._registry.tenants[parked.name], parked.gpus[0]
        fault = await self._residents.all_reported([tenant])
        here = fault is None and self._residents.here_bytes(tenant, gpu) > 0
        if here and not await self._evacuated(tenant, gpu, time.monotonic() + LOCK_S):
            fault = f"it was not evicted within {LOCK_S:g} s"
        if fault is not None:
            parked.quiet_until_s = time.monotonic() + LOCK_S
            tenant.warn(f"the tenant is parked, but memory that it allocated or restored later is on the GPU: {fault}")

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
    def _alone(self, *names: str) -> Any:
        """Context manager that allows only one order at a time for each name. Raises WorkError for a second one."""
        for name in names:
            if name in self._busy:
                raise WorkError(f"{name} is already being parked or resumed")
        self._busy.update(names)
        try:
            yield
        finally:
            self._busy.difference_update(names)
