"""Checks once a second that tenants' memory limits hold and their processes are in their control groups; restores what
another program changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cotenant.agent import processes
from cotenant.agent.memory_limits.applied import Applied, Key
from cotenant.agent.memory_limits.closing import Closings, Users
from cotenant.agent.memory_limits.groups import hierarchy_of, in_container
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.cgroups import delegate_down
from cotenant.devices.base import Gpu
from cotenant.devices.group_limits import limit_text, reason_of
from cotenant.policy.memory_limits import Detected

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
PATIENCE_S = 5.0  # how long a check waits for the driver's answer
SHIM_ALONE = "the tenant's memory is limited only by the shim in its processes"
UNANSWERED = f"whether the tenant's memory limit holds is not known: the driver has not answered for {PATIENCE_S:g} s"


@dataclass
class Reading:
    """What a check of the memory limits found. `limits`: the hard limits that the driver reports, or why it reports
    none. `below`: groups inside a tenant's group that have limits of their own. `inside`: the processes of each
    tenant's group by pid. `users`: see `Closings.users`.
    """

    limits: dict[Key, int | str] = field(default_factory=dict)
    below: list[tuple[Key, Path]] = field(default_factory=list)
    inside: dict[Path, dict[int, ProcessKey]] = field(default_factory=dict)
    users: Users = field(default_factory=dict)


def held_by(registry: Registry) -> dict[Path, Tenant]:
    """The tenants with a limited control group, by the group's path."""
    return {tenant.held.path: tenant for tenant in registry.tenants.values() if tenant.held is not None}


