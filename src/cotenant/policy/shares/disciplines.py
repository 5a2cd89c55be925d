"""The registry of turn disciplines: which tenant is next on a GPU, and for how long.

A tenant's limit holds under every discipline (the turn state machine enforces it); a discipline only ranks the waiting
tenants and sizes their turns. A new one is one entry in DISCIPLINES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cotenant.policy.shares.account import MS_NS, SECOND_NS, Account


@dataclass(frozen=True)
class QuotaSettings:
    """Settings of the token broker in nanoseconds.

    With turns of at most 100 ms, shares hold in windows of 10 s within about a point; with Gemini's own (250 ms at
    first, at least 100) and up to 1 s, two tenants of 30 and 70 % were off by 10.
    """

    discipline: str = "request-limit"
    quota_ns: int = 100 * MS_NS
    min_quota_ns: int = 20 * MS_NS
    max_quota_ns: int = 100 * MS_NS
    window_ns: int = 10 * SECOND_NS
    idle_credit_ns: int = 250 * MS_NS  # idle time that a tenant may catch up on later
    alone_ns: int = 2 * SECOND_NS  # time without other tenants after which a turn becomes unbounded
    grace_ns: int = 20 * MS_NS  # time from a turn's deadline until the policy revokes the turn
    stuck_ns: int = 5 * SECOND_NS  # further time until the GPU is granted to others although the holder has not drained
    exclusive_ns: int = 30 * SECOND_NS  # turn length of exclusive-turns

    def __post_init__(self) -> None:
        if not 0 < self.min_quota_ns <= self.quota_ns <= self.max_quota_ns:
            raise ValueError("quotas must satisfy 0 < min_quota <= quota <= max_quota")
        if self.quota_ns > self.window_ns:
            raise ValueError("quota is longer than the window")
        if self.discipline not in {d.name for d in DISCIPLINES}:
            known = ", ".join(d.name for d in DISCIPLINES)
            raise ValueError(f"unknown discipline {self.discipline!r}; known: {known}")


def _rank_request_limit(account: Account, now_ns: int) -> tuple[float, float]:
    """Gemini's order: largest relative deficit first, then least used time.

    deficit = (request * W - used) / (request * W), so a smaller used / (request * W) goes first; tenants at or above
    their request (and those without one) follow, by used time. (Spec of gem-schd, "Selection"; used time is narrower
    here, see Account.used_ns.)
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
    """Half the burst estimate plus half the last quota, clamped; the base quota while there is no estimate."""
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
    """A holder that has its request keeps only the minimum turn when a tenant below its request arrives.

    Otherwise a tenant that pauses briefly within each step would lose a whole turn to another tenant for every pause.
    """
    takes_over = _owed_request(challenger, now_ns) and not _owed_request(holder, now_ns)
    return min(quota_ns, settings.min_quota_ns) if takes_over else quota_ns


def _keep_unless_outranked(
    holder: Account, challenger: Account, quota_ns: int, settings: QuotaSettings, now_ns: int
) -> int:
    return 0 if challenger.share.priority > holder.share.priority else quota_ns


@dataclass(frozen=True)
class Discipline:
    """Smaller `rank` goes first; `quota`: length of a turn; `keeps`: what the holder keeps of it once another tenant
    waits; `owed`: whether a tenant has had less than promised.
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
        "At least the request, at most the limit, over a sliding window; largest relative deficit first; turns follow"
        " the tenant's bursts (Gemini).",
        _rank_request_limit,
        _quota_adaptive,
        _keep_unless_owed,
        _owed_request,
    ),
    Discipline(
        "temporal",
        "Equal turns in the order of asking (first come, first served at turn ends).",
        _rank_arrival,
        _quota_base,
    ),
    Discipline(
        "weighted-round-robin",
        "Turns by credit: time held while others waited, divided by weight, least first (gpulet's pull rule, in time"
        " instead of batches).",
        _rank_credit,
        _quota_base,
    ),
    Discipline(
        "priority",
        "Highest priority first, and a higher one ends a lower one's turn at the next kernel boundary (Missile's"
        " temporal rule); equals take turns.",
        _rank_priority,
        _quota_base,
        _keep_unless_outranked,
    ),
    Discipline(
        "exclusive-turns",
        "The whole GPU for N seconds, first come, first served; given up early only when idle or while another "
        "tenant waits (nvshare).",
        _rank_arrival,
        _quota_exclusive,
    ),
)


def discipline(name: str) -> Discipline:
    """The discipline of that name. KeyError with the known names when there is none."""
    for entry in DISCIPLINES:
        if entry.name == name:
            return entry
    raise KeyError(f"unknown discipline {name!r}; known: {', '.join(d.name for d in DISCIPLINES)}")
