"""The token broker: grants tenants turns, time slices in which only one tenant may launch on a GPU.

The policy (policy/shares) decides; the broker has the clock and timers, and carries the decisions out by messages and
by the pages that each process shares with the agent. A turn has a number, its epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cotenant.abi.protocol import MessageType, ReleaseReason
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.ipc import wire
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.agent.turns.endless import EndlessTurns
from cotenant.agent.turns.hold import ENDLESS, PARKED, Hold, PausedTurn, Residents, Suspended
from cotenant.policy.shares import Ended, Grant, Instruction, Move, NodeTurns, QuotaSettings, Revoke, Stuck
from cotenant.policy.shares.turn import UNDRAINED

# every other reason for the end of a turn is shown as "released"
_REASONS: dict[int, str] = {ReleaseReason.IDLE: "idle", ReleaseReason.EXIT: "exit"}
SAFETY_NS = 1_000_000_000
# a process's report of the end of its work is accepted if that end was at most this long ago
LATE_REPORT_NS = 20_000_000


class Broker:
    """Grants and ends turns on the GPUs of a node. All methods run in one event loop."""

    def __init__(
        self,
        gpus: list[str],
        settings: QuotaSettings,
        *,
        inflight_ns: int,
        residents: Residents,
        on_turn: Callable[[Ended], None],
        on_fault: Callable[[Tenant, str], None],
    ) -> None:
        self.turns = NodeTurns(gpus, settings)
        self.paused: asyncio.Queue[PausedTurn] = asyncio.Queue()
        self._inflight_ns = inflight_ns
        self._residents = residents
        self._on_turn = on_turn
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self._holds: dict[str, Hold] = {}  # UUID of a GPU -> its present turn
        self._stuck: dict[tuple[str, str], Hold] = {}  # (gpu, tenant) -> a revoked turn of which work still runs
        self._timers: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self._tenants: dict[str, Tenant] = {}
        self._suspended = Suspended()
        # numbers of turns in messages only increase, even when the agent restarts
        self._wire_epoch = time.monotonic_ns() // 1000
        self._endless = EndlessTurns(residents, self.paused, self._next_epoch)

    # -- membership ------------------------------------------------------------------------------------------------

    def join(self, tenant: Tenant) -> None:
        """Let a tenant take turns on its GPUs, or change its share."""
        self._tenants[tenant.name] = tenant
        now_ns = time.monotonic_ns()
        for gpu in tenant.gpus:
            self._obey(self.turns.join(gpu.uuid, tenant.name, tenant.share(), now_ns), gpu.uuid)

    def leave(self, tenant: Tenant) -> None:
        """End a tenant's turns and forget it."""
        now_ns = time.monotonic_ns()
        self._suspended.forget(tenant.name)
        for gpu in tenant.gpus:
            self._stuck.pop((gpu.uuid, tenant.name), None)
            if tenant.name in self.turns.gpus[gpu.uuid].accounts:
                self._obey(self.turns.leave(gpu.uuid, tenant.name, now_ns), gpu.uuid)
        self._tenants.pop(tenant.name, None)

    def configure(self, settings: QuotaSettings, inflight_ns: int) -> None:
        """Apply new settings from the config file."""
        self._inflight_ns = inflight_ns
        out = self.turns.configure(settings, time.monotonic_ns())
        for gpu in self.turns.gpus:
            self._obey([step for step in out if step.gpu == gpu], gpu)

    # -- messages of the shims -------------------------------------------------------------------------------------

    def request(self, session: Session, slot: int, burst_ns: int) -> None:
        """Handle a process's request for a turn (TOKEN_REQUEST). `burst_ns`: GPU time that it expects to need."""
        gpu = session.slots[slot]
        session.asking.add(slot)
        if session.tenant.name in self._suspended:
            return
        if self._stands(session.tenant):
            self._endless.grant(session, slot)
            return
        out = self.turns.request(gpu, session.tenant.name, time.monotonic_ns(), burst_ns)
        hold = self._holds.get(gpu)
        if out or hold is None or hold.contended is False:
            self._obey(out, gpu)

    def suspend(self, tenant: Tenant, why: str = PARKED) -> None:
        """Grant a tenant no turns and revoke its present turn. Requests are answered after `unsuspend`."""
        self._suspended.add(tenant.name, why)
        now_ns = time.monotonic_ns()
        if self._stands(tenant):
            self._endless.revoke(tenant)
        for gpu in tenant.gpus:
            machine = self.turns.gpus[gpu.uuid]
            if tenant.name in machine.accounts:
                self._obey(self.turns.withdraw(gpu.uuid, tenant.name, now_ns), gpu.uuid)
                turn = machine.turn
                if turn is not None and turn.account.name == tenant.name and turn.paused_ns is not None:
                    # the turn has not begun, so no work of it can run
                    self.fail_turn(gpu.uuid, tenant.name, turn.epoch)
                else:
                    self._obey(machine.stop_turn(tenant.name, now_ns, "suspended"), gpu.uuid)

    def unsuspend(self, tenant: Tenant, why: str = PARKED) -> None:
        """Grant turns again to a tenant that was suspended for this reason, unless it is for others, too."""
        if not self._suspended.remove(tenant.name, why):
            return
        for gpu in tenant.gpus:
            if self._stands(tenant):
                self._endless.begin(tenant, gpu.uuid)
            elif tenant.name in self.turns.gpus[gpu.uuid].accounts and self._asks(tenant, gpu.uuid):
                self._obey(self.turns.request(gpu.uuid, tenant.name, time.monotonic_ns()), gpu.uuid)

    def wish(self, tenant: Tenant) -> None:
        """Request a turn for a tenant whose processes cannot do so."""
        for gpu in tenant.gpus:
            if tenant.name in self.turns.gpus[gpu.uuid].accounts and not self.holds(tenant, gpu.uuid):
                self._obey(self.turns.request(gpu.uuid, tenant.name, time.monotonic_ns()), gpu.uuid)

    def _wish_again(self, name: str) -> None:
        tenant = self._tenants.get(name)
        if tenant is not None and name not in self._suspended:
            self.wish(tenant)

    def holds(self, tenant: Tenant, gpu: str) -> bool:
        """Whether the tenant has a turn on a GPU, or work of its last turn still runs there."""
        machine = self.turns.gpus[gpu]
        if self._stands(tenant):
            return self._endless.holds(tenant, gpu)
        return tenant.name in machine.overrun or (machine.turn is not None and machine.turn.account.name == tenant.name)

    def waits(self, paused: PausedTurn) -> bool:
        """Whether a paused turn has not been revoked and its tenant still waits for it."""
        tenant, gpu, epoch = paused
        if epoch == ENDLESS:
            return self._endless.takes(paused) and self._stands(tenant) and tenant.name not in self._suspended
        turn = self.turns.gpus[gpu].turn
        return turn is not None and (turn.account.name, turn.epoch) == (tenant.name, epoch)

    def resume_turn(self, paused: PausedTurn, floor_ns: int) -> None:
        """Begin a paused turn, whose tenant's memory is now on the GPU. The turn lasts at least `floor_ns`."""
        gpu, name, epoch = paused.gpu, paused.tenant.name, paused.epoch
        if epoch == ENDLESS:
            if self._stands(paused.tenant) and name not in self._suspended:
                self._endless.begin(paused.tenant, gpu)
            return
        out = self.turns.gpus[gpu].resume(name, epoch, time.monotonic_ns(), floor_ns)
        if out:
            self._obey(out, gpu)
        else:
            self.fail_turn(gpu, name, epoch)

    def fail_turn(self, gpu: str, name: str, epoch: int) -> None:
        """End a paused turn unused, because its tenant's memory cannot be restored now."""
        tenant, machine = self._tenants.get(name), self.turns.gpus[gpu]
        if tenant is not None and name in machine.accounts:
            again = name not in self._suspended and self._asks(tenant, gpu)
            self._obey(self.turns.release(gpu, name, epoch, time.monotonic_ns(), None, "gone", again), gpu)

    def release(
        self, session: Session, slot: int, epoch: int, drained_ns: int, reason: int, drained: bool, again: bool
    ) -> None:
        """Handle a process's return of its turn (TOKEN_RELEASE). Does nothing if the process does not have the turn."""
        if session.granted.get(slot) != epoch:
            return
        gpu = session.slots[slot]
        session.page.slots[slot].epoch = 0
        if not drained:
            # the process launches no more, but its work still runs; after a time limit the policy treats it as stuck
            return
        del session.granted[slot]
        if again:
            session.asking.add(slot)
        if self._stands(session.tenant):
            if again and session.tenant.name not in self._suspended:
                self._endless.grant(session, slot)
            return
        self._member_done(session, gpu, drained_ns, _REASONS.get(reason, "released"))

    def drop(self, session: Session) -> None:
        """End the turns and requests of a process that has ended."""
        now_ns = time.monotonic_ns()
        slots = dict(session.slots)
        session.asking.clear()
        held = list(session.granted)
        session.granted.clear()
        for slot in held:
            self._member_done(session, slots[slot], now_ns, "gone")
        tenant = session.tenant
        for gpu in slots.values():
            machine = self.turns.gpus[gpu]
            if tenant.name in machine.accounts and not self._asks(tenant, gpu):
                self._obey(self.turns.withdraw(gpu, tenant.name, now_ns), gpu)

    def _member_done(self, session: Session, gpu: str, drained_ns: int, reason: str) -> None:
        tenant = session.tenant
        hold = self._holds.get(gpu)
        if hold is None or session not in hold.members:
            hold = self._stuck.get((gpu, tenant.name))
        if hold is None or session not in hold.members:
            return
        del hold.members[session]
        now_ns = time.monotonic_ns()
        hold.drained_ns = max(hold.drained_ns, min(now_ns, max(drained_ns, now_ns - LATE_REPORT_NS)))
        hold.reason = reason
        if hold.members:
            return
        if self._holds.get(gpu) is hold:
            del self._holds[gpu]
        self._stuck.pop((gpu, tenant.name), None)
        again = self._asks(tenant, gpu) and tenant.name not in self._suspended
        out = self.turns.release(gpu, tenant.name, hold.epoch, now_ns, hold.drained_ns, hold.reason, again)
        self._obey(out, gpu)

    def _stands(self, tenant: Tenant) -> bool:
        """Whether a tenant takes no turns, or only turns without end."""
        return tenant.name not in self._tenants

    def _next_epoch(self) -> int:
        self._wire_epoch += 1
        return self._wire_epoch

    def _asks(self, tenant: Tenant, gpu: str) -> bool:
        return any(gpu == s.slots.get(slot) for s in tenant.sessions for slot in s.asking)

    # -- instructions ----------------------------------------------------------------------------------------------

    def _obey(self, instructions: list[Instruction], gpu: str) -> None:
        touched = {gpu}
        for step in instructions:
            if step.gpu != gpu:
                touched.add(step.gpu)
            if isinstance(step, Grant):
                self._grant(step)
            elif isinstance(step, Move):
                self._move(step)
            elif isinstance(step, Revoke):
                self._revoke(step)
            elif isinstance(step, Stuck):
                self._mark_stuck(step)
            elif isinstance(step, Ended):
                hold = self._holds.get(step.gpu)
                if hold is not None and hold.tenant.name == step.tenant and hold.epoch == step.epoch:
                    del self._holds[step.gpu]
                self._on_turn(step)
                # the tenant still has work on the GPU, but its processes may not launch and therefore request no turn
                if step.reason == UNDRAINED:
                    self._loop.call_soon(self._wish_again, step.tenant)
        for touched_gpu in touched:
            self._flag_contention(touched_gpu)
            self._arm(touched_gpu)

    def _grant(self, step: Grant) -> None:
        tenant, turn = self._tenants[step.tenant], self.turns.gpus[step.gpu].turn
        if turn is not None and turn.epoch == step.epoch:
            if turn.paused_ns is None and not self._residents.ready(tenant, step.gpu):
                self.turns.gpus[step.gpu].pause(step.tenant, step.epoch, time.monotonic_ns())
                self.paused.put_nowait(PausedTurn(tenant, step.gpu, step.epoch))
            if turn.paused_ns is not None:
                return
        hold = self._holds.get(step.gpu)
        if hold is None or hold.epoch != step.epoch or hold.tenant is not tenant:
            hold = self._holds[step.gpu] = Hold(tenant, step.epoch, step.deadline_ns)
        gang = bool(tenant.share().gang)
        for session in list(tenant.sessions):
            for slot, gpu in session.slots.items():
                if gpu != step.gpu:
                    continue
                if session in hold.members:
                    # the process has this turn but requests one, so the grant is sent again
                    if slot in session.asking:
                        self._send_grant(session, slot, session.granted[slot], hold.deadline_ns)
                elif slot in session.asking or gang:
                    session.granted[slot] = self._next_epoch()
                    hold.members[session] = slot
                    self._send_grant(session, slot, self._wire_epoch, hold.deadline_ns)
                session.asking.discard(slot)
        if not hold.members:
            # the process that requested the turn has ended, or the tenant has several GPUs and does not use this GPU
            self._loop.call_soon(self._give_back_unused, hold, step.gpu)

    def _give_back_unused(self, hold: Hold, gpu: str) -> None:
        """Release a turn that no process of its tenant got, unless the tenant uses a turn on another of its GPUs."""
        elsewhere = any(h.tenant is hold.tenant and h.members for h in self._holds.values())
        if self._holds.get(gpu) is hold and not hold.members and not elsewhere:
            self._give_back(hold, gpu)

    def _give_back(self, hold: Hold, gpu: str) -> None:
        if self._holds.get(gpu) is not hold:
            return
        del self._holds[gpu]
        if hold.tenant.name in self.turns.gpus[gpu].accounts:
            out = self.turns.release(gpu, hold.tenant.name, hold.epoch, time.monotonic_ns(), None, "gone")
            self._obey(out, gpu)

    def _send_grant(self, session: Session, slot: int, epoch: int, deadline_ns: int) -> None:
        page = session.page.slots[slot]
        page.deadline_ns = deadline_ns
        page.inflight_allowed_ns = self._inflight_ns
        now_ns, tenant, gpu = time.monotonic_ns(), session.tenant, session.slots[slot]
        owed_ns = self.turns.gpus[gpu].patience_ns(tenant.name, now_ns)
        page.idle_release_ns = max(self._residents.patience_ns(tenant, gpu), owed_ns)
        page.epoch = epoch
        session.send(wire.pack_grant(0, slot, now_ns, epoch, deadline_ns, self._inflight_ns))

    def _move(self, step: Move) -> None:
        hold = self._holds.get(step.gpu)
        if hold is None or hold.epoch != step.epoch:
            return
        hold.deadline_ns = step.deadline_ns
        for session, slot in list(hold.members.items()):
            epoch = session.granted.get(slot)
            if epoch is not None:
                self._send_grant(session, slot, epoch, step.deadline_ns)

    def _revoke(self, step: Revoke) -> None:
        hold = self._holds.get(step.gpu)
        if hold is None or hold.epoch != step.epoch:
            return
        for session, slot in list(hold.members.items()):
            epoch = session.granted.get(slot)
            if epoch is not None:
                session.page.slots[slot].epoch = 0
                session.send(wire.pack(MessageType.TOKEN_REVOKE, {"epoch": epoch}, slot=slot))
        if not hold.members:
            self._loop.call_soon(self._give_back, hold, step.gpu)

    def _mark_stuck(self, step: Stuck) -> None:
        hold = self._holds.pop(step.gpu, None)
        if hold is not None:
            self._stuck[(step.gpu, step.tenant)] = hold
        text = (
            f"the tenant's GPU work did not end within {step.held_ns / 1e9:.1f} s of the start of its turn: a "
            "kernel hangs or waits; other tenants now run concurrently, and the time is charged to this tenant"
        )
        if step.tenant in self._tenants:
            self._on_fault(self._tenants[step.tenant], text)

    def _flag_contention(self, gpu: str) -> None:
        """Set or clear CONTENDED in the shared pages of the processes that have the turn. If it is set, because other
        tenants wait or the tenant's share has a limit, the processes return the turn as soon as they are idle.
        """
        hold = self._holds.get(gpu)
        if hold is None:
            return
        machine = self.turns.gpus[gpu]
        contended = machine.contended or machine.claim is not None or hold.tenant.spec.limit < 1.0
        # a tenant of several GPUs may be idle on one while it works on another, so its turn lasts until the deadline
        contended = contended and len(hold.tenant.gpus) == 1
        if contended == hold.contended:
            return
        hold.contended = contended
        for session, slot in list(hold.members.items()):
            page = session.page.slots[slot]
            flags = page.flags & ~SlotFlag.CONTENDED | (SlotFlag.CONTENDED if contended else 0)
            if flags != page.flags:
                page.flags = flags
                if contended:
                    session.send(wire.pack(MessageType.PAGE_UPDATE, slot=slot))

    # -- time ------------------------------------------------------------------------------------------------------

    def _arm(self, gpu: str) -> None:
        wake_ns = self.turns.wake_ns(gpu)
        armed = self._timers.get(gpu)
        if wake_ns is None or (armed is not None and armed[0] <= wake_ns):
            return  # the present timer calls `_wake` no later than `wake_ns`, and `_wake` sets the next timer
        if armed is not None:
            armed[1].cancel()
        self._timers[gpu] = (wake_ns, self._loop.call_at(wake_ns / 1e9, self._wake, gpu))

    def _wake(self, gpu: str) -> None:
        del self._timers[gpu]
        now_ns = time.monotonic_ns()
        # the next timer is set before the decision, so that it is set even if the decision raises an exception
        self._timers[gpu] = (now_ns + SAFETY_NS, self._loop.call_later(SAFETY_NS / 1e9, self._wake, gpu))
        wake_ns = self.turns.wake_ns(gpu)
        if wake_ns is not None and wake_ns <= now_ns:
            self._obey(self.turns.advance(gpu, now_ns), gpu)
        else:
            self._arm(gpu)

    def close(self) -> None:
        """Stop all timers of the broker."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
