"""Turns on all GPUs of a node: a state machine per GPU, and gangs, tenants that hold several GPUs at the same time or
none.

A *turn* is a time slice on a GPU that the agent grants to a tenant, its *holder*. Ranks of one collective spin on the
GPU until their peers run, so a gang with only some of its GPUs would block itself and the other tenants there. A gang
that is first in line on one of its GPUs *claims* all of them: no new turn starts there, current turns end at their
regular length, and once all are free, the gang gets them in one step. No two gangs claim the same GPU, so there is no
deadlock. A claimed GPU that is already free is lent to another tenant until the last turn on the gang's other GPUs
ends, if that is at least a minimum turn away; otherwise it stays idle.
"""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.policy.shares.account import Share
from cotenant.policy.shares.disciplines import QuotaSettings, discipline
from cotenant.policy.shares.instructions import Claim, Ended, Instruction, Revoke, Stuck
from cotenant.policy.shares.turns import GpuTurns


class NodeTurns:
    """The turns of all GPUs of a node. Each event names one GPU. If it concerns a gang (a tenant that holds several
    GPUs together), the returned instructions may also be for the gang's other GPUs.
    """

    def __init__(self, gpus: Iterable[str], settings: QuotaSettings) -> None:
        self.settings = settings
        self.gpus: dict[str, GpuTurns] = {gpu: GpuTurns(gpu, settings) for gpu in gpus}
        self._gangs: dict[str, tuple[str, ...]] = {}

    def configure(self, settings: QuotaSettings, now_ns: int) -> list[Instruction]:
        """Apply new settings of turns on every GPU."""
        self.settings = settings
        out: list[Instruction] = []
        for machine in self.gpus.values():
            machine.configure(settings)
            out += machine.advance(now_ns)
        return self._finish(out, now_ns)

    def join(self, gpu: str, name: str, share: Share, now_ns: int) -> list[Instruction]:
        """Give a tenant an account on one GPU, or change its share there."""
        if share.gang:
            if gpu not in share.gang or any(member not in self.gpus for member in share.gang):
                raise ValueError(f"the gang of {name} names GPUs that are not on this node, or does not include {gpu}")
            self._gangs[name] = share.gang
        else:
            self._gangs.pop(name, None)
        return self._finish(self.gpus[gpu].join(name, share, now_ns), now_ns)

    def leave(self, gpu: str, name: str, now_ns: int) -> list[Instruction]:
        """Remove a tenant from one GPU; a gang is removed from all of its GPUs."""
        members = self._gangs.pop(name, (gpu,))
        out: list[Instruction] = []
        for member in members:
            out += self.gpus[member].leave(name, now_ns)
        return self._finish(out, now_ns)

    def request(self, gpu: str, name: str, now_ns: int, burst_ns: int = 0) -> list[Instruction]:
        """Called when a tenant wants to run on this GPU. If the tenant is a gang, it then requests all of its GPUs."""
        members = self._gangs.get(name)
        if members is None:
            out = self.gpus[gpu].request(name, now_ns, burst_ns)
            return self._finish(out, now_ns) if self._gangs else out
        out = self.gpus[gpu].request(name, now_ns, burst_ns)
        if self.gpus[gpu].accounts[name].waiting:
            for member in members:
                if member != gpu and name in self.gpus[member].accounts:
                    out += self.gpus[member].request(name, now_ns, burst_ns)
        return self._finish(out, now_ns)

    def withdraw(self, gpu: str, name: str, now_ns: int) -> list[Instruction]:
        """Cancel a tenant's pending request for a GPU."""
        out: list[Instruction] = []
        for member in self._gangs.get(name, (gpu,)):
            out += self.gpus[member].withdraw(name, now_ns)
        return self._finish(out, now_ns)

    def release(
        self,
        gpu: str,
        name: str,
        epoch: int,
        now_ns: int,
        drained_ns: int | None = None,
        reason: str = "released",
        again: bool = False,
    ) -> list[Instruction]:
        """Called when the work of the tenant that holds this GPU has ended (see GpuTurns.release)."""
        out = self.gpus[gpu].release(name, epoch, now_ns, drained_ns, reason, again)
        for member in self._gangs.get(name, ()):
            if member != gpu and name in self.gpus[member].accounts:
                out += self.gpus[member].stop_turn(name, now_ns, "gang")
                if again:
                    out += self.gpus[member].request(name, now_ns)
        return self._finish(out, now_ns) if self._gangs else out

    def advance(self, gpu: str, now_ns: int) -> list[Instruction]:
        """Apply what is due on one GPU at the present time, such as the end of a turn."""
        out = self.gpus[gpu].advance(now_ns)
        return self._finish(out, now_ns) if self._gangs else out

    def wake_ns(self, gpu: str) -> int | None:
        """Return when `advance` must be called for that GPU; None: not before another event."""
        return self.gpus[gpu].wake_ns()

    def line(self, gpu: str, now_ns: int) -> list[str]:
        """Return the tenants that wait for a GPU, in the order in which they would be chosen now."""
        rank = discipline(self.settings.discipline).rank
        waiting = [account for account in self.gpus[gpu].accounts.values() if account.waiting]
        return [account.name for account in sorted(waiting, key=lambda a: (rank(a, now_ns), a.ticket))]

    def holders(self) -> dict[str, str]:
        """Return for each GPU the tenant that holds it now."""
        return {gpu: m.turn.account.name for gpu, m in self.gpus.items() if m.turn is not None}

    # -- gangs -----------------------------------------------------------------------------------------------------

    def _finish(self, out: list[Instruction], now_ns: int) -> list[Instruction]:
        """Carry out what `out`, the instructions for one GPU, means for gangs, and return all instructions. If a gang's
        turn ends on one GPU, it ends on the gang's other GPUs, too. If a gang is first in line on a GPU (Claim), it
        claims all its GPUs, and gets them together as soon as all are free.
        """
        if not self._gangs and not any(isinstance(step, Claim) for step in out):
            return out
        done: list[Instruction] = []
        queue = list(out)
        while queue:
            step = queue.pop(0)
            if isinstance(step, Claim):
                queue += self._gather(step, now_ns)
            else:
                done.append(step)
                if isinstance(step, Ended | Revoke | Stuck):
                    began_ns = step.start_ns if isinstance(step, Ended) else None
                    for member in self._gangs.get(step.tenant, ()):
                        if member != step.gpu:
                            queue += self.gpus[member].stop_turn(step.tenant, now_ns, "gang", began_ns)
            if not queue:
                queue += self._grant_gathered(now_ns)
        return done

    def _gather(self, claim: Claim, now_ns: int) -> list[Instruction]:
        members = self._gangs[claim.tenant]
        out: list[Instruction] = []
        accounts = [self.gpus[m].accounts.get(claim.tenant) for m in members]
        ready = all(account is not None and account.waiting for account in accounts)
        if not ready or any(self.gpus[m].claim not in (None, claim.tenant) for m in members):
            machine = self.gpus[claim.gpu]
            return machine.grant_next(now_ns, skip=frozenset(self._gangs))
        for member in members:
            self.gpus[member].claim = claim.tenant
        for member in members:
            out += self.gpus[member].advance(now_ns)
        return out + self._grant_gathered(now_ns)

    def _grant_gathered(self, now_ns: int) -> list[Instruction]:
        out: list[Instruction] = []
        for name, members in self._gangs.items():
            machines = [self.gpus[m] for m in members]
            if any(m.claim != name for m in machines):
                continue
            held = [m.turn for m in machines if m.turn is not None and m.turn.account.name != name]
            if held:
                until_ns = min(turn.deadline_ns for turn in held)
                for machine in machines:
                    out += machine.grant_until(now_ns, until_ns, frozenset(self._gangs))
                continue
            deadline_ns = now_ns + min(m.quota_ns(name) for m in machines)
            for machine in machines:
                out += machine.grant_gang(name, now_ns, deadline_ns)
        return out
