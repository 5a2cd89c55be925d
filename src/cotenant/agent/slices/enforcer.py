"""Enforces shares by hardware time slices: measures tenants' GPU time, and sets the time slices of their channel groups
(the units that the GPU gives time slices to) as the policy decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cotenant.agent.ipc import wire
from cotenant.agent.slices.groups import GroupTable, OffChannels
from cotenant.agent.slices.keeper_link import KeeperLink
from cotenant.agent.slices.lateness import Lateness
from cotenant.agent.slices.offences import Offences
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Session, Tenant, work_kind
from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls
from cotenant.devices.meters import Held, Meter
from cotenant.devices.registry import device_of
from cotenant.policy.shares.shortfall import Wanted
from cotenant.policy.shares.slice_instructions import Go, SetSlice, SliceInstruction, Stop
from cotenant.policy.shares.slice_settings import TINY_US, SliceSettings
from cotenant.policy.shares.slice_tenant import Usage
from cotenant.policy.shares.slices import GpuSlices

LOG = logging.getLogger(__name__)
POLL_S = SliceSettings().poll_ns / 1e9
# Beside latency-sensitive work, best-effort tenants have the shortest time slice, TINY_US. A best-effort tenant has the
# longer BRIEF_US instead (slice_settings.py has both) if for this time it has launched no long kernel: none that takes
# 0.5 ms or more, or whose duration is not known yet.
LONG_KERNEL_AGO_NS = 1_000_000_000
GUARD_S = 0.01  # time between two checks of the time slices on which a latency-sensitive tenant relies
DRIVER_SLICE_US, COPY_SLICE_US = 2048, 1024  # the driver's defaults for groups of the compute and the copy engines

NOT_MEASURED = "GPU %s: time slices enforce shares from now on without a measurement of what tenants get: %s"

Key = tuple[Session, tuple[int, int]]


@dataclass(eq=False)
class _Gpu:
    """State of one GPU that tenants share by hardware time slices."""

    slices: GpuSlices
    controls: ChannelControls
    meter: Meter | None
    timer: asyncio.TimerHandle | None = None
    due_ns: int | None = None  # when the timer is due
    seen: dict[int, Usage] = field(default_factory=dict)  # process -> the previous reading of the meter of its GPU time
    # name of a tenant -> GPU time that it used since it joined the GPU
    totals: dict[str, Usage] = field(default_factory=dict)
    # Whether the agent could control a channel group of this GPU. If it cannot control the first one, the GPU's tenants
    # get turns, which the agent grants, instead of hardware time slices. If it cannot control a later one, the agent
    # only warns.
    proven: bool = False
    tiny: set[str] = field(default_factory=set)  # tenants whose copy channels also have the shortest time slice


class SliceEnforcer:
    """Enforces the shares of the tenants whose mechanism is `slices`."""

    def __init__(
        self,
        registry: Registry,
        warn: Callable[[Tenant, str], None],
        fall_back: Callable[[str, str], None],
    ) -> None:
        """`fall_back` is called with a GPU's UUID and a sentence if its driver rejects control of time slices."""
        self._registry, self._warn, self._fall_back = registry, warn, fall_back
        self._groups = GroupTable()
        self._gpus: dict[str, _Gpu] = {}
        self._keepers: dict[str, KeeperLink] = {}
        self._numbers: dict[Key, int] = {}
        self._last_number = 0
        self._off, self.lateness = OffChannels(), Lateness()
        self._offences = Offences()

    # -- tenants ---------------------------------------------------------------------------------------------------

    def join(self, tenant: Tenant) -> None:
        """Add a tenant, or apply its changed share. Raises WorkError if time slices of its GPU cannot be controlled."""
        for gpu in tenant.gpus:
            machine = self._gpu(gpu.uuid)
            self._decide(gpu.uuid, machine.slices.join, tenant.name, tenant.share(), work_kind(tenant.spec))
            self._count(tenant, gpu.uuid)

    def leave(self, tenant: Tenant) -> None:
        """Stop the enforcement of a tenant's share."""
        self._offences.forget(tenant.name)
        for gpu in tenant.gpus:
            machine = self._gpus.get(gpu.uuid)
            if machine is not None and tenant.name in machine.slices.tenants:
                held = self._held(tenant.name, gpu.uuid)
                self._carry_out(machine, held, Go(gpu.uuid, tenant.name))
                machine.totals.pop(tenant.name, None)
                self._decide(gpu.uuid, machine.slices.leave, tenant.name)

    def part(self, tenant: Tenant, gpu: str) -> float | None:
        """Fraction of a GPU's time that a tenant had in the last window; None if unknown."""
        machine = self._gpus.get(gpu)
        known = machine.slices.tenants.get(tenant.name) if machine is not None else None
        if known is None or not known.groups or not known.window().span_ns:
            return None
        return min(1.0, known.window().part)

    def wanted(self, tenant: Tenant, gpu: str) -> Wanted | None:
        """Fractions of a GPU's time that a tenant got and wanted in the last window; None before a window has passed.

        The hardware does not report what a tenant wants. A tenant whose time slices mostly end because it has no more
        work is taken to want what it got; otherwise, to want all.
        """
        machine = self._gpus.get(gpu)
        known = machine.slices.tenants.get(tenant.name) if machine is not None else None
        if machine is None or known is None or known.window().span_ns < machine.slices.settings.window_ns:
            return None
        part = min(1.0, known.window().part)
        return Wanted(part, 1.0 if known.competes and not known.has_gaps() else part)

    def close(self) -> None:
        """Let all tenants run without limits on their time, and release their channel groups."""
        for gpu, machine in self._gpus.items():
            if machine.timer is not None:
                machine.timer.cancel()
            for name in machine.slices.tenants:
                self._carry_out(machine, self._held(name, gpu), Go(gpu, name))
            if machine.meter is not None:
                machine.meter.close()
        for keeper in self._keepers.values():
            keeper.close()
        for session in list(self._groups.sessions):
            self._groups.forget(session)
        self._gpus.clear()

    # -- processes -------------------------------------------------------------------------------------------------

    def group(self, session: Session, head: wire.Head, data: bytes) -> None:
        """Handle a process's message about a new or ended channel group (CHANNEL_GROUP)."""
        tenant = session.tenant
        key, group = self._groups.take(session, data)
        sliced = [gpu.uuid for gpu in tenant.gpus if self._of(tenant, gpu.uuid) is not None]
        if group is None or not sliced:
            self._let_go((session, key))
        else:
            self._found(session, key, sliced)
        for gpu in sliced:
            self._count(tenant, gpu)

    def gone(self, session: Session) -> None:
        """Release the channel groups of a process that has ended."""
        mine = self._groups.forget(session)
        if mine is None:
            return
        self._off.forget(mine.pid)
        for owner, key in [k for k in self._numbers if k[0] is session]:
            self._let_go((owner, key))
        for gpu in session.tenant.gpus:
            if self._of(session.tenant, gpu.uuid) is not None:
                self._count(session.tenant, gpu.uuid)

    def _found(self, session: Session, key: tuple[int, int], sliced: list[str]) -> None:
        mine = self._groups.sessions[session]
        held = mine.held(key)
        machine = self._gpus[sliced[0]]
        if key not in mine.gpu_of and held.group.compute:
            why = machine.controls.check(held.fd, held.group)
            if why and machine.proven:
                self._warn(session.tenant, f"{session.program} has a channel group that cannot be controlled: {why}")
                return
            if why:
                for gpu in sliced:
                    self._fall_back(gpu, why)
                return
            machine.proven = True
            # they may still be disabled, if an earlier agent was killed together with its keeper (the process that
            # enables channels when the agent dies)
            self._off.assume(held)
            self._off.put_right(machine.controls, [held], on=True)
        if key not in mine.gpu_of:
            mine.gpu_of[key] = self._gpu_of(machine, held, sliced)
        if held.group.compute:
            self._keep(machine, (session, key), held)

    def _gpu_of(self, machine: _Gpu, held: Held, sliced: list[str]) -> str:
        if len(sliced) == 1:
            return sliced[0]
        try:
            return machine.controls.gpu_uuid(held.fd, held.group)
        except WorkError:
            return ""

    def _keep(self, machine: _Gpu, key: Key, held: Held) -> None:
        release = machine.controls.release
        keeper = self._keepers.get(release)
        if keeper is None:
            library = machine.controls.library
            keeper = self._keepers[release] = KeeperLink(release, library, self._again)
        if key not in self._numbers:
            self._last_number += 1
            self._numbers[key] = self._last_number
        keeper.hold(self._numbers[key], held, DRIVER_SLICE_US)

    def _let_go(self, key: Key) -> None:
        number = self._numbers.pop(key, None)
        if number is not None:
            for keeper in self._keepers.values():
                keeper.drop(number)

    def _count(self, tenant: Tenant, gpu: str) -> None:
        """Tell the policy for time slices how many channel groups a tenant has."""
        machine = self._gpus.get(gpu)
        if machine is None or tenant.name not in machine.slices.tenants:
            return
        count = len(self._held(tenant.name, gpu))
        if count or machine.slices.tenants[tenant.name].groups:
            self._decide(gpu, machine.slices.groups, tenant.name, count)

    def _held(self, name: str, gpu: str, *, compute: bool = True) -> list[Held]:
        tenant = self._registry.tenants.get(name)
        return self._groups.on(gpu, tenant.sessions, compute=compute) if tenant is not None else []

    def _of(self, tenant: Tenant, gpu: str) -> _Gpu | None:
        machine = self._gpus.get(gpu)
        return machine if machine is not None and tenant.name in machine.slices.tenants else None

    # -- orders ----------------------------------------------------------------------------------------------------

    def _gpu(self, uuid: str) -> _Gpu:
        machine = self._gpus.get(uuid)
        if machine is None:
            device = device_of(self._registry.gpus[uuid])
            controls = device.channel_controls()
            meter: Meter | None = None
            try:
                meter = device.meter(uuid, controls)
            except WorkError as error:
                LOG.warning(NOT_MEASURED, uuid, error)
            machine = self._gpus[uuid] = _Gpu(GpuSlices(uuid), controls, meter)
            asyncio.get_running_loop().call_later(POLL_S, self._poll, uuid)
        return machine

    def _decide(self, uuid: str, event: Callable[..., list[SliceInstruction]], *arguments: Any) -> None:
        """Report an event to the policy for time slices, and carry out its instructions."""
        machine, now_ns = self._gpus[uuid], _now()
        self.lateness.acted(uuid, machine.due_ns, now_ns)
        for step in event(*arguments, now_ns):
            self._carry_out(machine, self._held(step.tenant, uuid), step)
            if isinstance(step, SetSlice):
                self._copies(machine, uuid, step)
        self._arm(uuid, now_ns)

    def _carry_out(self, machine: _Gpu, held: list[Held], step: SliceInstruction) -> None:
        for each in held:
            try:
                if isinstance(step, SetSlice):
                    self._set(machine, step.tenant, each, step.slice_us)
                elif isinstance(step, Stop):
                    self._off.disable(machine.controls, each)
                else:
                    self._off.enable(machine.controls, each)
            except WorkError as error:  # the process of the group has probably ended
                LOG.info("tenant %s: %s: %s", step.tenant, type(step).__name__, error)

    def _set(self, machine: _Gpu, name: str, held: Held, slice_us: int) -> None:
        """Set the time slice of a tenant's group. Raises WorkError if the driver refuses."""
        try:
            machine.controls.set_slice(held.fd, held.group, slice_us)
        except WorkError:
            self._offences.set(name, held.group, refused=True)
            raise
        self._offences.set(name, held.group, refused=False)

    def _copies(self, machine: _Gpu, uuid: str, step: SetSlice) -> None:
        """Give a tenant's copy channels the shortest time slice, too, if the tenant's kernels have it."""
        tiny = step.slice_us == TINY_US
        if tiny == (step.tenant in machine.tiny) and not tiny:
            return
        (machine.tiny.add if tiny else machine.tiny.discard)(step.tenant)
        copies = [held for held in self._held(step.tenant, uuid, compute=False) if not held.group.compute]
        slice_us = TINY_US if tiny else COPY_SLICE_US
        self._carry_out(machine, copies, SetSlice(uuid, step.tenant, slice_us))

    def _arm(self, uuid: str, decided_ns: int) -> None:
        machine, loop = self._gpus[uuid], asyncio.get_running_loop()
        if machine.timer is not None:
            machine.timer.cancel()
        # times that have passed while the instructions were carried out count, too: nothing else switches turns then
        machine.due_ns = wake_ns = machine.slices.wake_ns(decided_ns)
        machine.timer = None
        if wake_ns is not None:
            machine.timer = loop.call_later(max(0, wake_ns - _now()) / 1e9, self._advance, uuid)

    def _advance(self, uuid: str) -> None:
        if uuid in self._gpus:
            self._decide(uuid, self._gpus[uuid].slices.advance)

    def _again(self) -> None:
        """Stop again the tenants that should be stopped, since the keeper let all tenants run while the agent was
        suspended. Their channels are enabled first: a channel that the keeper did not enable would otherwise be
        disabled twice, and, because the driver counts, run again only after it was enabled twice.
        """
        for uuid, machine in self._gpus.items():
            for name in [tenant.name for tenant in machine.slices.present() if not tenant.on]:
                held = self._held(name, uuid)
                self._carry_out(machine, held, Go(uuid, name))
                self._carry_out(machine, held, Stop(uuid, name))

    # -- measuring -------------------------------------------------------------------------------------------------

    def _poll(self, uuid: str) -> None:
        machine = self._gpus.get(uuid)
        if machine is None:
            return
        asyncio.get_running_loop().call_later(POLL_S, self._poll, uuid)
        names = [tenant.name for tenant in machine.slices.present()]
        if not names:
            return
        held = {name: self._held(name, uuid) for name in names}
        for name, groups in held.items():
            self._off.put_right(machine.controls, groups, on=machine.slices.tenants[name].on)
        if machine.meter is not None:
            self._measure(uuid, machine, machine.meter, held)
        background, guarded = machine.slices.background()
        if guarded:
            brief = [tenant.name for tenant in background if self._is_brief(tenant.name, uuid)]
            self._decide(uuid, machine.slices.brief, brief)
        self._read_back(machine, held)
        if guarded:
            self._watch(uuid, [tenant.name for tenant in background], _now() + int(0.9 * POLL_S * 1e9))

    def _is_brief(self, name: str, gpu: str) -> bool:
        """Whether all processes of a tenant on a GPU have launched only short kernels lately, and launch through the LS
        gate, where best-effort launches wait while latency-sensitive work is active.
        """
        tenant, now_ns = self._registry.tenants[name], _now()
        slots = [s.page.slots[n] for s in tenant.sessions for n, uuid in s.slots.items() if uuid == gpu]
        working = [slot for slot in slots if slot.contexts]
        return bool(working) and all(s.floor_ns and now_ns - s.long_kernel_ns > LONG_KERNEL_AGO_NS for s in working)

    def _measure(self, uuid: str, machine: _Gpu, meter: Meter, held: dict[str, list[Held]]) -> None:
        """Measure the tenants' GPU time and report it to the policy for time slices."""
        try:
            read = meter.read(
                [each._replace(run_us=machine.slices.run_us(name)) for name, groups in held.items() for each in groups]
            )
        except (WorkError, OSError) as error:
            LOG.warning(NOT_MEASURED, uuid, error)
            machine.meter = None
            return
        for name, groups in held.items():
            for pid in {each.pid for each in groups}:
                now = read.get(pid, Usage())
                # GPU time that the process used under a previous agent is not counted
                before = machine.seen.get(pid, now)
                total = machine.totals.get(name, Usage())
                more = (max(0, a - b) for a, b in zip(now, before, strict=True))
                machine.totals[name] = Usage(*(a + b for a, b in zip(total, more, strict=True)))
                machine.seen[pid] = now
        self._decide(uuid, machine.slices.used, {name: machine.totals.get(name, Usage()) for name in held})

    def _read_back(self, machine: _Gpu, held: dict[str, list[Held]]) -> None:
        """Read the time slices back and restore those that tenants have changed."""
        for name, groups in held.items():
            wanted = machine.slices.tenants[name].slice_us
            for each in groups:
                try:
                    found = machine.controls.slice_us(each.fd, each.group)
                except WorkError:
                    continue
                if wanted and found != wanted:
                    self._set_back(machine, name, each, found, wanted)

    def _watch(self, uuid: str, names: list[str], until_ns: int) -> None:
        """Until `until_ns`, check the time slices of these tenants often, since a latency-sensitive tenant relies on
        them.
        """
        machine = self._gpus.get(uuid)
        if machine is None or _now() > until_ns:
            return
        self._read_back(machine, {n: self._held(n, uuid) for n in names if n in machine.slices.tenants})
        asyncio.get_running_loop().call_later(GUARD_S, self._watch, uuid, names, until_ns)

    def _set_back(self, machine: _Gpu, name: str, held: Held, found: int, wanted: int) -> None:
        tenant = self._registry.tenants.get(name)
        if self._offences.found(name, held.group) and tenant is not None:
            self._warn(
                tenant, f"the tenant changes its time slice ({found} us, not {wanted}); the agent restores it each time"
            )
        with contextlib.suppress(WorkError):
            self._set(machine, name, held, wanted)


def _now() -> int:
    return time.monotonic_ns()
