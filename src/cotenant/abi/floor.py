"""The LS gate: shared memory by which latency-sensitive (LS) processes hold back best-effort (BE) work.

Generated from floor.toml by native/abi/generate.py: change the TOML file, then run the script.
"""

from __future__ import annotations

import ctypes
import enum
import struct

FLOOR_BYTES = 4096
FLOOR_MAGIC = 0x464C4F52  # "FLOR"
FLOOR_VERSION = 2
FLOOR_HOLDERS = 64  # largest number of LS processes on one GPU
# names of kernels are truncated to this many bytes in kernel profiles, and before their keys in the kernel table are
# computed
KERNEL_NAME = 511
# scheme tidal: a kernel that takes longer than the in-flight budget is launched this long before the predicted end of
# the previous kernel
LEAD_NS = 10000
# scheme tidal: GPU time of BE work between two timing events, by which predicted times are checked
EVENT_INTERVAL_NS = 150000
# scheme tidal: while the process leaves the GPU idle, its in-flight budget grows up to this factor, in thousandths
STRETCH_PERMILLE = 4000
# with run_ahead auto, a process launches ahead only if its launches wait on the host for less than this fraction of the
# time
RUN_AHEAD_BELOW_PERMILLE = 450


class FloorRole(enum.IntEnum):
    """Role of a process at the LS gate."""

    LATENCY_SENSITIVE = 1
    BEST_EFFORT = 2


class WorkClass(enum.IntEnum):
    """Work class of a kernel: the resource that limits its speed."""

    NONE = 0  # no work
    UNKNOWN = 1
    MEMORY = 2  # memory bandwidth
    COMPUTE = 3  # arithmetic


class RuleKind(enum.IntEnum):
    """How a scheme restricts launches of best-effort (BE) processes beside latency-sensitive (LS) processes."""

    FREE = 0  # BE launches never wait (schemes mps-plus and static)
    TEMPORAL = 1  # one BE kernel at a time, and only while no LS work is active
    # while LS work is active, a BE kernel may run only if its work class differs from that of the LS work (or one of
    # them is unknown) and it fills at most sm_threshold SMs. A process launches its part of in_flight_us, and more only
    # when that work has ended
    ORION = 2
    # while LS work is active, BE work runs for at most overlap_permille of the time (0: not at all). While no LS work
    # is active, the BE work in flight is limited by in_flight_us
    TIDAL = 3


class RunAhead(enum.IntEnum):
    """Which BE processes launch work ahead, so that the work, not the launching thread, waits until it may run."""

    AUTO = 0  # only processes whose launches wait on the host for less than RUN_AHEAD_BELOW_PERMILLE of the time
    ALWAYS = 1
    NEVER = 2


KERNEL = struct.Struct("=QIHB1x")  # A row of a tenant's kernel table: what is known about one kernel


class FloorLayout(ctypes.Structure):
    """The gate page: LS-activity flags and settings of a GPU's LS gate."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("page_bytes", ctypes.c_uint32),
        ("holders", ctypes.c_uint32),
        ("scheme", ctypes.c_uint32),
        ("tenants", ctypes.c_uint32),
        ("in_flight_us", ctypes.c_uint32),
        ("heartbeat_timeout_ms", ctypes.c_uint32),
        ("overlap_permille", ctypes.c_uint32),
        ("duty_cycle_permille", ctypes.c_uint32),
        ("sm_threshold", ctypes.c_uint32),
        ("run_ahead", ctypes.c_uint32),
        ("present", ctypes.c_uint32),
        ("present_words", ctypes.c_uint32),
        ("reserved_agent", ctypes.c_uint8 * 200),
        ("raised", ctypes.c_uint8 * FLOOR_HOLDERS),
        ("reserved_raised", ctypes.c_uint8 * 192),
        ("raised_ns", ctypes.c_uint64 * FLOOR_HOLDERS),
        ("raises", ctypes.c_uint64 * FLOOR_HOLDERS),
        ("pid", ctypes.c_uint32 * FLOOR_HOLDERS),
        ("reserved", ctypes.c_uint8 * 2304),
    )
    # The agent writes these fields.
    magic: int
    version: int
    page_bytes: int
    holders: int  # number of entries of the arrays below: FLOOR_HOLDERS
    scheme: int  # RuleKind
    # number of BE processes; each may have in_flight_us / tenants in flight, unless `floor_parts` on the shared page
    # between the process and the agent (tenant_page.toml) sets another divisor
    tenants: int
    in_flight_us: int  # how much work all BE processes together may have in flight
    # an LS-activity flag counts only for this long after it was last set; older flags are ignored
    heartbeat_timeout_ms: int
    overlap_permille: int  # fraction of the time for which BE work may run while LS work is active
    # fraction of the time for which BE work may keep the GPU busy while no LS work is active; 0: always
    duty_cycle_permille: int
    # scheme orion: number of SMs that BE work may fill while LS work is active; 0: all SMs of the GPU
    sm_threshold: int
    run_ahead: int  # RunAhead
    present: int  # number of connected LS processes; if it is 0, BE launches do not wait
    # number of LS processes that also write the wait-flag page; if it is less than `present`, BE streams must not wait
    # on that page
    present_words: int
    # LS processes write these fields, each at its own index, and raised_ns before raised.
    # LS-activity flags, each a WorkClass (0: not active); BE processes read this one cache line before every launch
    raised: ctypes.Array[ctypes.c_uint8]
    raised_ns: ctypes.Array[ctypes.c_uint64]  # time at which the process last set its flag
    raises: ctypes.Array[ctypes.c_uint64]  # number of times that the process has set its flag since it connected
    # The agent writes these fields, for display.
    pid: ctypes.Array[ctypes.c_uint32]


class FloorWordsLayout(ctypes.Structure):
    """The wait-flag page: a copy of the LS-activity flags, for which BE streams wait on the device."""

    _fields_ = (
        ("raised", ctypes.c_uint8 * FLOOR_HOLDERS),
        ("reserved", ctypes.c_uint8 * 4032),
    )
    # LS-activity flags: a process sets its flag on the gate page first and then here, and clears it here first
    raised: ctypes.Array[ctypes.c_uint8]
