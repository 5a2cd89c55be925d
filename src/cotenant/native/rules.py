"""The rules that the shim obeys, called from Python: may a best-effort launch go, and whose chunk goes next on a link.

`FloorRule` and `FloorState` are C's structs; `may_go` and `went` change the state in place. Times in whole nanoseconds.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref

from cotenant.abi.floor import WorkClass
from cotenant.abi.rules import CopyTicket, FloorRule, FloorState
from cotenant.native.libraries import RULES, library_path

_PAGE, _U32, _U64, _I64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
_RULE, _STATE, _TICKET = POINTER(FloorRule), POINTER(FloorState), POINTER(CopyTicket)
# result, arguments
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "gate_may_go": (ctypes.c_bool, _RULE, _STATE, _U32, _I64, _I64),
    "gate_went": (None, _RULE, _STATE, _U32, _I64, _I64),
    "gate_ended": (None, _STATE, _I64, _I64),
    "gate_allowed_ns": (_I64, _RULE, _STATE),
    "gate_rested_at_ns": (_I64, _STATE),
    "gate_share_ns": (_I64, _U64, _U64),
    "queue_try": (ctypes.c_int, _PAGE, _U32, _U32, _U32, _U64, _U64, _TICKET),
    "queue_done": (None, _PAGE, _U32, _TICKET),
    "queue_withdraw": (None, _PAGE, _U32, _U32),
    "queue_charge": (None, _PAGE, _U32, _U32, _U64),
    "queue_next": (_U32, _PAGE, _U32, _U64),
    "queue_rescue": (None, _PAGE, _U32, _U32, _U64),
    "queue_piece": (_U64, _PAGE, _U32, _U32, _U64),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled rules."""
    loaded = ctypes.CDLL(str(library_path(RULES)))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def may_go(rule: FloorRule, state: FloorState, active: WorkClass, next_ns: int, now_ns: int) -> bool:
    """May a BE launch that should take `next_ns` go, while LS work of class `active` (NONE: none) runs?"""
    return bool(library().gate_may_go(byref(rule), byref(state), active, next_ns, now_ns))


def went(rule: FloorRule, state: FloorState, active: WorkClass, next_ns: int, now_ns: int) -> None:
    """Update the state after a launch."""
    library().gate_went(byref(rule), byref(state), active, next_ns, now_ns)


def ended(state: FloorState, predicted_ns: int, now_ns: int) -> None:
    """A launch batch was seen to have ended; the rest of what is in flight begins about now."""
    library().gate_ended(byref(state), predicted_ns, now_ns)


def allowed_ns(rule: FloorRule, state: FloorState) -> int:
    """Work in ns that the scheme tidal allows in flight now."""
    return int(library().gate_allowed_ns(byref(rule), byref(state)))


def rested_at_ns(state: FloorState) -> int:
    """When a paced program that stops now has been idle for what it owes."""
    return int(library().gate_rested_at_ns(byref(state)))


def is_paced(rule: FloorRule) -> bool:
    """Whether BE leaves the GPU idle between its launches."""
    return 0 < rule.duty_cycle_permille < 1000
