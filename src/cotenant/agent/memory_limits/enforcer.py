"""Limits the GPU memory of tenants' control groups (cgroups), by the kernel or the GPU's driver.

The agent sets a limit before the tenant's program runs, changes it with the tenant, restores it when another program
changed it, and clears it before the group is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cotenant.agent.memory_limits.groups import NoGroupError, mark_of, new_group, own_group, place_group
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import ControlGroup, Tenant
from cotenant.core.errors import InputError
from cotenant.core.strength import Promise, Prospect, Strength
from cotenant.core.units import format_bytes
from cotenant.devices.base import Gpu
from cotenant.devices.cards import NO_LIMIT, Card
from cotenant.devices.cgroups import Hierarchy, delegate_down
from cotenant.devices.memory_limit_probe import detect, words
from cotenant.devices.registry import device_of
from cotenant.policy.memory_limits import Detected, prospect

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
SHIM_ALONE = "the tenant's memory is limited only by the shim in its processes"


def card_of(gpu: Gpu) -> Card:
    """A GPU's NVML handle. Raises OSError if it does not respond."""
    card = device_of(gpu).card(gpu.uuid)
    if card is None:
        raise OSError(f"GPU {gpu.index} does not respond")
    return card


def find(gpu: Gpu) -> Detected:
    """Find what the kernel and the driver of a GPU offer to enforce memory limits."""
    return detect(device_of(gpu), gpu)


_Key = tuple[Path, str]  # (group, UUID of the GPU)


def _too_weak(tenant: Tenant, why: str) -> InputError:
    demanded = tenant.spec.enforce_memory
    by = f"by the {demanded}" if demanded is Strength.KERNEL else f"by the {demanded} or something stronger"
    return InputError(
        f"the memory of {tenant.name} must be limited {by}, which is not possible: {why}; see cotenant doctor",
        field="--enforce-memory",
    )


@dataclass
class _Closing:
    """A control group whose tenant has ended. Its limit stays until the group is empty."""

    group: ControlGroup
    gpus: tuple[Gpu, ...]
    name: str


