"""One turn on a GPU: its holder, start, deadline, and the time of it spent on moving memory."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.policy.shares.account import Account

LONG_WINDOW = 10  # number of turns that pay for a move: shares then hold over a window of as many turns
MARGIN_NS = 20_000_000  # how long before a deadline its extension is decided
ENDLESS_NS = 2**64 - 1  # the deadline of an unbounded turn, which lasts until another tenant arrives
GANG_DRAIN_NS = 50_000_000  # time after which unfinished work is assumed to wait for the gang's other GPUs
UNDRAINED = "undrained"  # reason of the end of such a gang's turn


@dataclass(eq=False)
class Turn:
    """Holder, start and deadline of a turn."""

    account: Account
    epoch: int
    start_ns: int
    quota_ns: int
    deadline_ns: int
    waited_ns: int
    revoked_ns: int | None = None
    reason: str = ""
    final: bool = False  # decided: this deadline is not extended
    paused_ns: int | None = None  # start of its wait for the tenant's memory
    moved_ns: int = 0  # duration of that wait
    floor_ns: int = 0  # minimum after a move, even if others wait: otherwise the next move would come too soon

    @property
    def endless(self) -> bool:
        """Whether the turn is unbounded."""
        return self.deadline_ns == ENDLESS_NS

    @property
    def margin_ns(self) -> int:
        """How long before its deadline the turn is reconsidered."""
        return min(self.quota_ns // 5, MARGIN_NS)

    def given_up_ns(self, stuck_ns: int) -> int | None:
        """When the GPU of a revoked turn goes to others although its work has not ended. None: not revoked.

        A gang's work may wait for launches that its other GPUs hold back since the turn ended: waiting would not help.
        """
        if self.revoked_ns is None:
            return None
        return self.revoked_ns + (min(stuck_ns, GANG_DRAIN_NS) if self.account.share.gang else stuck_ns)

    def may_be_endless(self, now_ns: int, alone_ns: int) -> bool:
        """Whether the turn may become unbounded: alone for long, without a limit and not of a gang."""
        share = self.account.share
        return share.limit >= 1.0 and not share.gang and self.account.crowd.is_alone(now_ns, alone_ns)

    def next_deadline_ns(self, now_ns: int, alone_ns: int) -> int | None:
        """The extended deadline while no better tenant waits. None: unchanged."""
        if self.may_be_endless(now_ns, alone_ns):
            return ENDLESS_NS
        deadline_ns = now_ns + int(min(float(self.quota_ns), self.account.budget_ns(now_ns)))
        if self.endless:
            return deadline_ns
        # a limit's budget shrinks as it is used: steps ever smaller would be messages without end
        worth_it = deadline_ns >= self.deadline_ns + self.margin_ns
        return deadline_ns if worth_it and not self.account.share.gang else None

    def resume(self, now_ns: int, floor_ns: int, window_ns: int) -> None:
        """Continue after a pause: the deadline is moved by it, and leaves `floor_ns` as far as the limit allows."""
        assert self.paused_ns is not None, "a turn was resumed that was not paused"
        self.moved_ns += now_ns - self.paused_ns
        limit = self.account.share.limit
        self.floor_ns = floor_ns if limit >= 1.0 else min(floor_ns, int(limit * window_ns))
        self.quota_ns = max(self.quota_ns, self.floor_ns)
        self.deadline_ns = self.start_ns + self.moved_ns + self.quota_ns
        self.paused_ns = None
