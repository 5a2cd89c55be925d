"""The wire protocol between the driver shim and the agent.

Generated from protocol.toml by native/abi/generate.py: change the TOML file, then run the script.
"""

from __future__ import annotations

import enum

PROTOCOL_MAGIC = 0x434F5445  # "COTE"
PROTOCOL_VERSION = 1
MESSAGE_BYTES = 256
NO_SLOT = 0xFFFFFFFF
# deadline of a turn (a time slice that the agent grants) that lasts until it is revoked
NO_DEADLINE = 0xFFFFFFFFFFFFFFFF
NO_LIMIT = 0xFFFFFFFFFFFFFFFF
# name of the socket, beside the agent's socket, at which processes join the LS gate (by which latency-sensitive work
# holds back best-effort work)
FLOOR_SOCKET = "floor.sock"


class MessageType(enum.IntEnum):
    """Types of the messages between processes and the agent; the field `type` of a header has one."""

    HELLO = 1  # first message of a connection; answered by HELLO_REPLY
    GPU_ATTACH = 2  # reports that the process creates a context on a GPU; answered by GPU_REPLY
    TOKEN_REQUEST = 3  # requests a turn on a GPU; answered by TOKEN_GRANT when the turn begins
    TOKEN_RELEASE = 4  # the process returns its turn; not answered
    MEMORY_RESERVE = 5  # requests memory before its allocation; answered by MEMORY_REPLY
    MEMORY_COMMIT = 6  # reports an allocation; not answered
    MEMORY_RELEASE = 7  # reports that memory was freed; not answered
    MEMORY_QUERY = 8  # asks how much memory is charged to the tenant, and for its limit; answered by MEMORY_REPLY
    MEMORY_STATE = 9  # reports the memory that the process holds, after a reconnection; not answered
    BURST_REPORT = 10  # reports how long the process keeps the GPU busy at a time; not answered
    WARNING = 11  # reports a warning for the operator; not answered
    GOODBYE = 12  # the process ends; not answered
    # requests the copy page (shared memory for scheduling copies) of the GPU of header.slot; answered by COPY_REPLY
    COPY_ATTACH = 13
    # reports a new, changed or ended channel group of a context; unless the group has ended, the message carries a
    # descriptor of the process's open /dev/nvidiactl, through which the agent controls the group; not answered
    CHANNEL_GROUP = 14
    HELLO_REPLY = 64  # carries the shared page: memory that both the agent and the process map
    # header.slot is the index of the GPU's slot on the page; status DENIED: the tenant may not use this GPU
    GPU_REPLY = 65
    TOKEN_GRANT = 66  # begins a turn, or changes the deadline of the present one
    TOKEN_REVOKE = 67  # orders the process to end its turn now
    MEMORY_REPLY = 68  # answers MEMORY_RESERVE and MEMORY_QUERY
    PAGE_UPDATE = 69  # the agent has changed flags or numbers on the shared page
    ERROR = 70  # a request has failed; header.status has the reason
    COPY_REPLY = 71  # carries the GPU's copy page, if the status is OK
    MOVE_STATE = 80  # reports how much swappable memory is on the GPU and how much is evicted; not answered
    MOVE_ROOM = 81  # requests space on a full GPU; answered by MOVE_ROOM_REPLY
    MOVE_PROGRESS = 82  # reports the bytes moved so far by an order; not answered
    MOVE_DONE = 83  # reports that an order is done, with the sequence number of the order; not answered
    MOVE_BACKING = 84  # requests host memory for evicted contents; answered by MOVE_BACKING_REPLY
    MOVE_OUT = 88  # orders the process to evict memory to the host
    MOVE_IN = 89  # orders the process to restore evicted memory
    MOVE_ALLOW = 90  # raises the number of bytes that a MOVE_IN in progress may map
    MOVE_ROOM_REPLY = 91  # answers MOVE_ROOM
    MOVE_BACKING_REPLY = 92  # carries a memfd of backing_bytes bytes, to which memory is evicted; 0 bytes: no memfd
    FLOOR_JOIN = 112  # asks at FLOOR_SOCKET to join the LS gate of a GPU, where best-effort launches wait for LS work
    FLOOR_PAGE = 113  # carries the gate page: shared memory with the LS-activity flags
    FLOOR_KERNELS = 114  # carries the kernel table of this tenant
    FLOOR_WORDS = 115  # carries the wait-flag page: flags for which streams wait on the device


class Status(enum.IntEnum):
    """Status of a reply: header.status."""

    OK = 0
    BAD_MESSAGE = 1
    BAD_VERSION = 2
    UNKNOWN_TENANT = 3
    DENIED = 4
    OUT_OF_MEMORY = 5
    UNKNOWN_GPU = 6
    TOO_MANY = 7  # the process or tenant has too many connections, slots or outstanding reservations
    SHUTTING_DOWN = 8
    INTERNAL = 9


