"""Turns on one GPU as a pure state machine: events and time are its input, instructions its output. A *turn* is a time
slice that the agent grants to a tenant, its *holder*.

At most one tenant holds the GPU. Its turn has a deadline, at which the shim stops launching, waits until the work in
flight has ended, and releases the GPU. While no other tenant may run, the deadline is extended before it passes, so a
tenant that is alone never stops. After `alone_ns` without other tenants the turn is unbounded until another tenant
arrives. If a holder has not released the GPU `grace_ns` after its deadline, its turn is revoked (Revoke). After another
`stuck_ns` the GPU is granted to other tenants although the holder's kernels still run: user space cannot stop a running
kernel, but other tenants need not wait for it. The time that a holder uses after its deadline is charged to it.
"""

from __future__ import annotations

from cotenant.policy.shares.account import FREE, HELD, IDLE, Account, Crowd, Share, Window
from cotenant.policy.shares.disciplines import QuotaSettings, discipline
from cotenant.policy.shares.instructions import Claim, Ended, Grant, Instruction, Move, Revoke, Stuck
from cotenant.policy.shares.line import Line
from cotenant.policy.shares.turn import LONG_WINDOW, UNDRAINED, Turn

PAUSE_SEEN_NS = 2_000_000  # a pause of a tenant (a short time without work) is noticed at most this long after it began


