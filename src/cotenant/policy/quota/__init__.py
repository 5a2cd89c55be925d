"""Token quotas: whose turn it is on a GPU, for how long, and what it costs. Pure; times are nanoseconds, passed in."""

from cotenant.policy.quota.account import MS_NS, SECOND_NS, Account, Crowd, Share, Window
from cotenant.policy.quota.disciplines import DISCIPLINES, Discipline, QuotaSettings, discipline
from cotenant.policy.quota.instructions import Claim, Ended, Grant, Instruction, Move, Revoke, Stuck
from cotenant.policy.quota.node import NodeTurns
from cotenant.policy.quota.turn import ENDLESS_NS, Turn
from cotenant.policy.quota.turns import GpuTurns

__all__ = [
    "DISCIPLINES",
    "ENDLESS_NS",
    "MS_NS",
    "SECOND_NS",
    "Account",
    "Claim",
    "Crowd",
    "Discipline",
    "Ended",
    "GpuTurns",
    "Grant",
    "Instruction",
    "Move",
    "NodeTurns",
    "QuotaSettings",
    "Revoke",
    "Share",
    "Stuck",
    "Turn",
    "Window",
    "discipline",
]
