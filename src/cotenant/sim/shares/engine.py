"""Simulates tenants of GPUs in virtual time, with the same policy object that grants turns in the agent. A *turn* is a
time slice that the agent grants to a tenant, its holder.

Each tenant alternates between GPU work and pauses. The work consists of kernels that cannot be preempted: a kernel that
runs at the end of a turn completes, and the additional time is charged to the tenant, as on hardware. Deterministic;
times are in nanoseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cotenant.policy.shares import (
    Ended,
    Grant,
    Instruction,
    Move,
    NodeTurns,
    QuotaSettings,
    Revoke,
    Share,
    Stuck,
)


@dataclass(frozen=True)
class Load:
    """A simulated tenant with its share and behaviour. It runs `busy_ns` of GPU time in kernels of `kernel_ns`, pauses
    for `pause_ns`, and repeats; with `busy_ns` None it never pauses. It arrives at `start_ns` and leaves (or dies
    without a message) at `stop_ns`. `hangs_ns`: from this time on its kernel does not end.
    """

    name: str
    share: Share
    gpus: tuple[str, ...] = ("0",)
    kernel_ns: int = 2_000_000
    busy_ns: int | None = None
    pause_ns: int = 0
    start_ns: int = 0
    stop_ns: int | None = None
    hangs_ns: int | None = None
    idle_release_ns: int = 2_000_000


@dataclass
class TokenResult:
    """The turns (time slices that the agent grants) and the GPU work of a simulated run. `worked`: (tenant, gpu,
    start_ns, end_ns) of GPU work. A turn that has not ended has the reason "open", and is replaced if `run` is called
    again.
    """

    turns: list[Ended] = field(default_factory=list)
    worked: list[tuple[str, str, int, int]] = field(default_factory=list)
    stuck: list[Stuck] = field(default_factory=list)
    events: int = 0
    end_ns: int = 0

    def held_ns(self, tenant: str, start_ns: int, end_ns: int, gpu: str | None = None) -> int:
        """Return how long a tenant held GPUs within [start, end)."""
        return sum(
            max(0, min(t.end_ns, end_ns) - max(t.start_ns, start_ns))
            for t in self.turns
            if t.tenant == tenant and (gpu is None or t.gpu == gpu)
        )

    def shares(self, start_ns: int, end_ns: int) -> dict[str, float]:
        """Return the fraction of [start, end) for which each tenant held a GPU, summed over GPUs."""
        names = dict.fromkeys(t.tenant for t in self.turns)
        return {name: self.held_ns(name, start_ns, end_ns) / (end_ns - start_ns) for name in names}


class _Tenant:
    """The state of one tenant on one GPU."""

    def __init__(self, load: Load, gpu: str) -> None:
        self.load = load
        self.gpu = gpu
        self.left_ns = load.busy_ns
        self.epoch = 0
        self.deadline_ns = 0
        # time at which the tenant's current sequence of kernels without a pause began; None: no kernel runs
        self.working_ns: int | None = None
        self.wants = False
        self.alive = False
        self.stamp = 0


class TokenEngine:
    """Simulates the tenants of a node's GPUs with the policy object NodeTurns, which is available as `self.broker`.
    `run` returns a TokenResult.
    """

    def __init__(self, loads: Iterable[Load], settings: QuotaSettings, gpus: Iterable[str] = ("0",)) -> None:
        self.broker = NodeTurns(gpus, settings)
        self.result = TokenResult()
        self._tenants = {(load.name, gpu): _Tenant(load, gpu) for load in loads for gpu in load.gpus}
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._wakes: dict[str, int] = {}
        self.now_ns = 0
        for tenant in self._tenants.values():
            self._at(tenant.load.start_ns, self._come, tenant)
            if tenant.load.stop_ns is not None:
                self._at(tenant.load.stop_ns, self._die, tenant)

    def run(self, until_ns: int) -> TokenResult:
        """Simulate until the time `until_ns`. It may be called again to continue."""
        self.result.turns = [turn for turn in self.result.turns if turn.reason != "open"]
        while self._queue and self._queue[0][0] <= until_ns:
            self.now_ns, _, call, arguments = heapq.heappop(self._queue)
            self.result.events += 1
            call(*arguments)
        self.now_ns = self.result.end_ns = until_ns
        for gpu, machine in self.broker.gpus.items():
            for turn in filter(None, (machine.turn, *machine.overrun.values())):
                open_turn = Ended(
                    gpu, turn.account.name, turn.epoch, turn.start_ns, until_ns, turn.quota_ns, turn.waited_ns, "open"
                )
                self.result.turns.append(open_turn)
        return self.result

    def worked_ns(self, name: str) -> int:
        """Return the GPU time that a tenant's kernels have taken until now, including the running one, summed over
        GPUs."""
        ended = sum(end_ns - start_ns for tenant, _, start_ns, end_ns in self.result.worked if tenant == name)
        started = (t.working_ns for (tenant, _), t in self._tenants.items() if tenant == name)
        return ended + sum(self.now_ns - start_ns for start_ns in started if start_ns is not None)

    def waits_ns(self, name: str, gpu: str) -> int:
        """Return how long a tenant has been waiting for its next turn; 0 if it does not wait."""
        account = self.broker.gpus[gpu].accounts.get(name)
        return self.now_ns - account.requested_ns if account is not None and account.waiting else 0

    def change(self, at_ns: int, name: str, share: Share) -> None:
        """Change a tenant's share at a given time, as `cotenant set` does."""
        for tenant, gpu in self._tenants:
            if tenant == name:
                self._at(at_ns, self._resize, gpu, name, share)

    # -- events ----------------------------------------------------------------------------------------------------

    def _at(self, at_ns: int, call: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (at_ns, self._serial, call, arguments))

    def _come(self, tenant: _Tenant) -> None:
        tenant.alive = True
        load = tenant.load
        self._obey(self.broker.join(tenant.gpu, load.name, load.share, self.now_ns))
        # the request is not made at once, so that the tenant joins all GPUs of a gang first
        self._at(self.now_ns, self._want, tenant)

    def _die(self, tenant: _Tenant) -> None:
        tenant.alive = False
        tenant.stamp += 1
        if tenant.load.name in self.broker.gpus[tenant.gpu].accounts:
            self._obey(self.broker.leave(tenant.gpu, tenant.load.name, self.now_ns))

    def _resize(self, gpu: str, name: str, share: Share) -> None:
        if name in self.broker.gpus[gpu].accounts:
            self._obey(self.broker.gpus[gpu].resize(name, share, self.now_ns))

    def _want(self, tenant: _Tenant) -> None:
        if not tenant.alive:
            return
        tenant.wants = True
        if tenant.epoch and self.now_ns < tenant.deadline_ns:
            self._work(tenant)
            return
        if not tenant.epoch:
            burst_ns = tenant.load.busy_ns or 0
            self._obey(self.broker.request(tenant.gpu, tenant.load.name, self.now_ns, burst_ns))

    def _work(self, tenant: _Tenant) -> None:
        """Let the simulated tenant run kernels without a pause, if its turn on the GPU still allows it."""
        if tenant.working_ns is not None or not tenant.alive or not tenant.epoch:
            return
        if self.now_ns >= tenant.deadline_ns:
            self._give_back(tenant, "released")
            return
        tenant.working_ns = self.now_ns
        tenant.stamp += 1
        if tenant.left_ns is not None:
            self._at(self.now_ns + tenant.left_ns, self._busy_ends, tenant, tenant.stamp)

    def _stop_work(self, tenant: _Tenant) -> None:
        assert tenant.working_ns is not None
        self.result.worked.append((tenant.load.name, tenant.gpu, tenant.working_ns, self.now_ns))
        if tenant.left_ns is not None:
            tenant.left_ns -= self.now_ns - tenant.working_ns
        tenant.working_ns = None
        tenant.stamp += 1

    def _busy_ends(self, tenant: _Tenant, stamp: int) -> None:
        load = tenant.load
        if stamp != tenant.stamp or (load.hangs_ns is not None and self.now_ns > load.hangs_ns):
            return
        self._stop_work(tenant)
        tenant.left_ns = load.busy_ns
        if load.pause_ns > 0:
            tenant.wants = False
            self._at(self.now_ns + load.pause_ns, self._want, tenant)
            self._at(self.now_ns + self._idle_release_ns(tenant), self._idle, tenant, tenant.epoch, tenant.stamp)
        if self.now_ns >= tenant.deadline_ns:
            self._give_back(tenant, "released")
        elif tenant.wants:
            self._work(tenant)

    def _idle(self, tenant: _Tenant, epoch: int, stamp: int) -> None:
        if tenant.epoch == epoch and tenant.stamp == stamp and not tenant.wants and tenant.working_ns is None:
            self._give_back(tenant, "idle")

    def _deadline(self, tenant: _Tenant, epoch: int) -> None:
        """Apply the passed deadline of a turn: the tenant launches nothing more, and its running kernel completes."""
        if tenant.epoch != epoch or self.now_ns < tenant.deadline_ns:
            return
        if tenant.working_ns is None:
            self._give_back(tenant, "released")
            return
        load = tenant.load
        kernels = max(1, -(-(self.now_ns - tenant.working_ns) // load.kernel_ns))
        drained_ns = tenant.working_ns + kernels * load.kernel_ns
        if tenant.left_ns is not None:
            drained_ns = min(drained_ns, tenant.working_ns + tenant.left_ns)
        if load.hangs_ns is None or drained_ns <= load.hangs_ns:
            self._at(drained_ns, self._drained, tenant, tenant.stamp)

    def _drained(self, tenant: _Tenant, stamp: int) -> None:
        if stamp == tenant.stamp and tenant.alive:
            self._stop_work(tenant)
            if tenant.left_ns is not None and tenant.left_ns <= 0:
                tenant.left_ns = tenant.load.busy_ns
            self._give_back(tenant, "released")

    def _give_back(self, tenant: _Tenant, reason: str) -> None:
        epoch, tenant.epoch = tenant.epoch, 0
        self._obey(
            self.broker.release(
                tenant.gpu, tenant.load.name, epoch, self.now_ns, self.now_ns, reason, again=tenant.wants
            )
        )

    def _advance(self, gpu: str, at_ns: int) -> None:
        if self._wakes.get(gpu) == at_ns:
            del self._wakes[gpu]
            self._obey(self.broker.advance(gpu, self.now_ns))

    def _obey(self, instructions: list[Instruction]) -> None:
        for step in instructions:
            if isinstance(step, Ended):
                self.result.turns.append(step)
                continue
            if isinstance(step, Stuck):
                self.result.stuck.append(step)
                continue
            tenant = self._tenants[(step.tenant, step.gpu)]
            if isinstance(step, Grant):
                if not self._may_begin(tenant, step):
                    continue
                tenant.epoch, tenant.deadline_ns = step.epoch, step.deadline_ns
                self._at(step.deadline_ns, self._deadline, tenant, step.epoch)
                self._at(self.now_ns, self._work if tenant.wants else self._idle_grant, tenant)
            elif isinstance(step, Move) and tenant.epoch == step.epoch:
                tenant.deadline_ns = step.deadline_ns
                self._at(step.deadline_ns, self._deadline, tenant, step.epoch)
            elif isinstance(step, Revoke) and tenant.epoch == step.epoch:
                tenant.deadline_ns = min(tenant.deadline_ns, self.now_ns)
                self._at(self.now_ns, self._deadline, tenant, step.epoch)
        for gpu, machine in self.broker.gpus.items():
            wake_ns = machine.wake_ns()
            if wake_ns is not None and self._wakes.get(gpu) != wake_ns:
                at_ns = max(wake_ns, self.now_ns)
                self._wakes[gpu] = at_ns
                self._at(at_ns, self._advance, gpu, at_ns)

    def _may_begin(self, tenant: _Tenant, grant: Grant) -> bool:
        """Whether a tenant's turn begins at the moment when it is granted. A subclass returns False if the tenant's
        memory must be moved first.
        """
        return True

    def _idle_release_ns(self, tenant: _Tenant) -> int:
        """Return how long in ns a tenant that has become idle keeps its turn."""
        patience_ns = self.broker.gpus[tenant.gpu].patience_ns(tenant.load.name, self.now_ns)
        return max(tenant.load.idle_release_ns, patience_ns)

    def _idle_grant(self, tenant: _Tenant) -> None:
        """Begin the turn of a gang (a tenant of several GPUs) on a GPU where its process has nothing to do: the process
        holds the turn until the gang's other processes are done.
        """