class GpuTurns:
    """The turns of one GPU. Every event method returns instructions; `wake_ns` says when `advance` is due next."""

    def __init__(self, gpu: str, settings: QuotaSettings) -> None:
        self.gpu = gpu
        self.accounts: dict[str, Account] = {}
        self.turn: Turn | None = None
        self.overrun: dict[str, Turn] = {}
        self.claim: str | None = None
        self.crowd = Crowd()
        self._epoch = 0
        self._line = Line(discipline(settings.discipline))
        self._served_floor = 0.0
        self.configure(settings)

    def configure(self, settings: QuotaSettings) -> None:
        """Apply new settings. The current turn keeps its deadline."""
        self.settings = settings
        self._rule = discipline(settings.discipline)
        self._set_window(settings.window_ns)
        self._line.rank_again(self.accounts.values(), self._rule)

    def _set_window(self, window_ns: int) -> None:
        self.window_ns = window_ns
        for account in self.accounts.values():
            account.window.window_ns = window_ns

    # -- membership ------------------------------------------------------------------------------------------------

    def join(self, name: str, share: Share, now_ns: int) -> list[Instruction]:
        """Add a tenant to the GPU. It counts as if it had had exactly its share before it joined, so it has no claim to
        more and no debt.
        """
        if name in self.accounts:
            return self.resize(name, share, now_ns)
        account = Account(name, share, Window(self.window_ns), self.crowd)
        account.idle_since_ns = now_ns - self.window_ns
        self.accounts[name] = account
        return []

    def resize(self, name: str, share: Share, now_ns: int) -> list[Instruction]:
        """Change a tenant's share. It applies at once to the whole sliding window, which lies in the past."""
        self.accounts[name].share = share
        self._line.rank_again(self.accounts.values(), self._rule)
        turn = self.turn
        out: list[Instruction] = []
        held = turn is not None and turn.account.name == name and turn.revoked_ns is None
        if turn is not None and held and turn.account.budget_ns(now_ns) <= 0:
            self._revoke(turn, now_ns, "limit", out)
        return self._settle(now_ns, out)

    def leave(self, name: str, now_ns: int) -> list[Instruction]:
        """Remove a tenant in any state, and end its turn."""
        account, out = self.accounts.pop(name, None), list[Instruction]()
        if account is None:
            return out
        account.waiting = False
        account.ticket = 0
        if account.idle_since_ns is None:
            self._idle(account, now_ns)
        if self.claim == name:
            self.claim = None
        turn = self.overrun.pop(name, None)
        if turn is not None:
            out.append(self._ended(turn, now_ns, "gone"))
        if self.turn is not None and self.turn.account is account:
            turn, self.turn = self.turn, None
            out.append(self._ended(turn, now_ns, "gone"))
        return self._settle(now_ns, out)

    # -- requests and releases -------------------------------------------------------------------------------------

    def request(self, name: str, now_ns: int, burst_ns: int = 0) -> list[Instruction]:
        """Called when a tenant wants to launch work. It gets a Grant now or later. A repeated request has no effect."""
        account = self.accounts[name]
        if burst_ns > 0:
            account.burst_ns = burst_ns
        turn = self.turn
        if turn is not None and turn.account is account and turn.revoked_ns is None and now_ns < turn.deadline_ns:
            return [Grant(self.gpu, name, turn.epoch, turn.deadline_ns)]
        if account.waiting:
            return []
        self._enqueue(account, now_ns)
        return self._settle(now_ns, [])

    def withdraw(self, name: str, now_ns: int) -> list[Instruction]:
        """Cancel a tenant's pending request for a turn."""
        account = self.accounts.get(name)
        if account is None or not account.waiting:
            return []
        account.waiting = False
        account.ticket = 0
        if account.turn_start_ns is None:
            self._idle(account, now_ns)
        if self.claim == name:
            self.claim = None
        return self._settle(now_ns, [])

    def release(
        self,
        name: str,
        epoch: int,
        now_ns: int,
        drained_ns: int | None = None,
        reason: str = "released",
        again: bool = False,
    ) -> list[Instruction]:
        """Called when the holder's work has ended. Calls for another epoch than the current one (late or repeated ones)
        are ignored.

        `drained_ns`: when the work ended, as the holder reports; time until then is charged, within the bounds of the
        turn. `again`: the tenant already wants its next turn. It enters the line before the GPU is granted again.
        """
        turn = self.turn
        if turn is None or turn.account.name != name or turn.epoch != epoch:
            turn = self.overrun.get(name)
            if turn is None or turn.epoch != epoch:
                return []
            del self.overrun[name]
        else:
            self.turn = None
        end_ns = now_ns if drained_ns is None else max(turn.start_ns, min(drained_ns, now_ns))
        if turn.reason and reason == "released":
            reason = turn.reason
        out: list[Instruction] = [self._ended(turn, end_ns, reason)]
        if again:
            self._enqueue(turn.account, now_ns)
        return self._settle(now_ns, out)

    def advance(self, now_ns: int) -> list[Instruction]:
        """Apply what is due at the present time, such as the end of the turn."""
        return self._settle(now_ns, [])

    def grant_gang(self, name: str, now_ns: int, deadline_ns: int) -> list[Instruction]:
        """Grant this GPU to the gang that claimed it. The caller has checked that all GPUs of the gang are free."""
        self.claim = None
        out: list[Instruction] = []
        self._end_undrained(now_ns, out)
        self._grant(self.accounts[name], now_ns, deadline_ns - now_ns, out)
        return out

    def grant_next(self, now_ns: int, skip: frozenset[str] = frozenset()) -> list[Instruction]:
        """Grant the GPU, if it is free, to the waiting tenant of the best rank. The gangs in `skip`, which cannot get
        all their GPUs now, are left out."""
        out: list[Instruction] = []
        self._grant_next(now_ns, out, skip)
        return out

    def grant_until(self, now_ns: int, until_ns: int, skip: frozenset[str]) -> list[Instruction]:
        """Use the time until a gang gets this GPU: grant a turn that ends by then, if the time suffices for a turn."""
        out: list[Instruction] = []
        if self.turn is None and until_ns - now_ns >= self.settings.min_quota_ns:
            account = self._line.best(now_ns, self.overrun, skip)
            if account is not None:
                self._grant(account, now_ns, min(self.quota_ns(account.name), until_ns - now_ns), out)
        return out

    def stop_turn(self, name: str, now_ns: int, reason: str, began_ns: int | None = None) -> list[Instruction]:
        """End a tenant's turn early, because its gang lost another GPU or the tenant is being stopped. `began_ns`: only
        if the turn did not begin later than this.
        """
        out: list[Instruction] = []
        turn = self.turn
        if began_ns is not None and turn is not None and turn.start_ns > began_ns:
            return out
        if turn is not None and turn.account.name == name and turn.revoked_ns is None:
            self._revoke(turn, now_ns, reason, out)
        return out

    def pause(self, name: str, epoch: int, now_ns: int) -> None:
        """Called when the turn that was just granted waits until its tenant's memory is on the GPU. The time of the
        turn does not run until `resume`.
        """
        if self.turn is not None and self.turn.account.name == name and self.turn.epoch == epoch:
            self.turn.paused_ns = now_ns

    def resume(self, name: str, epoch: int, now_ns: int, floor_ns: int) -> list[Instruction]:
        """Called when the tenant's memory is on the GPU. Returns the grant with a later deadline, at least `floor_ns`
        from now."""
        turn = self.turn
        if turn is None or turn.account.name != name or turn.epoch != epoch or turn.revoked_ns is not None:
            return []
        self._set_window(max(self.settings.window_ns, LONG_WINDOW * floor_ns))
        turn.resume(now_ns, floor_ns, self.window_ns)
        return [Grant(self.gpu, name, epoch, turn.deadline_ns)]

    def quota_ns(self, name: str) -> int:
        """Return the length of a tenant's next turn."""
        return self._rule.quota(self.accounts[name], self.settings)

    def patience_ns(self, name: str, now_ns: int) -> int:
        """Return how long a holder that is idle should keep its turn because it has used less than its request; 0: no
        longer than other holders.

        A tenant that pauses briefly in each step would lose a whole turn to another tenant at every pause, and so would
        not get its request. A tenant that has used less than its request and whose last pause was short therefore keeps
        the GPU during a pause for up to one and a half times as long as the last one.
        """
        account = self.accounts[name]
        patience_ns = account.gap_ns + account.gap_ns // 2
        short = patience_ns <= self.settings.quota_ns // 4
        return patience_ns + PAUSE_SEEN_NS if short and self._rule.owed(account, now_ns) else 0

    def wake_ns(self) -> int | None:
        """Return when `advance` must be called next; None: only an event can change anything."""
        times: list[int] = []
        turn = self.turn
        if turn is not None:
            given_up_ns = turn.given_up_ns(self.settings.stuck_ns)
            if given_up_ns is not None:
                held_up = self.claim is not None or self._line.has_ready(self.overrun)
                if held_up or turn.account.share.gang:
                    times.append(given_up_ns)
            elif turn.paused_ns is not None or turn.endless:
                pass
            elif turn.final:
                times.append(turn.deadline_ns + self.settings.grace_ns)
            else:
                times.append(turn.deadline_ns - turn.margin_ns)
        limit_ns = self._line.wake_ns()
        if limit_ns is not None:
            times.append(limit_ns)
        return min(times) if times else None

    @property
    def contended(self) -> bool:
        """Whether a tenant that has not reached its limit is waiting."""
        return bool(self._line)

    # -- the machine -----------------------------------------------------------------------------------------------

    def _settle(self, now_ns: int, out: list[Instruction]) -> list[Instruction]:
        turn = self.turn
        if turn is not None:
            self._check_turn(turn, now_ns, out)
        if self.turn is None:
            self._grant_next(now_ns, out, frozenset())
        return out

    def _check_turn(self, turn: Turn, now_ns: int, out: list[Instruction]) -> None:
        challenger = self._line.best(now_ns, self.overrun)
        waited_for = challenger is not None or self.claim is not None
        if waited_for and turn.account.contended_ns is None:
            # the part of the turn before another tenant waited is charged, too, unless it is above the idle credit
            alone = now_ns - turn.start_ns > self.settings.idle_credit_ns
            turn.account.contended_ns = now_ns if alone else turn.start_ns
        given_up_ns = turn.given_up_ns(self.settings.stuck_ns)
        if given_up_ns is not None:
            if now_ns >= given_up_ns and turn.account.share.gang:
                self._end_undrained(now_ns, out)
            elif now_ns >= given_up_ns and waited_for:
                self.turn = None
                turn.reason = "stuck"
                self.overrun[turn.account.name] = turn
                out.append(Stuck(self.gpu, turn.account.name, turn.epoch, now_ns - turn.start_ns))
            return
        if turn.paused_ns is not None:
            return
        yields = self.claim is not None or (challenger is not None and not self._outranks(turn, challenger, now_ns))
        keeps_ns = turn.quota_ns
        if challenger is not None:
            keeps_ns = self._rule.keeps(turn.account, challenger, turn.quota_ns, self.settings, now_ns)
        # keeps_ns == 0: a tenant of higher priority preempts the holder at once, even if memory was moved for this turn
        if keeps_ns:
            keeps_ns = max(keeps_ns, turn.floor_ns)
        due_ns = turn.start_ns + turn.moved_ns + keeps_ns
        if yields and turn.deadline_ns > max(due_ns, now_ns):
            # a tenant that precedes the holder is waiting, so the turn must end at `due_ns`, before its deadline
            if due_ns <= now_ns:
                self._revoke(turn, now_ns, "contended" if keeps_ns else "preempted", out)
            else:
                turn.deadline_ns = due_ns
                out.append(Move(self.gpu, turn.account.name, turn.epoch, due_ns))
        elif turn.endless and not turn.may_be_endless(now_ns, self.settings.alone_ns):
            self._end_or_extend(turn, yields, now_ns, out)
        elif not turn.final and turn.deadline_ns - turn.margin_ns <= now_ns:
            # The turn is extended even if this call comes after the deadline: if no other tenant waits, the holder must
            # not be charged for a late call.
            self._end_or_extend(turn, yields, now_ns, out)
        elif now_ns >= turn.deadline_ns + self.settings.grace_ns:
            self._revoke(turn, now_ns, "expired", out)

    def _outranks(self, turn: Turn, challenger: Account, now_ns: int) -> bool:
        """Whether the holder, if it requested a turn now, would rank before the best waiting tenant."""
        holder = turn.account
        holder.requested_ns = now_ns
        return self._rule.rank(holder, now_ns) < self._rule.rank(challenger, now_ns)

    def _end_or_extend(self, turn: Turn, yields: bool, now_ns: int, out: list[Instruction]) -> None:
        """Called shortly before a deadline, or when an unbounded turn needs a deadline: extend the turn if no other
        tenant precedes the holder and its limit allows it.
        """
        turn.final = True
        deadline_ns = None if yields else turn.next_deadline_ns(now_ns, self.settings.alone_ns)
        if deadline_ns is not None:
            turn.final = False
            turn.deadline_ns = deadline_ns
            out.append(Move(self.gpu, turn.account.name, turn.epoch, deadline_ns))
        elif not yields and not turn.account.share.gang:
            turn.reason = "limit"

    def _revoke(self, turn: Turn, now_ns: int, reason: str, out: list[Instruction]) -> None:
        turn.revoked_ns = now_ns
        turn.reason = reason
        turn.deadline_ns = min(turn.deadline_ns, now_ns)
        out.append(Revoke(self.gpu, turn.account.name, turn.epoch, reason))

    def _grant_next(self, now_ns: int, out: list[Instruction], skip: frozenset[str]) -> None:
        if self.claim is not None or self.turn is not None:
            return
        account = self._line.best(now_ns, self.overrun, skip)
        if account is None:
            return
        if account.share.gang:
            out.append(Claim(self.gpu, account.name))
            return
        self._grant(account, now_ns, self._rule.quota(account, self.settings), out)

    def _grant(self, account: Account, now_ns: int, quota_ns: int, out: list[Instruction]) -> None:
        assert self.turn is None, "a turn is granted while another tenant has one on this GPU"
        waited_ns = max(0, now_ns - account.requested_ns)
        account.waiting = False
        account.ticket = 0
        account.waited_ns += waited_ns
        account.quota_ns = quota_ns
        account.turn_start_ns = now_ns
        account.contended_ns = now_ns if self._line.best(now_ns, self.overrun) is not None else None
        self._epoch += 1
        self._served_floor = max(self._served_floor, account.served)
        self.turn = Turn(account, self._epoch, now_ns, quota_ns, now_ns + quota_ns, waited_ns)
        out.append(Grant(self.gpu, account.name, self._epoch, now_ns + quota_ns))

    def _end_undrained(self, now_ns: int, out: list[Instruction]) -> None:
        """End a gang's turn although its work has not ended. The work ends in a later turn of the gang, and runs
        concurrently with other tenants' work until then.
        """
        turn, self.turn = self.turn, None
        if turn is not None:
            out.append(self._ended(turn, now_ns, UNDRAINED))

    def _ended(self, turn: Turn, end_ns: int, reason: str) -> Ended:
        account = turn.account
        held_ns = end_ns - turn.start_ns
        contended_ns = end_ns if account.contended_ns is None else min(account.contended_ns, end_ns)
        # Time in which no other tenant waited is not counted. Otherwise a tenant that arrives minutes later would be
        # compensated for it.
        account.served += (end_ns - contended_ns) / account.weight
        account.window.add(turn.start_ns, contended_ns, FREE)
        account.window.add(contended_ns, end_ns, HELD)
        account.turn_start_ns = account.contended_ns = None
        account.turns += 1
        account.held_ns += held_ns
        account.overrun_ns += max(0, end_ns - turn.deadline_ns)
        if not account.waiting and account.idle_since_ns is None:
            self._idle(account, end_ns)
        return Ended(self.gpu, account.name, turn.epoch, turn.start_ns, end_ns, turn.quota_ns, turn.waited_ns, reason)

    # -- the line --------------------------------------------------------------------------------------------------

    def _enqueue(self, account: Account, now_ns: int) -> None:
        if account.waiting:
            return
        account.waiting = True
        account.requested_ns = now_ns
        if account.idle_since_ns is not None:
            # Idle time beyond the credit counts as used. Otherwise a tenant could sleep, collect a claim, and then
            # delay the others.
            account.window.add(account.idle_since_ns, now_ns - self.settings.idle_credit_ns, IDLE)
            account.gap_ns = now_ns - account.idle_since_ns
            account.idle_since_ns = None
            self.crowd.enter(now_ns)
            account.served = max(account.served, self._served_floor)
        self._line.push(account, now_ns)

    def _idle(self, account: Account, since_ns: int) -> None:
        account.idle_since_ns = since_ns
        self.crowd.leave(since_ns)