class MemoryLimits:
    """Memory limits by kernel or driver for the tenants of this node."""

    def __init__(
        self,
        folder: Path,
        registry: Registry,
        warn: Callable[[Tenant, str], None],
        *,
        find: Callable[[Gpu], Detected] = find,
        card: Callable[[Gpu], Card] = card_of,
    ) -> None:
        """`folder`: the agent's folder; names of groups that the agent creates begin with its hash."""
        self._find, self._card = find, card
        self._mark, self._registry, self._warn = mark_of(folder), registry, warn
        self._detected: dict[str, Detected] = {}
        self._closing: list[_Closing] = []
        self._in_force: dict[_Key, int] = {}  # (group, GPU) -> hard limit that the driver has confirmed
        # processes outside their tenant's group that were reported already, as (tenant, pid)
        self._outside: set[tuple[str, int]] = set()

    # -- what there is ---------------------------------------------------------------------------------------------

    def prospect(self, gpu: Gpu, *, swaps: bool = False) -> Prospect:
        """What would enforce the memory limit of a new tenant on a GPU."""
        if gpu.uuid not in self._detected:
            self._detected[gpu.uuid] = self._find(gpu)
        found, mine = self._detected[gpu.uuid], tuple(f"{path}:" for path in self._held())
        return prospect(replace(found, foreign=tuple(t for t in found.foreign if not t.startswith(mine))), swaps=swaps)

    def of(self, tenant: Tenant, gpu: Gpu) -> Prospect:
        """What currently enforces a tenant's memory limit on a GPU."""
        found = self.prospect(gpu, swaps=tenant.spec.oversubscribe != "none")
        if tenant.spec.memory_bytes is None:
            return Prospect(Promise.MEMORY, Strength.NOTHING, "no limit", "the tenant has no memory limit")
        if tenant.held is not None or found.by is Strength.SHIM:
            return found
        why = tenant.held_not or f"{SHIM_ALONE}, because the tenant was started without a memory limit"
        return Prospect(Promise.MEMORY, Strength.SHIM, "the shim's ledger", why, (why,))

    def check(self, tenant: Tenant) -> None:
        """Raise InputError if the tenant's memory limit would be enforced less strongly than demanded."""
        for gpu in tenant.gpus:
            found = self.prospect(gpu, swaps=tenant.spec.oversubscribe != "none")
            if not found.by.at_least(tenant.spec.enforce_memory):
                raise _too_weak(tenant, f"memory on GPU {gpu.index} is limited by the {found.by}: {found.why}")

    def tenant_in(self, pid: int) -> Tenant | None:
        """The tenant in whose control group a process is."""
        held = self._held()
        if not held:
            return None
        try:
            group = self._hierarchy(tuple(self._registry.gpus.values())).of(pid)
        except OSError:
            return None
        return next((held[path] for path in (group, *group.parents) if path in held), None)

    # -- a tenant's life -------------------------------------------------------------------------------------------

    def begin(self, tenant: Tenant, pid: int) -> None:
        """Limit the tenant's control group and move its launcher there. Called before the tenant's program runs. Raises
        InputError if the limit cannot be enforced as strongly as the tenant demands.
        """
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
        except InputError:
            tenant.held = before
            raise
        except (NoGroupError, OSError) as error:
            self._let_go(tenant)
            if not Strength.SHIM.at_least(tenant.spec.enforce_memory):
                raise _too_weak(tenant, words(error)) from None
            tenant.held_not = f"{SHIM_ALONE}, because {words(error)}"
            self._say(tenant, tenant.held_not)

    def came(self, tenant: Tenant, pid: int) -> None:
        """Limit the control group of a process that has just connected. Needed for tenants of pods and jobs, which are
        not started by a launcher.
        """
        if tenant.owner is None or tenant.spec.memory_bytes is None:
            return
        with contextlib.suppress(OSError):
            hierarchy = device_of(tenant.gpus[0]).cgroups()
            if hierarchy is None or tenant.held is None or tenant.held.path != place_group(hierarchy.of(pid)):
                self.begin(tenant, pid)

    def follow(self, tenant: Tenant) -> None:
        """Apply a changed memory limit. Raises InputError, with nothing changed, if the driver refuses the limit."""
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
        """Clear the limit on a GPU that the tenant has left."""
        if tenant.held is not None:
            with contextlib.suppress(OSError):
                self._set(tenant.held.path, gpu, None)

    def end(self, tenant: Tenant) -> None:
        """Let go of a removed tenant's control group. When the group is empty, its limits are cleared; it is removed if
        the agent created it.
        """
        self._let_go(tenant)
        self._sweep()

    def take_back(self, tenant: Tenant, group: ControlGroup) -> None:
        """Take over the control group that the previous agent used for this tenant."""
        tenant.held = group
        # if a limit cannot be set now, the next check finds the difference and sets it
        with contextlib.suppress(InputError):
            self.follow(tenant)

    def clean(self, left: Iterable[ControlGroup]) -> None:
        """Clear and remove control groups that the previous agent left and no tenant uses. `left`: the groups in its
        state file; others that it created are found by name.
        """
        gpus = tuple(self._registry.gpus.values())
        hierarchy = device_of(gpus[0]).cgroups()
        if hierarchy is None or hierarchy.version != 2:
            return
        used = {tenant.held.path for tenant in self._registry.tenants.values() if tenant.held is not None}
        made = [group for group in hierarchy.groups(hierarchy.root) if group.name.startswith(self._mark)]
        groups = {group.path: group for group in (*left, *(ControlGroup(path, True) for path in made))}
        for group in (group for path, group in groups.items() if path not in used):
            self._closing.append(_Closing(group, gpus, f"a tenant of the previous agent ({group.path.name})"))
        self._sweep()

    # -- watching --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Maintain all limits as long as the agent runs."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # the driver is queried in a thread, so that the event loop can grant turns meanwhile
            wanted = self._wanted()
            self._judge(wanted, await asyncio.to_thread(self._read, wanted))

    def look(self) -> None:
        """Restore limits that another program changed, and report processes that left their tenant's group."""
        wanted = self._wanted()
        self._judge(wanted, self._read(wanted))

    def _wanted(self) -> dict[_Key, int]:
        """The limits that the driver should report."""
        return {key: limit for key, limit in self._in_force.items() if key[0] in self._held()}

    def _read(self, keys: Iterable[_Key]) -> dict[_Key, int | str]:
        """The limits that the driver reports; if it does not report one, the error in words."""
        found: dict[_Key, int | str] = {}
        for path, uuid in keys:
            try:
                found[path, uuid] = self._card(self._registry.gpus[uuid]).memory_limits(path).hard_bytes
            except OSError as error:
                found[path, uuid] = words(error)
        return found

    def _judge(self, wanted: Mapping[_Key, int], found: Mapping[_Key, int | str]) -> None:
        held = self._held()
        for key, expected in wanted.items():
            tenant = held.get(key[0])
            if tenant is not None and found[key] != expected and self._in_force.get(key) == expected:
                self._set_back(tenant, self._registry.gpus[key[1]], expected, found[key])
        for tenant in held.values():
            for session in list(tenant.sessions):
                self._check_place(tenant, session.peer.pid)
        self._sweep()

    def _set_back(self, tenant: Tenant, gpu: Gpu, expected: int, found: int | str) -> None:
        assert tenant.held is not None
        text = "nothing" if found == NO_LIMIT else found if isinstance(found, str) else f"{found / 2**30:.2f} GiB"
        self._say(
            tenant,
            "another program (root in the tenant's container, or a service of this node) changed the memory limit "
            f"of the tenant's control group on GPU {gpu.index} from {expected / 2**30:.2f} GiB to {text}: it was "
            "restored",
        )
        try:
            self._set(tenant.held.path, gpu, tenant.cap_bytes(gpu))
        except OSError as error:
            self._say(tenant, f"the tenant's memory limit on GPU {gpu.index} cannot be restored: {words(error)}")

    def _check_place(self, tenant: Tenant, pid: int) -> None:
        if self._is_in(tenant, pid) or not os.path.exists(f"/proc/{pid}"):
            return
        assert tenant.held is not None
        if (tenant.name, pid) not in self._outside:
            self._outside.add((tenant.name, pid))
            self._say(
                tenant,
                f"process {pid} left the tenant's control group and thereby its memory limit; it was moved "
                "back, but what it allocated meanwhile is not counted",
            )
        with contextlib.suppress(OSError):
            self._hierarchy(tenant.gpus).enter(tenant.held.path, pid)

    def _sweep(self) -> None:
        """Clear and remove groups of ended tenants once they are empty."""
        self._closing = [each for each in self._closing if each.group.path.exists() and not self._closed(each)]

    def _closed(self, each: _Closing) -> bool:
        """Clear a control group's limits if it is empty, and remove it. A group that the agent did not create is not
        removed; its limits are cleared when no process in it uses the GPU. Returns whether that is done.
        """
        hierarchy, path = self._hierarchy(each.gpus), each.group.path
        try:
            left = {pid for group in hierarchy.groups(path) for pid in hierarchy.processes(group)}
            if not each.group.made:
                using = device_of(each.gpus[0]).processes(gpu.uuid for gpu in each.gpus)
                left = {pid for pids in using.values() for pid in pids if hierarchy.of(pid).is_relative_to(path)}
            if left:
                return False
            for gpu in each.gpus:
                # the limits are removed first, because memory that a removed group still has is charged to its parent
                self._set(path, gpu, None)
        except OSError as error:
            LOG.warning(f"the control group {path} of {each.name} could not be cleared: {words(error)}")
        if each.group.made:
            with contextlib.suppress(OSError):
                hierarchy.remove(path)
        return True

    # -- one group -------------------------------------------------------------------------------------------------

    def _group_of(self, tenant: Tenant, pid: int, before: ControlGroup | None) -> ControlGroup:
        """Find or create the control group of a tenant, and move the process there. Raises NoGroupError, OSError."""
        hierarchy = self._hierarchy(tenant.gpus)
        if before is not None and before.path.exists():
            if before.made:
                hierarchy.enter(before.path, pid)
            elif tenant.pids and not hierarchy.of(pid).is_relative_to(before.path):
                text = f"process {pid} joined from another control group: only the shim limits its memory"
                if not Strength.SHIM.at_least(tenant.spec.enforce_memory):
                    raise _too_weak(tenant, text)
                self._say(tenant, text)
            if before.made or tenant.pids:
                return before
        taken = self._held()
        if tenant.owner is not None:
            own: Path | None = place_group(hierarchy.of(pid)) or hierarchy.of(pid)
            if own in taken or own == hierarchy.root:
                raise NoGroupError(f"the tenant's processes have no control group of their own ({own})")
        else:
            own = own_group(hierarchy, pid, taken)
        group = own or new_group(hierarchy, pid, self._mark, tenant.name)
        if self._detected[tenant.gpus[0].uuid].dmem:
            delegate_down(hierarchy, group, "dmem")
        if own is None:
            hierarchy.create(group)
            try:
                hierarchy.enter(group, pid)
            except OSError:
                hierarchy.remove(group)
                raise
        self._closing = [each for each in self._closing if each.group.path != group]
        return ControlGroup(group, own is None)

    def _held(self) -> dict[Path, Tenant]:
        return {tenant.held.path: tenant for tenant in self._registry.tenants.values() if tenant.held is not None}

    def _say(self, tenant: Tenant, text: str) -> None:
        if text not in tenant.warnings:  # a condition that persists is reported only once
            self._warn(tenant, text)

    def _let_go(self, tenant: Tenant) -> None:
        if tenant.held is not None:
            self._closing.append(_Closing(tenant.held, tenant.gpus, tenant.name))
            tenant.held = None
        self._outside = {(name, pid) for name, pid in self._outside if name != tenant.name}

    def _set(self, group: Path, gpu: Gpu, limit_bytes: int | None) -> None:
        # the soft limit equals the hard one, so that the driver does not lend the tenant's unused memory to other
        # groups
        soft, hard = (0, NO_LIMIT) if limit_bytes is None else (limit_bytes, limit_bytes)
        card = self._card(gpu)
        card.set_memory_limits(group, soft, hard)
        self._in_force.pop((group, gpu.uuid), None)
        if limit_bytes is not None:
            self._in_force[group, gpu.uuid] = card.memory_limits(group).hard_bytes  # the driver may round the limit

    def _refusal(self, tenant: Tenant, gpu: Gpu, error: OSError) -> str:
        wanted, used = tenant.cap_bytes(gpu), self.used_bytes(tenant, gpu)
        if wanted is not None and used > wanted:
            return (
                f"{tenant.name} uses {format_bytes(used)} of GPU {gpu.index}, contexts included, so the driver refuses "
                f"a limit of {format_bytes(wanted)}, and the old one stays: free memory first, or set a larger one"
            )
        return f"the new memory limit of {tenant.name} on GPU {gpu.index} was refused: {words(error)}"

    def used_bytes(self, tenant: Tenant, gpu: Gpu) -> int:
        """Memory that kernel or driver count for a tenant on a GPU, contexts included; 0 if they do not limit it."""
        if tenant.held is not None:
            with contextlib.suppress(OSError):
                return self._card(gpu).memory_limits(tenant.held.path).used_bytes
        return 0

    def _is_in(self, tenant: Tenant, pid: int) -> bool:
        assert tenant.held is not None
        try:
            return self._hierarchy(tenant.gpus).of(pid).is_relative_to(tenant.held.path)
        except OSError:
            return False

    @staticmethod
    def _hierarchy(gpus: tuple[Gpu, ...]) -> Hierarchy:
        hierarchy = device_of(gpus[0]).cgroups()
        if hierarchy is None:
            raise OSError(f"the driver of GPU {gpus[0].index} has no limits for control groups")
        return hierarchy
