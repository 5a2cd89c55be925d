"""One turn on a GPU: who holds it, since when, until when, and what of it went to moving memory."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.policy.shares.account import Account

LONG_WINDOW = 10  # turns that pay for a move: shares then hold over a window of so many of them
MARGIN_NS = 20_000_000  # before a deadline, when it is decided whether it moves on
ENDLESS_NS = 2**64 - 1  # the deadline of a turn that lasts until somebody else comes
GANG_DRAIN_NS = 50_000_000  # after which work that has not ended is taken to wait for the gang's other GPUs
UNDRAINED = "undrained"  # why a gang's turn ended then


@dataclass(eq=False)
class Turn:
    """Who holds the GPU, since when, until when."""

    account: Account
    epoch: int
    start_ns: int
    quota_ns: int
    deadline_ns: int
    waited_ns: int
    revoked_ns: int | None = None
    reason: str = ""
    final: bool = False  # decided: this deadline is not moved on
    paused_ns: int | None = None  # since when it waits for its tenant's memory
    moved_ns: int = 0  # how long it did
    floor_ns: int = 0  # what it keeps after moving, whoever waits: else the next move would come too soon

    @property
    def endless(self) -> bool:
        """Whether it has no end of its own."""
        return self.deadline_ns == ENDLESS_NS

    @property
    def margin_ns(self) -> int:
        """How long before its deadline the turn is looked at again."""
        return min(self.quota_ns // 5, MARGIN_NS)

    def given_up_ns(self, stuck_ns: int) -> int | None:
        """When a turn that was taken back goes to others although its work has not ended. None: it was not taken back.

        A gang's work may wait for launches that its other GPUs hold back since the turn ended: no time would help."""
        if self.revoked_ns is None:
            return None
        return self.revoked_ns + (min(stuck_ns, GANG_DRAIN_NS) if self.account.share.gang else stuck_ns)

    def may_be_endless(self, now_ns: int, alone_ns: int) -> bool:
        """Long alone, and nothing to be counted: a limit's turns end on time, those of a gang together."""
        share = self.account.share
        return share.limit >= 1.0 and not share.gang and self.account.crowd.is_alone(now_ns, alone_ns)

    def next_deadline_ns(self, now_ns: int, alone_ns: int) -> int | None:
        """The deadline it gets while nobody better waits. None: the one it has stays."""
        if self.may_be_endless(now_ns, alone_ns):
            return ENDLESS_NS
        deadline_ns = now_ns + int(min(float(self.quota_ns), self.account.budget_ns(now_ns)))
        if self.endless:
            return deadline_ns
        # a limit's budget shrinks as it is used: steps ever smaller would be messages without end
        worth_it = deadline_ns >= self.deadline_ns + self.margin_ns
        return deadline_ns if worth_it and not self.account.share.gang else None

    def resume(self, now_ns: int, floor_ns: int, window_ns: int) -> None:
        """Go on after a pause: the deadline moves on by it, and leaves `floor_ns` as far as the limit allows."""
        assert self.paused_ns is not None, "a turn resumes that was not paused"
        self.moved_ns += now_ns - self.paused_ns
        limit = self.account.share.limit
        self.floor_ns = floor_ns if limit >= 1.0 else min(floor_ns, int(limit * window_ns))
        self.quota_ns = max(self.quota_ns, self.floor_ns)
        self.deadline_ns = self.start_ns + self.moved_ns + self.quota_ns
        self.paused_ns = None
