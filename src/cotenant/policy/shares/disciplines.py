"""The registry of disciplines. A discipline decides which tenant gets the next turn on a GPU, and for how long. A
*turn* is a time slice that the agent grants.

A tenant's limit holds under every discipline, since GpuTurns enforces it; a discipline only ranks the waiting tenants
and sets the length of their turns. A new discipline is one entry in DISCIPLINES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cotenant.policy.shares.account import MS_NS, SECOND_NS, Account


@dataclass(frozen=True)
class QuotaSettings:
    """Settings of turns, in nanoseconds; a *quota* is the length of a turn.

    With turns of at most 100 ms, tenants get their shares in windows of 10 s within about one percentage point. Two
    tenants with shares of 30 and 70 % were off by 10 points with the lengths of Gemini, another program for sharing
    GPUs (250 ms at first, at least 100), and turns of up to 1 s.
    """

    discipline: str = "request-limit"
    quota_ns: int = 100 * MS_NS
    min_quota_ns: int = 20 * MS_NS
    max_quota_ns: int = 100 * MS_NS
    window_ns: int = 10 * SECOND_NS
    idle_credit_ns: int = 250 * MS_NS  # a tenant may make up later for at most this much time in which it was idle
    alone_ns: int = 2 * SECOND_NS  # after this time without other tenants, a tenant's turn has no deadline any more
    grace_ns: int = 20 * MS_NS  # time from the deadline of a tenant's turn until the turn is revoked
    # time after which a revoked turn's GPU is granted to other tenants, although the work of the holder has not ended
    stuck_ns: int = 5 * SECOND_NS
    exclusive_ns: int = 30 * SECOND_NS  # length of a turn (time slice) under the discipline exclusive-turns

    def __post_init__(self) -> None:
        if not 0 < self.min_quota_ns <= self.quota_ns <= self.max_quota_ns:
            raise ValueError("quotas must satisfy 0 < min_quota <= quota <= max_quota")
        if self.quota_ns > self.window_ns:
            raise ValueError("quota is longer than the window")
        if self.discipline not in {d.name for d in DISCIPLINES}:
            known = ", ".join(d.name for d in DISCIPLINES)
            raise ValueError(f"unknown discipline {self.discipline!r}; known: {known}")


def _rank_request_limit(account: Account, now_ns: int) -> tuple[float, float]:
    """Rank a waiting tenant in the order of Gemini's scheduler (gem-schd): the largest relative deficit first, then the
    least used time.

    With W the length of the window, deficit = (request * W - used) / (request * W), so a smaller used / (request * W)
    goes first. Tenants at or above their request, and those without one, follow by used time. What counts as used time
    differs from gem-schd, which counts exactly the time for which a tenant held the GPU: see Account.used_ns.
    """
    request = account.share.request
    if request > 0.0:
        used = account.used_ns(now_ns, request) / (request * account.window.window_ns)
        if used < 1.0:
            return (0.0, used)
    return (1.0, account.used_ns(now_ns, max(request, 1.0 / max(1, account.crowd.active))))


def _owed_request(account: Account, now_ns: int) -> bool:
    return _rank_request_limit(account, now_ns)[0] == 0.0


def _owed_nothing(account: Account, now_ns: int) -> bool:
    return False


def _quota_adaptive(account: Account, settings: QuotaSettings) -> int:
    """Return the length of the tenant's next turn: half of the burst estimate (how long its work lasts between two
    pauses) plus half of the last quota, within bounds; without an estimate the base quota.
    """
    most_ns = max(settings.min_quota_ns, min(settings.max_quota_ns, int(account.share.limit * settings.window_ns)))
    if account.burst_ns <= 0:
        return min(settings.quota_ns, most_ns)
    blended_ns = (account.burst_ns + (account.quota_ns or settings.quota_ns)) // 2
    return max(settings.min_quota_ns, min(blended_ns, most_ns))


def _quota_base(account: Account, settings: QuotaSettings) -> int:
    return settings.quota_ns


def _quota_exclusive(account: Account, settings: QuotaSettings) -> int:
    return settings.exclusive_ns


def _rank_arrival(account: Account, now_ns: int) -> tuple[float, float]:
    return (0.0, float(account.requested_ns))


def _rank_credit(account: Account, now_ns: int) -> tuple[float, float]:
    return (account.served + account.contended_so_far_ns(now_ns) / account.weight, float(account.requested_ns))


def _rank_priority(account: Account, now_ns: int) -> tuple[float, float]:
    return (-float(account.share.priority), float(account.requested_ns))


def _keep_quota(holder: Account, challenger: Account, quota_ns: int, settings: QuotaSettings, now_ns: int) -> int:
    return quota_ns


def _keep_unless_owed(holder: Account, challenger: Account, quota_ns: int, settings: QuotaSettings, now_ns: int) -> int:
    """Return how much of its turn the holder keeps once `challenger` waits: only a minimum turn, if the holder has got
    its request and the challenger has not got its own; otherwise the whole turn.

    Without this rule, a tenant that pauses briefly in each step would lose a whole turn to another tenant at every
    pause.
    """
    takes_over = _owed_request(challenger, now_ns) and not _owed_request(holder, now_ns)
    return min(quota_ns, settings.min_quota_ns) if takes_over else quota_ns


def _keep_unless_outranked(
    holder: Account, challenger: Account, quota_ns: int, settings: QuotaSettings, now_ns: int
) -> int:
    return 0 if challenger.share.priority > holder.share.priority else quota_ns


@dataclass(frozen=True)
class Discipline:
    """A discipline: decides which tenant gets the next turn (time slice). The tenant with the smallest `rank` goes
    first; `quota`: length of its turn; `keeps`: how much of it the holder keeps once another tenant waits; `owed`:
    whether a tenant has got less than its request.
    """

    name: str
    summary: str
    rank: Callable[[Account, int], tuple[float, float]]
    quota: Callable[[Account, QuotaSettings], int]
    keeps: Callable[[Account, Account, int, QuotaSettings, int], int] = _keep_quota
    owed: Callable[[Account, int], bool] = _owed_nothing


DISCIPLINES: tuple[Discipline, ...] = (
    Discipline(
        "request-limit",
        "Each tenant gets at least its request and at most its limit over a sliding window; the largest relative"
        " deficit goes first; the length of turns follows the tenant's bursts (Gemini).",
        _rank_request_limit,
        _quota_adaptive,
        _keep_unless_owed,
        _owed_request,
    ),
    Discipline(
        "temporal",
        "All turns are equally long, and are granted in the order of the requests.",
        _rank_arrival,
        _quota_base,
    ),
    Discipline(
        "weighted-round-robin",
        "The tenant with the least used time divided by its weight is next; only time while others waited counts"
        " (gpulet's pull rule, in time instead of batches).",
        _rank_credit,
        _quota_base,
    ),
    Discipline(
        "priority",
        "The tenant with the highest priority is next, and ends the turn of a tenant with a lower one at the next"
        " kernel boundary (Missile's temporal rule); tenants with equal priority take turns.",
        _rank_priority,
        _quota_base,
        _keep_unless_outranked,
    ),
    Discipline(
        "exclusive-turns",
        "A tenant has the whole GPU for N seconds, in the order of the requests; it gives the GPU up early only when "
        "it is idle while another tenant waits (nvshare).",
        _rank_arrival,
        _quota_exclusive,
    ),
)


def discipline(name: str) -> Discipline:
    """Return the discipline of that name. The KeyError for an unknown name lists the known ones."""
    for entry in DISCIPLINES:
        if entry.name == name:
            return entry
    raise KeyError(f"unknown discipline {name!r}; known: {', '.join(d.name for d in DISCIPLINES)}")
