"""One turn on a GPU: who holds it, since when, until when, and what of it went to moving memory."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.policy.quota.account import Account

LONG_WINDOW = 10  # turns that pay for a move: shares then hold over a window of so many of them
MARGIN_NS = 20_000_000  # before a deadline, when it is decided whether it moves on


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
    def margin_ns(self) -> int:
        """How long before its deadline the turn is looked at again."""
        return min(self.quota_ns // 5, MARGIN_NS)

    def resume(self, now_ns: int, floor_ns: int, window_ns: int) -> None:
        """Go on after a pause: the deadline moves on by it, and leaves `floor_ns` as far as the limit allows."""
        assert self.paused_ns is not None, "a turn resumes that was not paused"
        self.moved_ns += now_ns - self.paused_ns
        limit = self.account.share.limit
        self.floor_ns = floor_ns if limit >= 1.0 else min(floor_ns, int(limit * window_ns))
        self.quota_ns = max(self.quota_ns, self.floor_ns)
        self.deadline_ns = self.start_ns + self.moved_ns + self.quota_ns
        self.paused_ns = None
