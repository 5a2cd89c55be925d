"""Limits the GPU memory of tenants' control groups (cgroups), by the kernel or the GPU's driver.

The agent sets a limit before the tenant's program runs, changes it when the tenant's limit changes, restores it when
another program changed it, and clears it before the group is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from cotenant.agent import processes
from cotenant.agent.memory_limits.applied import Applied
from cotenant.agent.memory_limits.closing import Closings, Users
from cotenant.agent.memory_limits.groups import (
    NoGroupError,
    hierarchy_of,
    in_container,
    mark_of,
    new_group,
    own_group,
    place_group,
)
from cotenant.agent.memory_limits.watch import SHIM_ALONE, Watch, held_by
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import ControlGroup, Tenant
from cotenant.core.background import spawn
from cotenant.core.cgroups import delegate_down
from cotenant.core.errors import InputError
from cotenant.core.strength import Promise, Prospect, Strength
from cotenant.core.units import format_bytes
from cotenant.devices.base import Gpu
from cotenant.devices.cards import Card
from cotenant.devices.group_limits import reason_of
from cotenant.devices.memory_limit_probe import detect
from cotenant.devices.registry import device_of
from cotenant.policy.memory_limits import Detected, by_shim, prospect


def card_of(gpu: Gpu) -> Card:
    """Return NVML's handle of a GPU. Raises OSError if the GPU does not respond."""
    card = device_of(gpu).card(gpu.uuid)
    if card is None:
        raise OSError(f"GPU {gpu.index} does not respond")
    return card


def find(gpu: Gpu) -> Detected:
    """Find what the kernel and the driver of a GPU offer to enforce memory limits."""
    return detect(device_of(gpu), gpu)


def _too_weak(tenant: Tenant, why: str) -> InputError:
    demanded = tenant.spec.enforce_memory
    by = f"by the {demanded}" if demanded is Strength.KERNEL else f"by the {demanded} or something stronger"
    return InputError(
        f"the memory of {tenant.name} must be limited {by}, which is not possible: {why}; see cotenant doctor",
        field="--enforce-memory",
    )