class Watch:
    """Checks tenants' memory limits. `faults`: for a control group and a GPU, why the limit may not hold at present."""

    def __init__(
        self,
        registry: Registry,
        applied: Applied,
        detected: Mapping[str, Detected],
        warn: Callable[[Tenant, str], None],
        closings: Closings,
        sweep: Callable[[Users], Awaitable[None]],
    ) -> None:
        """`detected`: what driver and kernel offer for memory limits, by the GPU's UUID. `sweep` closes those of the
        `closings`, the groups of ended tenants, that have no processes; it is called at each check.
        """
        self._registry, self._applied, self._detected = registry, applied, detected
        self._warn, self._closings, self._sweep = warn, closings, sweep
        self.faults: dict[Key, str] = {}
        self._inside: dict[Path, dict[int, ProcessKey]] = {}
        self._outside: set[tuple[str, ProcessKey]] = set()  # (tenant, process outside its group) already reported
        # name of a tenant -> processes that may be outside its control group, with their descendants (see `elsewhere`)
        self._elsewhere: dict[str, set[ProcessKey]] = {}

    async def run(self) -> None:
        """Check the memory limits once a second as long as the agent runs."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Check the memory limits once."""
        # copied first: if a limit is changed between these lines, the change counts as later than the check
        changes = dict(self._applied.changes)
        wanted = self._wanted()
        # the driver is queried in a thread, since the event loop also grants turns
        reading = asyncio.ensure_future(asyncio.to_thread(self._read, wanted, dict(self._inside)))
        if not (await asyncio.wait({reading}, timeout=PATIENCE_S))[0]:
            self._unanswered(wanted)
        await self._judge(wanted, await reading, changes)

    def say(self, tenant: Tenant, text: str) -> None:
        """Warn a tenant of a condition, unless it already has this warning."""
        if text not in tenant.warnings:
            self._warn(tenant, text)

    def elsewhere(self, tenant: Tenant, pid: int) -> None:
        """Record that a process of a tenant and its descendants may be outside the tenant's control group: a launcher
        that could not be moved into the group, or a process that starts another tenant.
        """
        self._elsewhere.setdefault(tenant.name, set()).add(processes.key_of(pid))

    def forget(self, tenant: Tenant) -> None:
        """Forget what was reported about a tenant whose control group was released."""
        self._outside = {(name, key) for name, key in self._outside if name != tenant.name}
        self._elsewhere.pop(tenant.name, None)

    # --------------------------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[Key, int]:
        """Return the limits that the driver should report for tenants' control groups. Faults of control groups that no
        tenant has any more are forgotten.
        """
        limits = dict(self._applied.limits)  # a copy, because another thread may change them
        wanted = {
            (path, gpu.uuid): limits[path, gpu.uuid]
            for path, tenant in held_by(self._registry).items()
            for gpu in tenant.gpus
            if (path, gpu.uuid) in limits
        }
        self.faults = {key: text for key, text in self.faults.items() if key in wanted}
        return wanted

    def _read(self, wanted: Iterable[Key], before: Mapping[Path, Mapping[int, ProcessKey]]) -> Reading:
        found = Reading(users=self._closings.users())
        for path, uuid in wanted:
            gpu = self._registry.gpus[uuid]
            try:
                found.limits[path, uuid] = self._applied.reported(path, gpu)
                hierarchy, detected = hierarchy_of((gpu,)), self._detected.get(uuid)
                # with dmem, groups below do not matter, because the kernel charges all groups above a process
                if detected is not None and not detected.dmem:
                    found.below += [((path, uuid), below) for below in self._applied.below(hierarchy, path, gpu)]
                if path not in found.inside:
                    known = before.get(path, {})
                    pids = {pid for group in hierarchy.groups(path) for pid in hierarchy.processes(group)}
                    found.inside[path] = {pid: known.get(pid) or processes.key_of(pid) for pid in pids}
            except OSError as error:
                found.limits.setdefault((path, uuid), reason_of(error))
        return found

    def _unanswered(self, wanted: Iterable[Key]) -> None:
        held = held_by(self._registry)
        LOG.error("the GPU's driver has not answered for %g s: memory limits are not checked", PATIENCE_S)
        for key in wanted:
            if key[0] in held:
                self.faults[key] = UNANSWERED
                self.say(held[key[0]], UNANSWERED)

    async def _judge(self, wanted: Mapping[Key, int], found: Reading, changes: Mapping[Key, int]) -> None:
        """Act on what a check found. `changes`: copy of `Applied.changes` from the start of the check; it shows
        which limits the agent itself has changed since.
        """
        held, again = held_by(self._registry), set[Path]()
        for key, expected in wanted.items():
            tenant, now = held.get(key[0]), found.limits[key]
            if tenant is None or tenant.held is None or tenant.held.path != key[0]:
                continue  # the tenant has ended meanwhile
            if key == self._applied.changing or self._applied.changes.get(key) != changes.get(key):
                continue  # the agent has changed or cleared the limit since the check began
            if now == expected:
                self.faults.pop(key, None)
            elif isinstance(now, str) and (key[0] in again or not key[0].exists()):
                if key[0] not in again:
                    again.add(key[0])
                    await self._removed(tenant)
            else:
                await self._set_back(tenant, self._registry.gpus[key[1]], expected, now)
        held = held_by(self._registry)
        for (path, uuid), below in found.below:
            if path in held and held[path].held is not None:
                await self._clear_below(held[path], self._registry.gpus[uuid], below)
        for path, tenant in held_by(self._registry).items():
            inside = found.inside.get(path, {})
            left = {key for pid, key in self._inside.get(path, {}).items() if pid not in inside}
            # those that are listed in the group are not read from /proc one by one
            for process in left.union(map(processes.key_of, tenant.pids.difference(inside))):
                self._check_place(tenant, process)
        self._inside = found.inside
        await self._sweep(found.users)

    async def _set_back(self, tenant: Tenant, gpu: Gpu, expected: int, found: int | str) -> None:
        assert tenant.held is not None
        key, by = (tenant.held.path, gpu.uuid), "another program (root in the tenant's container, or a service of this "
        what = (
            f"{by}node) changed the memory limit of the tenant's control group on GPU {gpu.index} from "
            f"{limit_text(expected)} to {limit_text(found)}"
            if isinstance(found, int)
            else f"the memory limit of the tenant's control group on GPU {gpu.index} cannot be read ({found})"
        )
        try:
            await self._applied.done(self._applied.set, tenant.held.path, gpu, tenant.cap_bytes(gpu))
        except OSError as error:
            self._applied.limits[key] = expected  # the next check tries again to restore the limit
            self.faults[key] = f"{what}; it cannot be restored: {reason_of(error)}"
            self.say(tenant, self.faults[key])
        else:
            self.faults.pop(key, None)
            self.say(tenant, f"{what}: it was {'restored' if isinstance(found, int) else 'set again'}")

    async def _removed(self, tenant: Tenant) -> None:
        """Handle that another program has removed a tenant's control group: make the group again if the agent had made
        it and processes of the tenant run; otherwise do without a group.
        """
        assert tenant.held is not None
        path, made = tenant.held
        self._applied.forget(path)
        running = bool(tenant.pids)
        try:
            if not (running and made):
                raise OSError(f"its control group {path} was removed by another program")
            hierarchy = hierarchy_of(tenant.gpus)
            if self._detected[tenant.gpus[0].uuid].dmem:
                delegate_down(hierarchy, path, "dmem")
            hierarchy.create(path)
            for gpu in tenant.gpus:
                await self._applied.done(self._applied.set, path, gpu, tenant.cap_bytes(gpu))
        except OSError as error:
            tenant.held = None
            if running:
                tenant.held_not = f"{SHIM_ALONE}, because {reason_of(error)}"
                self.say(tenant, tenant.held_not)
        else:
            self.say(tenant, f"another program removed the tenant's control group {path}: it was made again")

    async def _clear_below(self, tenant: Tenant, gpu: Gpu, below: Path) -> None:
        assert tenant.held is not None
        what = (
            f"a program of the tenant limited a control group of its own on GPU {gpu.index} ({below}): what is "
            "allocated there does not count for the tenant's memory limit"
        )
        key = (tenant.held.path, gpu.uuid)
        try:
            await self._applied.done(self._applied.set, below, gpu, None)
        except OSError as error:
            self.faults[key] = f"{what}, and that limit cannot be removed: {reason_of(error)}"
            self.say(tenant, self.faults[key])
        else:
            self.say(tenant, f"{what}; that limit was removed")

    def bring_back(self, tenant: Tenant, pid: int) -> bool:
        """Move a process of a tenant, and its descendants, into the tenant's control group. Returns whether a process
        was moved. Processes in containers stay where they are, because they would escape the container's limits.
        """
        if tenant.held is None or tenant.owner is not None or in_container(pid):
            return False
        return self._moved(tenant, pid) == ""

    def _check_place(self, tenant: Tenant, process: ProcessKey) -> None:
        why = self._moved(tenant, process.pid) if processes.alive(process) else None
        if why is None or (tenant.name, process) in self._outside:
            return
        self._outside.add((tenant.name, process))
        fate = f"it cannot be moved back: {why}" if why else "it was moved back"
        self.say(
            tenant,
            f"process {process.pid} left the tenant's control group and thereby its memory limit; {fate}, and what it "
            "allocated meanwhile is not counted",
        )

    def _moved(self, tenant: Tenant, pid: int) -> str | None:
        """Move a process and its descendants to the tenant's group. Returns why that failed, empty if it succeeded;
        None if the process belongs where it is.
        """
        assert tenant.held is not None
        hierarchy, path = hierarchy_of(tenant.gpus), tenant.held.path
        if hierarchy.contains(path, pid):
            return None
        joined = self._elsewhere.get(tenant.name, set())
        if joined and any(processes.key_of(each) in joined for each in processes.ancestors(pid)):
            return None
        try:
            hierarchy.enter(path, pid)
        except OSError as error:
            return reason_of(error)
        for child in processes.descendants({processes.key_of(pid)}):
            if not hierarchy.contains(path, child.pid):
                try:
                    hierarchy.enter(path, child.pid)
                except OSError as error:
                    if processes.alive(child):
                        return reason_of(error)
        return ""
