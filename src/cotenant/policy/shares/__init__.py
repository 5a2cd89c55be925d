"""Decides how tenants share the time of a GPU: by turns, which are time slices that the agent grants, or by the
hardware's own time slices. Pure functions and state machines; the caller passes times in nanoseconds.
"""

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
