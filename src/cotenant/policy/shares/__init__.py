"""GPU time shares: turns of the token broker and hardware time slices. Pure; times are nanoseconds, passed in."""

from cotenant.policy.shares.account import MS_NS, SECOND_NS, Account, Crowd, Share, Window
from cotenant.policy.shares.disciplines import DISCIPLINES, Discipline, QuotaSettings, discipline
from cotenant.policy.shares.instructions import Claim, Ended, Grant, Instruction, Move, Revoke, Stuck
from cotenant.policy.shares.node import NodeTurns
from cotenant.policy.shares.turn import ENDLESS_NS, Turn
from cotenant.policy.shares.turns import GpuTurns

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