class MemoryLimits:
    """Memory limits by kernel or driver for the tenants of this node."""

    def __init__(
        self,
        folder: Path,
        registry: Registry,
        warn: Callable[[Tenant, str], None],
        save: Callable[[], object] = lambda: None,
        *,
        find: Callable[[Gpu], Detected] = find,
        card: Callable[[Gpu], Card] = card_of,
    ) -> None:
        """`folder`: the agent's folder; a hash of its path is part of the names of the control groups that the agent
        creates. `save` writes the state file at once. That file lists the control groups of tenants, and those of ended
        tenants that are not closed yet (`closing`).
        """
        self._find, self._save = find, save
        self._mark, self._registry = mark_of(folder), registry
        self._detected: dict[str, Detected] = {}
        self._applied = Applied(card)
        self._closings = Closings(self._applied, hierarchy_of)
        self._sweeps: set[asyncio.Task[None]] = set()
        self._watch = Watch(registry, self._applied, self._detected, warn, self._closings, self._sweep)

    # -- what enforces limits --------------------------------------------------------------------------------------

    def prospect(self, gpu: Gpu, tenant: Tenant | None = None) -> Prospect:
        """Return what would enforce the memory limit of a tenant that starts on a GPU. `tenant` None: a tenant that is
        not swapped.
        """
        if gpu.uuid not in self._detected:
            self._detected[gpu.uuid] = self._find(gpu)
            self._own({*held_by(self._registry), *(group.path for group in self._closings.groups())})
        swaps = tenant is not None and tenant.spec.oversubscribe != "none"
        return prospect(self._detected[gpu.uuid], swaps=swaps)

    def of(self, tenant: Tenant, gpu: Gpu) -> Prospect:
        """Return what currently enforces a tenant's memory limit on a GPU, and how strongly."""
        found = self.prospect(gpu, tenant)
        if tenant.spec.memory_bytes is None:
            return Prospect(Promise.MEMORY, Strength.NOTHING, "no limit", "the tenant has no memory limit")
        if found.by is Strength.SHIM:
            return found
        fault = "" if tenant.held is None else self._watch.faults.get((tenant.held.path, gpu.uuid), "")
        if tenant.held is not None and not fault:
            return found
        started = f"{SHIM_ALONE}, because the tenant was started without a memory limit"
        why = fault or tenant.held_not or started
        return by_shim(why, (why,))

    def not_enforced(self, tenant: Tenant) -> list[str]:
        """Why limits on the tenant's control group may not hold at present, as sentences."""
        held = tenant.held
        return [] if held is None else [text for key, text in self._watch.faults.items() if key[0] == held.path]

    def closing(self) -> list[ControlGroup]:
        """Groups of ended tenants whose limits are still set."""
        return self._closings.groups()

    def check(self, tenant: Tenant) -> None:
        """Raise InputError if the tenant's memory limit would be enforced less strongly than demanded."""
        for gpu in tenant.gpus:
            found = self.prospect(gpu, tenant)
            if found.by.at_least(tenant.spec.enforce_memory) and tenant.pids:
                # the memory of a running program stays limited as it was when the program started
                found = self.of(tenant, gpu)
            if not found.by.at_least(tenant.spec.enforce_memory):
                raise _too_weak(tenant, f"memory on GPU {gpu.index} is limited by the {found.by}: {found.why}")

    def tenant_in(self, pid: int) -> Tenant | None:
        """The tenant in whose control group a process is."""
        held = held_by(self._registry)
        if not held:
            return None
        try:
            group = hierarchy_of(tuple(self._registry.gpus.values())).of(pid)
        except OSError:
            return None
        return next((held[path] for path in (group, *group.parents) if path in held), None)

    # -- a tenant's life -------------------------------------------------------------------------------------------

    def expect(self, pid: int) -> None:
        """Prepare the kernel for moving a launcher into a tenant's control group. Blocks for milliseconds: call it in a
        thread, just before `begin`.
        """
        if any(prospect(found, swaps=False).by is not Strength.SHIM for found in list(self._detected.values())):
            with contextlib.suppress(OSError):
                hierarchy_of(tuple(self._registry.gpus.values())).quicken(pid)

    async def begin(self, tenant: Tenant, pid: int) -> None:
        """Limit the tenant's control group and move its launcher there. Called before the tenant's program runs. Raises
        InputError if the limit cannot be enforced as strongly as the tenant demands.
        """
        if tenant.spec.memory_bytes is None:
            return
        if any(self.prospect(gpu, tenant).by is Strength.SHIM for gpu in tenant.gpus):
            return
        before, entered, other = tenant.held, False, self.tenant_in(pid)
        if other is not None and other is not tenant:  # a tenant's program starts another tenant
            self._watch.elsewhere(other, pid)
        try:
            group = self._group_of(tenant, pid, before)
            entered = True
            tenant.held, tenant.held_not = group, ""
            if group != before:
                self._own({group.path})
                if before is not None:
                    self._close(before, tenant)
                # the group is saved before its limit is set, so that if this agent is killed, the next agent clears the
                # limit
                self._save()
            for gpu in tenant.gpus:
                if tenant.held != group:  # the tenant has ended meanwhile, and its limits are cleared
                    break
                await self._applied.done(self._applied.change, group.path, gpu, tenant.cap_bytes(gpu))
        except (NoGroupError, OSError) as error:
            running = before is not None and before.path.exists() and bool(tenant.pids)
            if not running or tenant.held != before:
                self._let_go(tenant)
            if not Strength.SHIM.at_least(tenant.spec.enforce_memory):
                raise _too_weak(tenant, reason_of(error)) from None
            if tenant.held is None:
                tenant.held_not = f"{SHIM_ALONE}, because {reason_of(error)}"
                self._watch.say(tenant, tenant.held_not)
            elif not entered and processes.alive(processes.key_of(pid)):
                self._watch.elsewhere(tenant, pid)
                self._watch.say(tenant, f"{reason_of(error)}: only the shim limits the memory of process {pid}")

    async def came(self, tenant: Tenant, pid: int) -> None:
        """Limit the control group of a process of a pod or job that has just connected. Such a process was not started
        by a launcher.
        """
        if tenant.owner is None or tenant.spec.memory_bytes is None:
            return
        with contextlib.suppress(OSError):
            place = place_group(hierarchy_of(tenant.gpus).of(pid), tenant.owner)
            if tenant.held is None or tenant.held.path != place:
                await self.begin(tenant, pid)

    def follow(self, tenant: Tenant) -> None:
        """Apply a changed memory limit. Raises InputError, with nothing changed, if the driver refuses the limit. Waits
        for the driver, but only if the limit changes.
        """
        if tenant.held is None:
            return
        before = {gpu: self._applied.limits.get((tenant.held.path, gpu.uuid)) for gpu in tenant.gpus}
        for index, gpu in enumerate(tenant.gpus):
            try:
                self._change(tenant.held.path, gpu, tenant.cap_bytes(gpu))
            except OSError as error:
                for other in tenant.gpus[:index]:
                    with contextlib.suppress(OSError):
                        self._change(tenant.held.path, other, before[other])
                raise InputError(self._refusal(tenant, gpu, error), field="--memory") from None

    def precede(self, tenant: Tenant, gpu: Gpu) -> None:
        """Set a tenant's limit on a GPU to which the tenant is about to move. Raises InputError if the driver refuses
        the limit.
        """
        if tenant.held is not None:
            try:
                self._change(tenant.held.path, gpu, tenant.cap_bytes(gpu))
            except OSError as error:
                raise InputError(self._refusal(tenant, gpu, error), field="--gpu") from None

    def _change(self, group: Path, gpu: Gpu, limit_bytes: int | None) -> None:
        if not self._applied.is_set(group, gpu, limit_bytes):
            self._applied.give(self._applied.change, group, gpu, limit_bytes).result()

    def leave(self, tenant: Tenant, gpu: Gpu) -> None:
        """Clear a tenant's limit on a GPU that the tenant has left."""
        if tenant.held is not None:
            # if the driver refuses, the limit is cleared together with the group's other limits, when the group is
            # empty
            self._applied.give(self._applied.set, tenant.held.path, gpu, None)

    def rest(self, tenant: Tenant) -> None:
        """Release the control group of a registered tenant whose last process has ended, if the agent did not make the
        group: other programs may use such a group next, and must not get the limit.
        """
        if tenant.held is not None and not tenant.held.made:
            self.end(tenant)

    def end(self, tenant: Tenant) -> None:
        """Let go of a removed tenant's control group. When the group is empty, its limits are cleared; it is removed if
        the agent created it.
        """
        self._let_go(tenant)
        spawn(self._sweeps, self._sweep())

    def take_back(self, tenant: Tenant, group: ControlGroup) -> None:
        """Take over the control group that the previous agent used for this tenant."""
        tenant.held = group
        self._own({group.path})
        for gpu in tenant.gpus:
            limit_bytes = tenant.cap_bytes(gpu)
            try:
                self._applied.give(self._applied.set, group.path, gpu, limit_bytes).result()
            except OSError:
                if limit_bytes is not None:  # if the driver refuses now, the next check sets the limit
                    self._applied.limits[group.path, gpu.uuid] = limit_bytes

    def clean(self, left: Iterable[ControlGroup]) -> None:
        """Clear and remove control groups that the previous agent left and no tenant uses. `left`: the groups in its
        state file; groups that it created but did not list are found by name.
        """
        gpus = tuple(self._registry.gpus.values())
        hierarchy = device_of(gpus[0]).cgroups()
        if hierarchy is None or hierarchy.version != 2:
            return
        used = held_by(self._registry)
        made = [group for group in hierarchy.groups(hierarchy.root) if group.name.startswith(self._mark)]
        groups = {group.path: group for group in (*left, *(ControlGroup(path, True) for path in made))}
        self._own(groups)
        for group in (group for path, group in groups.items() if path not in used):
            self._closings.add(group, gpus, f"a tenant of the previous agent ({group.path.name})")
        spawn(self._sweeps, self._sweep())

    def _own(self, paths: Collection[Path]) -> None:
        """Record that these groups belong to an agent, so that their limits are not taken for those of another
        program. The GPUs may have been examined while the groups had limits of the previous agent.
        """
        for uuid, found in self._detected.items():
            foreign = tuple(each for each in found.foreign if each.group not in paths)
            self._detected[uuid] = replace(found, foreign=foreign)

    # -- while tenants run -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check the limits once a second as long as the agent runs."""
        await self._watch.run()

    def bring_back(self, tenant: Tenant, pid: int) -> bool:
        """Move a process that left its tenant's control group back there. Returns whether a process was moved."""
        return self._watch.bring_back(tenant, pid)

    # -- one group -------------------------------------------------------------------------------------------------

    def _group_of(self, tenant: Tenant, pid: int, before: ControlGroup | None) -> ControlGroup:
        """Find or create the control group of a tenant, and move the process there. Raises NoGroupError if the tenant
        cannot have a group of its own or the process cannot be in it, OSError if the kernel refuses a step.
        """
        hierarchy = hierarchy_of(tenant.gpus)
        if before is not None and before.path.exists():
            if before.made:
                if in_container(pid):
                    raise NoGroupError(
                        f"process {pid} runs in a container, and would escape the container's limits in the tenant's "
                        "control group"
                    )
                hierarchy.enter(before.path, pid)
                return before
            if tenant.pids:
                if not hierarchy.of(pid).is_relative_to(before.path):
                    raise NoGroupError(f"process {pid} joined from another control group")
                return before
        taken = held_by(self._registry)
        if tenant.owner is not None:
            own: Path | None = place_group(hierarchy.of(pid), tenant.owner) or hierarchy.of(pid)
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
        self._closings.take(group)
        return ControlGroup(group, own is None or group.name.startswith(self._mark))

    def _let_go(self, tenant: Tenant) -> None:
        if tenant.held is not None:
            self._close(tenant.held, tenant)
            tenant.held = None
        self._watch.forget(tenant)

    def _close(self, group: ControlGroup, tenant: Tenant) -> None:
        """Clear the limits of a control group when it is empty, also on GPUs that the tenant has left."""
        limited = {uuid for path, uuid in list(self._applied.limits) if path == group.path}
        limited.update(gpu.uuid for gpu in tenant.gpus)
        gpus = tuple(gpu for uuid, gpu in self._registry.gpus.items() if uuid in limited)
        self._closings.add(group, gpus, tenant.name)

    async def _sweep(self, users: Users | None = None) -> None:
        if await self._closings.sweep(users):
            self._save()


    def _refusal(self, tenant: Tenant, gpu: Gpu, error: OSError) -> str:
        wanted, used = tenant.cap_bytes(gpu), self.used_bytes(tenant, gpu)
        if wanted is not None and used > wanted:
            return (
                f"{tenant.name} uses {format_bytes(used)} of GPU {gpu.index}, contexts included, so the driver refuses "
                f"a limit of {format_bytes(wanted)}, and the old one stays: free memory first, or set a larger one"
            )
        return f"the new memory limit of {tenant.name} on GPU {gpu.index} was refused: {reason_of(error)}"

    def used_bytes(self, tenant: Tenant, gpu: Gpu) -> int:
        """Memory that kernel or driver count for a tenant on a GPU, contexts included; 0 if they do not limit it."""
        if tenant.held is not None:
            with contextlib.suppress(OSError):
                return self._applied.used_bytes(tenant.held.path, gpu)
        return 0
