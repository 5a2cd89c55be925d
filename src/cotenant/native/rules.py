"""Calls the shim's compiled rules from Python: whether a best-effort (BE) launch may go while latency-sensitive (LS)
work is active, and whose chunk is copied next on a PCIe link.

The structs are shared with C: `FloorRule` has the settings of the rule for BE launches, `FloorState` what the rule
remembers about a program's launches. The functions `may_go`, `went` and `ended` change the state in place. Times are
whole nanoseconds.
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
# for each function of the library, the type of the result and the types of the arguments
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
    """Load the library of the compiled rules and declare its functions."""
    loaded = ctypes.CDLL(str(library_path(RULES)))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def may_go(rule: FloorRule, state: FloorState, active: WorkClass, next_ns: int, now_ns: int) -> bool:
    """Whether a BE launch with a predicted time of `next_ns` may go. `active`: work class of the LS work that is
    active; NONE: no LS work is active.
    """
    return bool(library().gate_may_go(byref(rule), byref(state), active, next_ns, now_ns))


def went(rule: FloorRule, state: FloorState, active: WorkClass, next_ns: int, now_ns: int) -> None:
    """Update the state of the rule after a BE launch."""
    library().gate_went(byref(rule), byref(state), active, next_ns, now_ns)


def ended(state: FloorState, predicted_ns: int, now_ns: int) -> None:
    """Update the state of the rule after a batch of BE launches has ended; the remaining work in flight begins about
    now.
    """
    library().gate_ended(byref(state), predicted_ns, now_ns)


def allowed_ns(rule: FloorRule, state: FloorState) -> int:
    """Return how many ns of best-effort (BE) work may be in flight now under the co-location scheme `tidal`."""
    return int(library().gate_allowed_ns(byref(rule), byref(state)))


def rested_at_ns(state: FloorState) -> int:
    """Return the time at which a BE program with a duty cycle may launch again, if it launches nothing until then."""
    return int(library().gate_rested_at_ns(byref(state)))


def is_paced(rule: FloorRule) -> bool:
    """Whether the duty cycle makes BE work leave the GPU idle between launches."""
    return 0 < rule.duty_cycle_permille < 1000