class Oversubscribe(enum.IntEnum):
    """How a tenant's memory is evicted if the tenants' memory exceeds that of the GPU."""

    NONE = 0
    SWAP = 1  # the tenant's own processes copy its memory to the host; addresses do not change
    MANAGED = 2  # the tenant's memory is managed memory, which the driver pages; before a turn, all of it is prefetched
    PARK = 3  # the driver checkpoints the tenant's processes as a whole


class MoveFlag(enum.IntFlag):
    """Flags of messages about evicting and restoring memory; each is used in one message only."""

    FIXED = 1  # MOVE_STATE: this process's memory cannot be evicted from now on
    STOP = 2  # MOVE_ALLOW: no more bytes will be allowed; end the order with the bytes already moved
    # MOVE_ROOM: the process needs the memory before its next turn, so the tenant that has the turn now must be evicted
    NOW = 4
    CONTEXT = 8  # MOVE_ROOM: the driver had no memory for a context, whose size is not known


class MemoryFamily(enum.IntEnum):
    """Family of an allocation: how the memory was allocated."""

    PLAIN = 1  # cuMemAlloc, cuMemAllocPitch
    MANAGED = 2  # cuMemAllocManaged; charged in full, even if its pages are in host memory
    ARRAY = 3  # CUDA arrays and mipmapped arrays
    POOL = 4  # stream-ordered pools; the pool's attribute RESERVED_MEM_CURRENT is charged
    VMM = 5  # cuMemCreate on a device
    GRAPH = 6  # memory nodes of graphs; the memory that the driver reserves on the device for graphs is charged
    CONTEXT = 7  # memory of a context; if its size is 0 (not known), the agent charges a default
    HOST = 8  # pinned host memory; header.slot is NO_SLOT


class FailMode(enum.IntEnum):
    """Behaviour of a process while it cannot reach the agent."""

    CLOSED = 0  # launches wait until an agent runs again
    OPEN = 1  # launches continue; memory is counted in the process and reported on reconnection


class ReleaseReason(enum.IntEnum):
    """Why a process returned its turn."""

    DEADLINE = 1
    REVOKED = 2
    IDLE = 3
    EXIT = 4


class WarningCode(enum.IntEnum):
    """Code of a WARNING message, which says what happened."""

    NO_LAUNCH_SEEN = 1  # the process has used the GPU, but has made no launch through the shim
    NOT_INTERCEPTED = 2  # the driver returns entry points that the shim cannot replace
    DRAIN_TIMEOUT = 3  # GPU work did not end in time: a kernel hangs, or waits for something outside the GPU
    OVER_LIMIT = 4  # the tenant exceeds its limit by memory that could be counted only after it was allocated
    NOT_MOVABLE = 8  # the tenant may use more memory than the GPU has, but some of its memory cannot be evicted
    NO_FLOOR = 16  # a best-effort program could not connect to the LS gate of its GPU


