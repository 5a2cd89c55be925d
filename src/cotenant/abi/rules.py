"""Arguments of two rules that C and Python call: when best-effort (BE) work may be launched, and which copy is next.

Generated from rules.toml by native/abi/generate.py: change the TOML file, then run the script.
"""

from __future__ import annotations

import ctypes

# BE work with a duty cycle pauses so that the GPU is idle for part of the time; short pauses are combined into one
# pause of this length, so that the kernels between two pauses can be timed
FLOOR_REST_NS = 200000


class FloorRule(ctypes.Structure):
    """Parameters of the rule for BE launches, constant between launches."""

    _fields_ = (
        ("budget_ns", ctypes.c_int64),
        ("lead_ns", ctypes.c_int64),
        ("scheme", ctypes.c_uint32),
        ("overlap_permille", ctypes.c_uint32),
        ("sm_threshold", ctypes.c_uint32),
        ("work_class", ctypes.c_uint32),
        ("work_sms", ctypes.c_uint32),
        ("stretch_permille", ctypes.c_uint32),
        ("duty_cycle_permille", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 4),
    )
    budget_ns: int  # largest predicted GPU time that this process may have in flight
    # scheme tidal: a kernel longer than the budget is launched this long before the predicted end of the previous
    # kernel
    lead_ns: int
    scheme: int  # RuleKind
    overlap_permille: int
    sm_threshold: int
    work_class: int  # WorkClass of the BE work
    work_sms: int  # number of SMs that the BE work would fill; may exceed the GPU's; 0: not known
    # scheme tidal: while the BE work leaves the GPU idle, budget_ns grows up to this factor, in thousandths; 1000: no
    # growth
    stretch_permille: int
    # scheme tidal: fraction of the time for which BE work may keep the GPU busy; 0 or 1000: always
    duty_cycle_permille: int


class FloorState(ctypes.Structure):
    """State of the rule for BE launches: work in flight, and counters."""

    _fields_ = (
        ("outstanding_ns", ctypes.c_int64),
        ("unfinished", ctypes.c_int64),
        ("busy_until_ns", ctypes.c_int64),
        ("batch_ns", ctypes.c_int64),
        ("credit_ns", ctypes.c_int64),
        ("credit_at_ns", ctypes.c_int64),
        ("open_ns", ctypes.c_int64),
        ("dry_ns", ctypes.c_int64),
        ("area_ns2", ctypes.c_int64),
        ("open_at_ns", ctypes.c_int64),
        ("stretch_permille", ctypes.c_int64),
        ("owed_ns", ctypes.c_int64),
        ("batch_full", ctypes.c_bool),
        ("starved", ctypes.c_bool),
        ("reserved", ctypes.c_uint8 * 6),
    )
    # predicted GPU time of the work in flight: work that was launched and is not known to have ended
    outstanding_ns: int
    unfinished: int  # number of launch batches (groups of launches, see pieces.h) in flight
    busy_until_ns: int  # predicted end of all work in flight
    batch_ns: int  # scheme orion: predicted time of work launched since the GPU last finished all BE work
    # scheme tidal: time for which BE work may run while latency-sensitive (LS) work is active; below 0 if it ran for
    # too long
    credit_ns: int
    credit_at_ns: int  # scheme tidal: time up to which credit_ns is counted
    open_ns: int  # scheme tidal: length of the current measuring window, a time without active LS work
    dry_ns: int  # scheme tidal: part of the current measuring window in which no BE work was on the GPU
    area_ns2: int  # scheme tidal: integral of the work in flight over the time of the current measuring window
    # scheme tidal: time up to which open_ns, dry_ns and area_ns2 are counted; 0: LS work was active, so counting starts
    # anew
    open_at_ns: int
    stretch_permille: int  # present factor on budget_ns, in thousandths; 0 stands for 1000
    owed_ns: int  # scheme tidal with a duty cycle: for how much longer BE work must leave the GPU idle
    batch_full: bool  # scheme orion: enough work was launched, so further launches wait until all of it has ended
    starved: bool  # the GPU was idle for part of the last measuring window


class CopyTicket(ctypes.Structure):
    """A process's claim of a slot of a link; each chunk (part of a copy) needs a slot while it is in flight."""

    _fields_ = (
        ("word", ctypes.c_uint64),
        ("slot", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 4),
    )
    word: int  # the value that the process wrote to the slot
    slot: int
