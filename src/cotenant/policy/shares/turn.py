"""One turn on a GPU. A *turn* is a time slice that the agent grants to a tenant, its *holder*. It has a start and a
deadline. If the holder's memory was evicted, the turn is *paused* until the memory is on the GPU again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.policy.shares.account import Account

# After a move of memory, a turn has a minimum length. The window over which shares hold is at least this many times as
# long.
LONG_WINDOW = 10
MARGIN_NS = 20_000_000  # the decision whether to extend a turn is made at most this long before the turn's deadline
ENDLESS_NS = 2**64 - 1  # deadline of an unbounded turn, which lasts until another tenant arrives
# if the work of a gang (a tenant with several GPUs) has not ended this long after its turn was revoked, it is assumed
# to wait for the gang's other GPUs
GANG_DRAIN_NS = 50_000_000
UNDRAINED = "undrained"  # reason for the end of a gang's turn that was ended although the gang's work had not ended


@dataclass(eq=False)
class Turn:
    """The holder, start and deadline of a turn, a time slice that the agent grants to a tenant."""

    account: Account
    epoch: int
    start_ns: int
    quota_ns: int
    deadline_ns: int
    waited_ns: int
    revoked_ns: int | None = None
    reason: str = ""
    final: bool = False  # whether it has been decided that this deadline is not extended
    paused_ns: int | None = None  # time at which the turn began to wait for the tenant's memory; None: it does not wait
    moved_ns: int = 0  # duration of the wait for the tenant's memory
    # shortest length of a turn for which memory was moved, even if other tenants wait; otherwise the memory would soon
    # be moved back
    floor_ns: int = 0

    @property
    def endless(self) -> bool:
        """Whether the turn is unbounded, that is without a deadline."""
        return self.deadline_ns == ENDLESS_NS

    @property
    def margin_ns(self) -> int:
        """Return how long before the turn's deadline the decision is made whether to extend the turn, in ns."""
        return min(self.quota_ns // 5, MARGIN_NS)

    def given_up_ns(self, stuck_ns: int) -> int | None:
        """Return the time at which the GPU of a revoked turn is granted to other tenants although the holder's work has
        not ended. None: the turn was not revoked.

        A gang's work may wait for launches that are held back on its other GPUs since the turn ended, so a longer wait
        would not help.
        """
        if self.revoked_ns is None:
            return None
        return self.revoked_ns + (min(stuck_ns, GANG_DRAIN_NS) if self.account.share.gang else stuck_ns)

    def may_be_endless(self, now_ns: int, alone_ns: int) -> bool:
        """Whether the turn may become unbounded: no other tenant has wanted the GPU for at least `alone_ns`, and the
        holder has no limit and is not a gang.
        """
        share = self.account.share
        return share.limit >= 1.0 and not share.gang and self.account.crowd.is_alone(now_ns, alone_ns)

    def next_deadline_ns(self, now_ns: int, alone_ns: int) -> int | None:
        """Return the new deadline of a turn that need not end for another tenant: a later one, or ENDLESS_NS, or, if
        the turn was unbounded and may no longer be so, its first one. None: the deadline is not changed.
        """
        if self.may_be_endless(now_ns, alone_ns):
            return ENDLESS_NS
        deadline_ns = now_ns + int(min(float(self.quota_ns), self.account.budget_ns(now_ns)))
        if self.endless:
            return deadline_ns
        # a tenant that is using up its limit would get shorter and shorter extensions, and the agent would send
        # messages all the time
        worth_it = deadline_ns >= self.deadline_ns + self.margin_ns
        return deadline_ns if worth_it and not self.account.share.gang else None

    def resume(self, now_ns: int, floor_ns: int, window_ns: int) -> None:
        """Continue after a pause. The deadline moves by the length of the pause; the turn then lasts at least
        `floor_ns`, as far as the limit allows.
        """
        assert self.paused_ns is not None, "a turn was resumed that was not paused"
        self.moved_ns += now_ns - self.paused_ns
        limit = self.account.share.limit
        self.floor_ns = floor_ns if limit >= 1.0 else min(floor_ns, int(limit * window_ns))
        self.quota_ns = max(self.quota_ns, self.floor_ns)
        self.deadline_ns = self.start_ns + self.moved_ns + self.quota_ns
        self.paused_ns = None