# fields and their formats for the struct module, in order; x is padding
LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "header": (  # The first part of every message
        ("magic", "I"),  # PROTOCOL_MAGIC
        ("version", "H"),  # PROTOCOL_VERSION
        ("type", "H"),  # MessageType
        ("sequence", "Q"),  # number of a request; its reply has the same number
        ("status", "I"),  # in a reply, a Status: whether the request succeeded; 0 in requests
        ("slot", "I"),  # index of the GPU's slot on the process's page, or NO_SLOT
        ("sent_ns", "Q"),
    ),
    "hello": (  # Body of HELLO
        ("pid", "I"),  # pid as the process sees it; the agent uses SO_PEERCRED instead
        ("flags", "I"),  # not used
        ("start_time_ticks", "Q"),  # field 22 of /proc/self/stat
        ("driver_version", "I"),  # cuDriverGetVersion, e.g. 13000
        ("shim_version", "I"),  # PROTOCOL_VERSION that the shim was built with
        ("token", "64s"),
        ("program", "64s"),  # name of the program, for display
        ("reserved", "72x"),
    ),
    "hello_reply": (  # Body of HELLO_REPLY
        ("connection_id", "Q"),
        ("fail_mode", "I"),  # FailMode
        ("reconnect_ms", "I"),  # time between two attempts of the shim to reconnect to an agent that has ended
        ("tenant", "64s"),  # name of the tenant, for display
        ("oversubscribe", "I"),  # Oversubscribe
        ("reserved", "140x"),
    ),
    "gpu_attach": (  # Body of GPU_ATTACH
        ("uuid", "16s"),  # UUID of the GPU or MIG device
        ("total_bytes", "Q"),
        ("free_bytes", "Q"),  # free memory that the driver reports; 0: not known
        ("ordinal", "I"),  # CUDA's index in the process, for display only
        ("sm_count", "I"),
        ("name", "64s"),
        ("reserved", "120x"),
    ),
    "token_request": (  # Body of TOKEN_REQUEST
        # estimate of the longest time for which the process keeps the GPU busy without a pause; 0: not known
        ("burst_ns", "Q"),
        ("gap_ns", "Q"),  # estimate of the time for which the process leaves the GPU idle after it was busy
        ("waiting_since_ns", "Q"),
        # bit i: this process also has a context on the GPU of slot i; the agent grants its turns on all these GPUs at
        # once
        ("gang_mask", "I"),
        ("threads_waiting", "I"),
        ("reserved", "192x"),
    ),
    "token_release": (  # Body of TOKEN_RELEASE
        ("epoch", "Q"),
        ("used_ns", "Q"),  # drained_ns - first_submit_ns; 0 if nothing was launched
        ("overuse_ns", "Q"),  # time from the deadline to drained_ns; 0 if the GPU had finished before the deadline
        ("first_submit_ns", "Q"),  # time of the first launch in the turn; 0 if nothing was launched
        ("drained_ns", "Q"),  # time at which the GPU had finished this process's work
        ("launches", "Q"),  # number of kernel and graph launches in the turn
        ("copies", "Q"),  # number of copies and memsets in the turn
        ("burst_ns", "Q"),  # new estimate of the busy time, as in TOKEN_REQUEST
        ("gap_ns", "Q"),
        ("reason", "I"),  # ReleaseReason
        ("drained", "I"),  # 1: the GPU has finished all work of this process; 0: not yet
        ("wants_more", "I"),  # 1: a thread already waits for the next turn; a TOKEN_REQUEST follows
        ("reserved", "140x"),
    ),
    "token_grant": (  # Body of TOKEN_GRANT
        ("epoch", "Q"),
        ("deadline_ns", "Q"),  # end of the turn; NO_DEADLINE: it lasts until it is revoked
        ("inflight_allowed_ns", "Q"),  # largest predicted GPU time of the work that the process may have in flight
        ("reserved", "200x"),
    ),
    "token_revoke": (  # Body of TOKEN_REVOKE
        ("epoch", "Q"),
        ("reserved", "216x"),
    ),
    "memory": (  # Body of all messages whose names begin with MEMORY
        ("family", "I"),  # MemoryFamily
        ("reserved_0", "4x"),
        ("reservation", "Q"),  # number in the reply to MEMORY_RESERVE, repeated in MEMORY_COMMIT
        # size that the process requests (MEMORY_RESERVE), has allocated (MEMORY_COMMIT) or freed (MEMORY_RELEASE), or
        # holds now (MEMORY_STATE)
        ("bytes", "Q"),
        ("used_bytes", "Q"),  # MEMORY_REPLY: memory charged to the tenant on this GPU
        ("limit_bytes", "Q"),  # MEMORY_REPLY: the tenant's limit, NO_LIMIT if it has none
        ("reserved", "184x"),
    ),
    "text": (  # Body of WARNING, ERROR and GOODBYE
        ("code", "I"),  # WarningCode or Status
        ("reserved_0", "4x"),
        ("text", "216s"),  # one sentence
    ),
    "burst": (  # Body of BURST_REPORT
        ("burst_ns", "Q"),
        ("gap_ns", "Q"),
        ("reserved", "208x"),
    ),
    "move": (  # Body of all messages whose names begin with MOVE
        # MOVE_OUT: least number of bytes to evict; MOVE_IN, MOVE_ALLOW: bytes that may be mapped so far; MOVE_ROOM:
        # bytes that are needed; MOVE_PROGRESS, MOVE_DONE: bytes moved so far
        ("bytes", "Q"),
        # MOVE_OUT: begin of the range to which memory is evicted, as an offset in the memfd of MOVE_BACKING_REPLY
        ("base", "Q"),
        ("span_bytes", "Q"),  # MOVE_OUT: length of that range
        ("resident_bytes", "Q"),  # MOVE_STATE, MOVE_DONE: swappable memory that is on the GPU
        ("away_bytes", "Q"),  # MOVE_STATE, MOVE_DONE: swappable memory that is evicted
        ("backing_bytes", "Q"),  # MOVE_STATE, MOVE_DONE: host memory available for evicted memory
        # MOVE_STATE, MOVE_DONE: part of backing_bytes that is pinned (registered with the driver)
        ("pinned_bytes", "Q"),
        # MOVE_STATE, MOVE_DONE: the evicted contents are between backing_low and backing_high, which are offsets in the
        # memfd of MOVE_BACKING_REPLY; both are 0 if there are none
        ("backing_low", "Q"),
        ("backing_high", "Q"),
        ("elapsed_ns", "Q"),  # MOVE_DONE: time from the order to the end, without the time of waiting for MOVE_ALLOW
        ("flags", "I"),  # MoveFlag
        ("reserved_0", "4x"),
        ("piece_bytes", "Q"),  # MOVE_BACKING_REPLY: memory is moved in pieces of at most this size, a multiple of 2 MiB
        ("mapping_ns", "Q"),  # MOVE_DONE: part of elapsed_ns spent mapping and unmapping memory
        ("copying_ns", "Q"),  # MOVE_DONE: part of elapsed_ns spent waiting for copies
        # MOVE_DONE: part of the moved bytes that was exchanged with another process on the GPU without a copy
        ("handed_bytes", "Q"),
        # MOVE_STATE, MOVE_DONE: memory that stays on the GPU because other processes have opened it; not included in
        # the other fields
        ("staying_bytes", "Q"),
        ("reserved", "96x"),
    ),
    "copies": (  # Body of COPY_REPLY
        ("queue", "I"),  # index of the tenant's queue on the copy page
        ("participant", "I"),  # number of this process on the copy page, never 0
        ("page_bytes", "I"),
        ("reserved", "212x"),
    ),
    "channel_group": (  # Body of CHANNEL_GROUP
        # client, device, subdevice and group are handles of driver objects; together they identify the channel group
        ("client", "I"),
        ("device", "I"),
        ("subdevice", "I"),
        ("group", "I"),
        ("channel_count", "I"),  # number of channels; 0: the group no longer exists
        ("compute", "I"),  # 1: the group is on the compute engine; 0: on a copy engine
        ("channels", "200s"),  # the handles of the channels, each a u32
    ),
    "floor_join": (  # Body of FLOOR_JOIN; the agent learns from the operating system which process sent it
        ("uuid", "16s"),  # UUID of the GPU
        ("reserved_token", "64x"),
        ("role", "I"),  # FloorRole
        # 1: the process can use a kernel table (what is known about the tenant's kernels), so the agent may send it
        # with FLOOR_KERNELS
        ("wants_kernels", "I"),
        # 1: the process can use the wait-flag page (flags of latency-sensitive processes for which streams wait), so
        # the agent may send it with FLOOR_WORDS
        ("wants_words", "I"),
        ("reserved", "132x"),
    ),
    "floor_reply": (  # Body of FLOOR_PAGE; for a latency-sensitive process, header.slot is its index on the gate page
        ("work_class", "I"),  # WorkClass of this best-effort tenant's kernels
        ("work_sms", "I"),  # number of SMs that this tenant's kernels would fill; may exceed the GPU's; 0: not known
        # in-flight budget of this tenant: largest predicted GPU time of its work in flight; 0: the budget on the gate
        # page applies
        ("in_flight_us", "I"),
        # number of rows of the tenant's kernel table; if not 0, FLOOR_KERNELS follows and carries the table as a memfd
        ("kernels", "I"),
        ("words", "I"),  # 1: FLOOR_WORDS follows last, and carries the wait-flag page as a memfd
        ("reserved", "204x"),
    ),
}
BODY_OF: dict[MessageType, str] = {
    MessageType.HELLO: "hello",
    MessageType.GPU_ATTACH: "gpu_attach",
    MessageType.TOKEN_REQUEST: "token_request",
    MessageType.TOKEN_RELEASE: "token_release",
    MessageType.MEMORY_RESERVE: "memory",
    MessageType.MEMORY_COMMIT: "memory",
    MessageType.MEMORY_RELEASE: "memory",
    MessageType.MEMORY_QUERY: "memory",
    MessageType.MEMORY_STATE: "memory",
    MessageType.BURST_REPORT: "burst",
    MessageType.WARNING: "text",
    MessageType.GOODBYE: "text",
    MessageType.CHANNEL_GROUP: "channel_group",
    MessageType.HELLO_REPLY: "hello_reply",
    MessageType.TOKEN_GRANT: "token_grant",
    MessageType.TOKEN_REVOKE: "token_revoke",
    MessageType.MEMORY_REPLY: "memory",
    MessageType.ERROR: "text",
    MessageType.COPY_REPLY: "copies",
    MessageType.MOVE_STATE: "move",
    MessageType.MOVE_ROOM: "move",
    MessageType.MOVE_PROGRESS: "move",
    MessageType.MOVE_DONE: "move",
    MessageType.MOVE_BACKING: "move",
    MessageType.MOVE_OUT: "move",
    MessageType.MOVE_IN: "move",
    MessageType.MOVE_ALLOW: "move",
    MessageType.MOVE_ROOM_REPLY: "move",
    MessageType.MOVE_BACKING_REPLY: "move",
    MessageType.FLOOR_JOIN: "floor_join",
    MessageType.FLOOR_PAGE: "floor_reply",
}
