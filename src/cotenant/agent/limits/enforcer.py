"""Tenants' memory limits: set on their control groups before their programs run, followed, watched, and cleared before
the groups go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cotenant.agent.limits.groups import NoGroupError, mark_of, new_group, own_group, place_group
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import ControlGroup, Tenant
from cotenant.core.errors import InputError
from cotenant.core.strength import Promise, Prospect, Strength
from cotenant.devices.base import Gpu
from cotenant.devices.cards import NO_LIMIT, Card
from cotenant.devices.cgroups import Hierarchy, delegate_down
from cotenant.devices.memory_limits import detect, words
from cotenant.devices.registry import device_of
from cotenant.policy.memory_limits import Detected, prospect

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
SHIM_ALONE = "its memory is limited by the shim in its processes alone"


@dataclass
class _Closing:
    """A group whose tenant has gone. Its limit holds until nothing is in it."""

    group: ControlGroup
    gpus: tuple[Gpu, ...]
    name: str
    named: set[int] = field(default_factory=set)


class MemoryLimits:
    """Limits of kernel or driver on the tenants of this node."""

    def __init__(self, folder: Path, registry: Registry, warn: Callable[[Tenant, str], None]) -> None:
        """`folder`: of the agent, which its groups are known by."""
        self._mark, self._registry, self._warn = mark_of(folder), registry, warn
        self._detected: dict[str, Detected] = {}
        self._closing: list[_Closing] = []
        self._in_force: dict[tuple[Path, str], int] = {}  # (group, GPU) -> hard limit as the driver reads it back
        self._outside: set[tuple[str, int]] = set()  # (tenant, process) that were named

    # -- what there is ---------------------------------------------------------------------------------------------

    def prospect(self, gpu: Gpu, *, swaps: bool = False) -> Prospect:
        """What would hold a new tenant of a GPU to its memory."""
        if gpu.uuid not in self._detected:
            self._detected[gpu.uuid] = detect(device_of(gpu), gpu)
        return prospect(self._detected[gpu.uuid], swaps=swaps)

    def of(self, tenant: Tenant, gpu: Gpu) -> Prospect:
        """What holds a tenant to its memory on a GPU now."""
        found = self.prospect(gpu, swaps=tenant.spec.oversubscribe != "none")
        if tenant.spec.memory_bytes is None:
            return Prospect(Promise.MEMORY, Strength.NOTHING, "no limit", "it has no limit on its memory")
        if tenant.held is not None or found.by is Strength.SHIM:
            return found
        why = tenant.held_not or f"{SHIM_ALONE}, because it was started without a limit on its memory"
        return Prospect(Promise.MEMORY, Strength.SHIM, "the shim's ledger", why, (why,))

    def tenant_in(self, pid: int) -> Tenant | None:
        """The tenant in whose group a process is."""
        for tenant in self._registry.tenants.values():
            if tenant.held is not None and self._is_in(tenant, pid):
                return tenant
        return None

    # -- a tenant's life -------------------------------------------------------------------------------------------

    def begin(self, tenant: Tenant, pid: int) -> None:
        """Before a tenant's program runs: its launcher goes into the tenant's group, which has its limits then."""
        if tenant.spec.memory_bytes is None:
            return
        swaps = tenant.spec.oversubscribe != "none"
        if any(self.prospect(gpu, swaps=swaps).by is Strength.SHIM for gpu in tenant.gpus):
            return
        before, tenant.held, tenant.held_not = tenant.held, None, ""
        try:
            tenant.held = self._group_of(tenant, pid, before)
            for gpu in tenant.gpus:
                self._set(tenant.held.path, gpu, tenant.cap_bytes(gpu))
        except (NoGroupError, OSError) as error:
            self._let_go(tenant)
            tenant.held_not = f"{SHIM_ALONE}, because {words(error)}"
            self._warn(tenant, tenant.held_not)

    def came(self, tenant: Tenant, pid: int) -> None:
        """A process of a tenant has connected, and has no memory yet: a pod or job has no launcher before it."""
        if tenant.owner is None or tenant.spec.memory_bytes is None:
            return
        with contextlib.suppress(OSError):
            hierarchy = device_of(tenant.gpus[0]).cgroups()
            if hierarchy is None or tenant.held is None or tenant.held.path != place_group(hierarchy.of(pid)):
                self.begin(tenant, pid)

    def follow(self, tenant: Tenant) -> None:
        """A tenant's promise has changed. InputError, and nothing changed, where the driver refuses the new limit."""
        if tenant.held is None:
            return
        done: list[tuple[Gpu, int | None]] = []
        for gpu in tenant.gpus:
            before = self._in_force.get((tenant.held.path, gpu.uuid))
            try:
                self._set(tenant.held.path, gpu, tenant.cap_bytes(gpu))
                done.append((gpu, before))
            except OSError as error:
                for other, limit_bytes in done:
                    with contextlib.suppress(OSError):
                        self._set(tenant.held.path, other, limit_bytes)
                raise InputError(self._refusal(tenant, gpu, error), field="--memory") from None

    def leave(self, tenant: Tenant, gpu: Gpu) -> None:
        """The tenant has moved to another GPU."""
        if tenant.held is not None:
            with contextlib.suppress(OSError):
                self._set(tenant.held.path, gpu, None)

    def end(self, tenant: Tenant) -> None:
        """The tenant is no more. Its limits are cleared, and a group made for it goes, when nothing is in it."""
        self._let_go(tenant)
        self._sweep()

    def take_back(self, tenant: Tenant, group: ControlGroup) -> None:
        """The last agent held this tenant by that group."""
        tenant.held = group
        with contextlib.suppress(InputError):  # what `look` finds different, it sets again
            self.follow(tenant)

    def clean(self, left: Iterable[ControlGroup]) -> None:
        """After a restart: `left` are groups of tenants that were not taken over; those made and not written down are
        found by their names."""
        gpus = tuple(self._registry.gpus.values())
        hierarchy = device_of(gpus[0]).cgroups()
        if hierarchy is None or hierarchy.version != 2:
            return
        used = {tenant.held.path for tenant in self._registry.tenants.values() if tenant.held is not None}
        made = [group for group in hierarchy.groups(hierarchy.root) if group.name.startswith(self._mark)]
        groups = {group.path: group for group in (*left, *(ControlGroup(path, True) for path in made))}
        for group in (group for path, group in groups.items() if path not in used):
            self._closing.append(_Closing(group, gpus, f"a tenant of the last agent ({group.path.name})"))
        self._sweep()

    # -- watching --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look after all limits for as long as the agent runs."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Set again what another program has changed, name processes that have left their tenant's group."""
        for tenant in list(self._registry.tenants.values()):
            if tenant.held is not None:
                for gpu in tenant.gpus:
                    self._check(tenant, gpu)
                for session in list(tenant.sessions):
                    self._check_place(tenant, session.peer.pid)
        self._sweep()

    def _check(self, tenant: Tenant, gpu: Gpu) -> None:
        held, wanted = tenant.held, tenant.cap_bytes(gpu)
        assert held is not None
        if wanted is None:
            return
        try:
            found = self._card(gpu).memory_limits(held.path).hard_bytes
            expected = self._in_force.get((held.path, gpu.uuid))
            if found == expected:
                return
            if expected is not None:
                text = "nothing" if found == NO_LIMIT else f"{found / 2**30:.2f} GiB"
                self._warn(
                    tenant,
                    "another program (root in its container, or a service of this node) changed what its control group"
                    f" is held to on GPU {gpu.index} from {expected / 2**30:.2f} GiB to {text}: set back",
                )
            self._set(held.path, gpu, wanted)
        except OSError as error:
            text = f"the limit of its control group on GPU {gpu.index} cannot be kept: {words(error)}"
            self._warn(tenant, text)

    def _check_place(self, tenant: Tenant, pid: int) -> None:
        if self._is_in(tenant, pid) or not os.path.exists(f"/proc/{pid}"):
            return
        assert tenant.held is not None
        if (tenant.name, pid) not in self._outside:
            self._outside.add((tenant.name, pid))
            self._warn(
                tenant,
                f"process {pid} left the tenant's control group, so that the limit on memory held for it no longer; it"
                " was put back, and what it took meanwhile is not counted",
            )
        with contextlib.suppress(OSError):
            self._hierarchy(tenant.gpus).enter(tenant.held.path, pid)

    def _sweep(self) -> None:
        """Clear and remove groups of tenants that have gone, once they are empty."""
        waiting = []
        for each in self._closing:
            hierarchy = self._hierarchy(each.gpus)
            try:
                left = [pid for group in hierarchy.groups(each.group.path) for pid in hierarchy.processes(group)]
                if left and each.group.made:
                    waiting.append(each)
                    continue
                for gpu in each.gpus:
                    self._set(each.group.path, gpu, None)  # first: ancestors keep what a removed group had
                if each.group.made:
                    hierarchy.remove(each.group.path)
            except OSError as error:
                if each.group.path.exists():
                    LOG.warning(f"the control group {each.group.path} of {each.name} is not cleared: {error}")
        self._closing = waiting

    # -- one group -------------------------------------------------------------------------------------------------

    def _group_of(self, tenant: Tenant, pid: int, before: ControlGroup | None) -> ControlGroup:
        """The group of a tenant, with the process in it. NoGroupError, OSError."""
        hierarchy = self._hierarchy(tenant.gpus)
        if before is not None and before.made and before.path.exists():
            hierarchy.enter(before.path, pid)
            return before
        taken = {t.held.path for t in self._registry.tenants.values() if t.held is not None}
        if tenant.owner is not None:
            own: Path | None = place_group(hierarchy.of(pid)) or hierarchy.of(pid)
            if own in taken or own == hierarchy.root:
                raise NoGroupError(f"its processes have no control group of their own ({own})")
        else:
            own = own_group(hierarchy, pid, taken)
        group = own or new_group(hierarchy, pid, self._mark, tenant.name)
        if self._detected[tenant.gpus[0].uuid].dmem:
            delegate_down(hierarchy, group, "dmem")
        if own is None:
            hierarchy.create(group)
            hierarchy.enter(group, pid)
        return ControlGroup(group, own is None)

    def _let_go(self, tenant: Tenant) -> None:
        if tenant.held is not None:
            self._closing.append(_Closing(tenant.held, tenant.gpus, tenant.name))
            tenant.held = None
        self._outside = {(name, pid) for name, pid in self._outside if name != tenant.name}

    def _set(self, group: Path, gpu: Gpu, limit_bytes: int | None) -> None:
        # soft as hard: a strict part of the card, none of which the driver lends to others
        soft, hard = (0, NO_LIMIT) if limit_bytes is None else (limit_bytes, limit_bytes)
        card = self._card(gpu)
        card.set_memory_limits(group, soft, hard)
        self._in_force.pop((group, gpu.uuid), None)
        if limit_bytes is not None:
            self._in_force[group, gpu.uuid] = card.memory_limits(group).hard_bytes  # a driver may round

    def _refusal(self, tenant: Tenant, gpu: Gpu, error: OSError) -> str:
        assert tenant.held is not None
        used = ""
        with contextlib.suppress(OSError):
            used = f", where it holds {self._card(gpu).memory_limits(tenant.held.path).used_bytes / 2**30:.2f} GiB"
        return f"the new limit on the memory of {tenant.name} on GPU {gpu.index}{used} was refused: {words(error)}"

    def _is_in(self, tenant: Tenant, pid: int) -> bool:
        assert tenant.held is not None
        try:
            return self._hierarchy(tenant.gpus).of(pid).is_relative_to(tenant.held.path)
        except OSError:
            return False

    @staticmethod
    def _card(gpu: Gpu) -> Card:
        card = device_of(gpu).card(gpu.uuid)
        if card is None:
            raise OSError(f"GPU {gpu.index} does not answer")
        return card

    @staticmethod
    def _hierarchy(gpus: tuple[Gpu, ...]) -> Hierarchy:
        hierarchy = device_of(gpus[0]).cgroups()
        if hierarchy is None:
            raise OSError("there are no control groups here")
        return hierarchy
