"""The copy page: shared memory by which the tenants of a GPU schedule copies on its link (see copy_rule.h).

Generated from copy_page.toml by native/abi/generate.py: change the TOML file, then run the script.
"""

from __future__ import annotations

import ctypes
import enum

COPY_MAGIC = 0x434F5059  # "COPY"
COPY_VERSION = 4
COPY_PAGE_BYTES = 20480
COPY_QUEUES = 64  # largest number of tenants of a GPU whose copies are scheduled
COPY_SLOTS = 8  # largest number of chunks that may be in flight on a link
COPY_SMALL_BYTES = 65536  # copies up to this size start at once, but are charged to the tenant's queue
# added to the direction of a copy of pageable memory: such copies have a link of their own, because the CPU limits
# their rate
COPY_PAGEABLE = 2
# number of links on the page: one per direction for pinned memory, then one per direction for pageable memory
COPY_LINKS = 4


class CopyRank(enum.IntEnum):
    """Rank of a tenant's queue."""

    AHEAD = 0  # latency-sensitive tenants: their queues come before all others
    NORMAL = 1  # other tenants: the queues share the link by weight
    # best-effort tenants: the queues share the link by weight, and copies within the device are split into chunks, as
    # copies over the link are
    BEST_EFFORT = 2


class CopyQueueLayout(ctypes.Structure):
    """The queue of a tenant on a link."""

    _fields_ = (
        ("weight_milli", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("vruntime", ctypes.c_uint64),
        ("seen_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("chunks", ctypes.c_uint64),
        ("waited_ns", ctypes.c_uint64),
        ("small", ctypes.c_uint64),
        ("active_ns", ctypes.c_uint64),
    )
    # The agent writes these fields.
    weight_milli: int  # 1000 times the weight; 0: the queue is not used
    rank: int  # CopyRank
    # The tenant's processes write these fields.
    vruntime: int  # virtual runtime of the queue: 16 * bytes / weight; it may wrap around, so only differences are used
    seen_ns: int  # time at which a process last requested a chunk; 0: no copy waits
    bytes: int  # total bytes of the chunks that the queue was granted
    chunks: int
    waited_ns: int  # sum, over all chunks, of the time from the first request to the grant
    small: int  # number of copies of at most COPY_SMALL_BYTES, which do not wait but are charged
    active_ns: int  # last time at which a copy of this queue waited or was on the link


class CopyLinkLayout(ctypes.Structure):
    """A link: the copies of one direction and of one kind of memory, pinned or pageable."""

    _fields_ = (
        ("slots", ctypes.c_uint64 * COPY_SLOTS),
        ("min_vruntime", ctypes.c_uint64),
        ("slice", ctypes.c_uint64),
        ("min_ahead", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 5),
        ("queues", CopyQueueLayout * COPY_QUEUES),
    )
    # one claim for each chunk in flight, from high to low: 16 bits number of the process, 1 bit for rank AHEAD, 47 bits
    # time of the claim in microseconds
    slots: ctypes.Array[ctypes.c_uint64]
    min_vruntime: int  # smallest vruntime of the queues of ranks NORMAL and BEST_EFFORT; never decreases
    # the queue whose chunks are copied now: 1 + its number in the high 16 bits; the other bits are the bytes that it
    # has copied in a row
    slice: int
    min_ahead: int  # smallest vruntime of the queues of latency-sensitive tenants (rank AHEAD)
    queues: ctypes.Array[CopyQueueLayout]


class CopyPageLayout(ctypes.Structure):
    """The copy page, by which the tenants of a GPU schedule their copies; its memfd has COPY_PAGE_BYTES."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("page_bytes", ctypes.c_uint32),
        ("in_flight", ctypes.c_uint32),
        ("chunk_bytes", ctypes.c_uint64),
        ("period_bytes", ctypes.c_uint64),
        ("slice_bytes", ctypes.c_uint64),
        ("wait_lapse_ns", ctypes.c_uint64),
        ("slot_lapse_ns", ctypes.c_uint64),
        ("alone_bytes", ctypes.c_uint64),
        ("reserved", ctypes.c_uint8 * 192),
        ("links", CopyLinkLayout * COPY_LINKS),
    )
    magic: int
    version: int
    page_bytes: int
    in_flight: int  # number of chunks that may be in flight on a link
    chunk_bytes: int
    period_bytes: int  # number of bytes that all waiting queues together copy before it is the first queue's turn again
    # size into which copies within the device are split for best-effort tenants; 0: they are not split
    slice_bytes: int
    wait_lapse_ns: int  # a queue counts as waiting for this long after its last request for a chunk
    slot_lapse_ns: int  # a process's claim of a slot expires after this time
    # size of chunks while no other tenant copies and no latency-sensitive tenant is admitted; values below chunk_bytes
    # count as chunk_bytes
    alone_bytes: int
    links: ctypes.Array[CopyLinkLayout]
