"""The shared page, which the agent and the shim in a tenant's process both map: it has a slot for each GPU.

Generated from tenant_page.toml by native/abi/generate.py: change the TOML file, then run the script.
"""

from __future__ import annotations

import ctypes
import enum

PAGE_BYTES = 8192
MAX_GPUS = 16  # number of slots of a shared page


class SlotFlag(enum.IntFlag):
    """Flags of a GPU's slot on the shared page, written by the agent."""

    ATTACHED = 1  # the slot belongs to a GPU
    CONTENDED = 2  # another tenant waits for this GPU, so the process returns its turn as soon as it is idle
    # this tenant needs no turns on this GPU: its launches are counted but do not wait. Set for all sharing mechanisms
    # except time
    UNGATED = 4
    UNFENCED = 8  # the shim does not limit the work in flight (used with UNGATED, for the lowest overhead)
    BEST_EFFORT = 16  # best-effort tenant: its launches wait at the LS gate while latency-sensitive work is active
    HOLDS_FLOOR = 32  # latency-sensitive tenant: the shim sets its LS-activity flag while the process has work
    # copies on this GPU's link are scheduled, so the process sends COPY_ATTACH to get the copy page, which holds the
    # schedule
    COPIES = 256


class SlotLayout(ctypes.Structure):
    """Slot of a GPU on the shared page of a process."""

    _fields_ = (
        ("epoch", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("inflight_allowed_ns", ctypes.c_uint64),
        ("idle_release_ns", ctypes.c_uint64),
        ("drain_timeout_ns", ctypes.c_uint64),
        ("memory_limit_bytes", ctypes.c_uint64),
        ("memory_used_bytes", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved_0", ctypes.c_uint32),
        ("uuid", ctypes.c_uint8 * 16),
        ("memory_withheld_bytes", ctypes.c_uint64),
        ("memory_kept_bytes", ctypes.c_uint64),
        ("floor_parts", ctypes.c_uint64),
        ("reserved_agent", ctypes.c_uint8 * 24),
        ("epoch_seen", ctypes.c_uint64),
        ("calls_in_flight", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("graph_launches", ctypes.c_uint64),
        ("fences", ctypes.c_uint64),
        ("last_submit_ns", ctypes.c_uint64),
        ("predicted_busy_ns", ctypes.c_uint64),
        ("waited_ns", ctypes.c_uint64),
        ("turns", ctypes.c_uint64),
        ("contexts", ctypes.c_uint64),
        ("floor_ns", ctypes.c_uint64),
        ("long_kernel_ns", ctypes.c_uint64),
        ("reserved", ctypes.c_uint8 * 24),
    )
    # The agent writes these fields.
    epoch: int  # number of the tenant's present turn (a time slice that the agent grants); 0: the tenant has no turn
    deadline_ns: int
    inflight_allowed_ns: int  # largest predicted GPU time of the work that the process may have in flight
    idle_release_ns: int
    drain_timeout_ns: int
    memory_limit_bytes: int  # NO_LIMIT: no limit
    memory_used_bytes: int  # memory of all processes of the tenant on this GPU, contexts included
    flags: int  # SlotFlag
    uuid: ctypes.Array[ctypes.c_uint8]
    # memory within the tenant's limit that it cannot get because it is reserved for other tenants
    memory_withheld_bytes: int
    memory_kept_bytes: int  # memory of the GPU that is free but reserved for other tenants
    # number of parts into which the in-flight budget of the GPU's best-effort work is divided; 0: into as many parts as
    # the gate page (floor.toml) has in `tenants`
    floor_parts: int
    # The shim writes these fields.
    epoch_seen: int  # number of the turn that the shim uses; 0: launches wait for a turn
    calls_in_flight: int  # number of host threads in a driver call that needs a turn
    launches: int  # number of launches since the start of the process
    copies: int
    graph_launches: int
    fences: int
    last_submit_ns: int  # time of the last launch; the shim updates it about once per millisecond of GPU work
    predicted_busy_ns: int  # sum of the predicted GPU times of all launches since the start of the process
    waited_ns: int  # sum of the times that threads have waited for a turn since the start of the process
    turns: int  # number of turns in which work was launched
    contexts: int  # number of CUDA contexts of the process on this GPU
    # best-effort processes: time of the last launch that checked whether latency-sensitive work is active
    floor_ns: int
    # best-effort processes: time of the last launch of a kernel that takes 0.5 ms or more, or whose duration is not
    # known yet; 0: none
    long_kernel_ns: int


class PageLayout(ctypes.Structure):
    """The shared page of a process; its memfd has PAGE_BYTES."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("page_bytes", ctypes.c_uint32),
        ("slot_count", ctypes.c_uint32),
        ("fail_mode", ctypes.c_uint32),
        ("reserved_0", ctypes.c_uint32),
        ("connection_id", ctypes.c_uint64),
        ("reserved", ctypes.c_uint8 * 224),
        ("slots", SlotLayout * MAX_GPUS),
    )
    magic: int
    version: int
    page_bytes: int
    slot_count: int  # MAX_GPUS
    fail_mode: int  # FailMode; the agent may change it while the tenant runs
    connection_id: int
    slots: ctypes.Array[SlotLayout]
