/* Generated from protocol.toml by native/abi/generate.py: change the TOML file, then run the script.
 * The wire protocol between the driver shim and the agent.  docs/protocol.md explains it. */
#ifndef COTENANT_ABI_PROTOCOL_H
#define COTENANT_ABI_PROTOCOL_H

#include <stdbool.h>
#include <stdint.h>

#define COTENANT_PROTOCOL_MAGIC 0x434F5445u /* "COTE" */
#define COTENANT_PROTOCOL_VERSION 1u
#define COTENANT_MESSAGE_BYTES 256u
#define COTENANT_NO_SLOT 0xFFFFFFFFu
/* deadline of a turn (a time slice that the agent grants) that lasts until it is revoked */
#define COTENANT_NO_DEADLINE UINT64_C(0xFFFFFFFFFFFFFFFF)
#define COTENANT_NO_LIMIT UINT64_C(0xFFFFFFFFFFFFFFFF)
#define COTENANT_ENV_SOCKET "COTENANT_SOCKET" /* path of the agent's socket */
#define COTENANT_ENV_TOKEN "COTENANT_TOKEN" /* secret by which the agent identifies the tenant */
#define COTENANT_ENV_DRIVER "COTENANT_DRIVER" /* absolute, versioned path of the real libcuda, or of the software GPU */
/* file for measured kernel times; only `cotenant profile kernels` sets it */
#define COTENANT_ENV_KERNELS "COTENANT_KERNELS"
#define COTENANT_ENV_NVML "COTENANT_NVML" /* absolute, versioned path of the real libnvidia-ml */
/* name of the socket, beside the agent's socket, at which processes join the LS gate (by which latency-sensitive
 * work holds back best-effort work) */
#define COTENANT_FLOOR_SOCKET "floor.sock"

/* Types of the messages between processes and the agent; the field `type` of a header has one. */
enum cotenant_message_type {
    COTENANT_HELLO = 1, /* first message of a connection; answered by HELLO_REPLY */
    COTENANT_GPU_ATTACH = 2, /* reports that the process creates a context on a GPU; answered by GPU_REPLY */
    COTENANT_TOKEN_REQUEST = 3, /* requests a turn on a GPU; answered by TOKEN_GRANT when the turn begins */
    COTENANT_TOKEN_RELEASE = 4, /* the process returns its turn; not answered */
    COTENANT_MEMORY_RESERVE = 5, /* requests memory before its allocation; answered by MEMORY_REPLY */
    COTENANT_MEMORY_COMMIT = 6, /* reports an allocation; not answered */
    COTENANT_MEMORY_RELEASE = 7, /* reports that memory was freed; not answered */
    /* asks how much memory is charged to the tenant, and for its limit; answered by MEMORY_REPLY */
    COTENANT_MEMORY_QUERY = 8,
    COTENANT_MEMORY_STATE = 9, /* reports the memory that the process holds, after a reconnection; not answered */
    COTENANT_BURST_REPORT = 10, /* reports how long the process keeps the GPU busy at a time; not answered */
    COTENANT_WARNING = 11, /* reports a warning for the operator; not answered */
    COTENANT_GOODBYE = 12, /* the process ends; not answered */
    /* requests the copy page (shared memory for scheduling copies) of the GPU of header.slot; answered by COPY_REPLY */
    COTENANT_COPY_ATTACH = 13,
    /* reports a new, changed or ended channel group of a context; unless the group has ended, the message carries a
     * descriptor of the process's open /dev/nvidiactl, through which the agent controls the group; not answered */
    COTENANT_CHANNEL_GROUP = 14,
    COTENANT_HELLO_REPLY = 64, /* carries the shared page: memory that both the agent and the process map */
    /* header.slot is the index of the GPU's slot on the page; status DENIED: the tenant may not use this GPU */
    COTENANT_GPU_REPLY = 65,
    COTENANT_TOKEN_GRANT = 66, /* begins a turn, or changes the deadline of the present one */
    COTENANT_TOKEN_REVOKE = 67, /* orders the process to end its turn now */
    COTENANT_MEMORY_REPLY = 68, /* answers MEMORY_RESERVE and MEMORY_QUERY */
    COTENANT_PAGE_UPDATE = 69, /* the agent has changed flags or numbers on the shared page */
    COTENANT_ERROR = 70, /* a request has failed; header.status has the reason */
    COTENANT_COPY_REPLY = 71, /* carries the GPU's copy page, if the status is OK */
    /* reports how much swappable memory is on the GPU and how much is evicted; not answered */
    COTENANT_MOVE_STATE = 80,
    COTENANT_MOVE_ROOM = 81, /* requests space on a full GPU; answered by MOVE_ROOM_REPLY */
    COTENANT_MOVE_PROGRESS = 82, /* reports the bytes moved so far by an order; not answered */
    COTENANT_MOVE_DONE = 83, /* reports that an order is done, with the sequence number of the order; not answered */
    COTENANT_MOVE_BACKING = 84, /* requests host memory for evicted contents; answered by MOVE_BACKING_REPLY */
    COTENANT_MOVE_OUT = 88, /* orders the process to evict memory to the host */
    COTENANT_MOVE_IN = 89, /* orders the process to restore evicted memory */
    COTENANT_MOVE_ALLOW = 90, /* raises the number of bytes that a MOVE_IN in progress may map */
    COTENANT_MOVE_ROOM_REPLY = 91, /* answers MOVE_ROOM */
    /* carries a memfd of backing_bytes bytes, to which memory is evicted; 0 bytes: no memfd */
    COTENANT_MOVE_BACKING_REPLY = 92,
    /* asks at FLOOR_SOCKET to join the LS gate of a GPU, where best-effort launches wait for LS work */
    COTENANT_FLOOR_JOIN = 112,
    COTENANT_FLOOR_PAGE = 113, /* carries the gate page: shared memory with the LS-activity flags */
    COTENANT_FLOOR_KERNELS = 114, /* carries the kernel table of this tenant */
    COTENANT_FLOOR_WORDS = 115, /* carries the wait-flag page: flags for which streams wait on the device */
};

/* Status of a reply: header.status. */
enum cotenant_status {
    COTENANT_OK = 0,
    COTENANT_BAD_MESSAGE = 1,
    COTENANT_BAD_VERSION = 2,
    COTENANT_UNKNOWN_TENANT = 3,
    COTENANT_DENIED = 4,
    COTENANT_OUT_OF_MEMORY = 5,
    COTENANT_UNKNOWN_GPU = 6,
    COTENANT_TOO_MANY = 7, /* the process or tenant has too many connections, slots or outstanding reservations */
    COTENANT_SHUTTING_DOWN = 8,
    COTENANT_INTERNAL = 9,
};

/* How a tenant's memory is evicted if the tenants' memory exceeds that of the GPU. */
enum cotenant_oversubscribe {
    COTENANT_OVERSUBSCRIBE_NONE = 0,
    /* the tenant's own processes copy its memory to the host; addresses do not change */
    COTENANT_OVERSUBSCRIBE_SWAP = 1,
    /* the tenant's memory is managed memory, which the driver pages; before a turn, all of it is prefetched */
    COTENANT_OVERSUBSCRIBE_MANAGED = 2,
    COTENANT_OVERSUBSCRIBE_PARK = 3, /* the driver checkpoints the tenant's processes as a whole */
};

/* Flags of messages about evicting and restoring memory; each is used in one message only. */
enum cotenant_move_flag {
    COTENANT_MOVE_FIXED = 1, /* MOVE_STATE: this process's memory cannot be evicted from now on */
    COTENANT_MOVE_STOP = 2, /* MOVE_ALLOW: no more bytes will be allowed; end the order with the bytes already moved */
    /* MOVE_ROOM: the process needs the memory before its next turn, so the tenant that has the turn now must be
     * evicted */
    COTENANT_MOVE_NOW = 4,
    COTENANT_MOVE_CONTEXT = 8, /* MOVE_ROOM: the driver had no memory for a context, whose size is not known */
};

/* Family of an allocation: how the memory was allocated. */
enum cotenant_memory_family {
    COTENANT_MEMORY_PLAIN = 1, /* cuMemAlloc, cuMemAllocPitch */
    COTENANT_MEMORY_MANAGED = 2, /* cuMemAllocManaged; charged in full, even if its pages are in host memory */
    COTENANT_MEMORY_ARRAY = 3, /* CUDA arrays and mipmapped arrays */
    COTENANT_MEMORY_POOL = 4, /* stream-ordered pools; the pool's attribute RESERVED_MEM_CURRENT is charged */
    COTENANT_MEMORY_VMM = 5, /* cuMemCreate on a device */
    /* memory nodes of graphs; the memory that the driver reserves on the device for graphs is charged */
    COTENANT_MEMORY_GRAPH = 6,
    COTENANT_MEMORY_CONTEXT = 7, /* memory of a context; if its size is 0 (not known), the agent charges a default */
    COTENANT_MEMORY_HOST = 8, /* pinned host memory; header.slot is NO_SLOT */
};

/* Behaviour of a process while it cannot reach the agent. */
enum cotenant_fail_mode {
    COTENANT_FAIL_CLOSED = 0, /* launches wait until an agent runs again */
    COTENANT_FAIL_OPEN = 1, /* launches continue; memory is counted in the process and reported on reconnection */
};

/* Why a process returned its turn. */
enum cotenant_release_reason {
    COTENANT_RELEASE_DEADLINE = 1,
    COTENANT_RELEASE_REVOKED = 2,
    COTENANT_RELEASE_IDLE = 3,
    COTENANT_RELEASE_EXIT = 4,
};

/* Code of a WARNING message, which says what happened. */
enum cotenant_warning_code {
    COTENANT_WARN_NO_LAUNCH_SEEN = 1, /* the process has used the GPU, but has made no launch through the shim */
    COTENANT_WARN_NOT_INTERCEPTED = 2, /* the driver returns entry points that the shim cannot replace */
    /* GPU work did not end in time: a kernel hangs, or waits for something outside the GPU */
    COTENANT_WARN_DRAIN_TIMEOUT = 3,
    /* the tenant exceeds its limit by memory that could be counted only after it was allocated */
    COTENANT_WARN_OVER_LIMIT = 4,
    /* the tenant may use more memory than the GPU has, but some of its memory cannot be evicted */
    COTENANT_WARN_NOT_MOVABLE = 8,
    COTENANT_WARN_NO_FLOOR = 16, /* a best-effort program could not connect to the LS gate of its GPU */
};

/* The first part of every message. */
struct cotenant_header {
    uint32_t magic; /* PROTOCOL_MAGIC */
    uint16_t version; /* PROTOCOL_VERSION */
    uint16_t type; /* MessageType */
    uint64_t sequence; /* number of a request; its reply has the same number */
    uint32_t status; /* in a reply, a Status: whether the request succeeded; 0 in requests */
    uint32_t slot; /* index of the GPU's slot on the process's page, or NO_SLOT */
    uint64_t sent_ns;
};
_Static_assert(sizeof(struct cotenant_header) == 32, "cotenant_header does not have 32 bytes");

/* Body of HELLO. */
struct cotenant_hello {
    uint32_t pid; /* pid as the process sees it; the agent uses SO_PEERCRED instead */
    uint32_t flags; /* not used */
    uint64_t start_time_ticks; /* field 22 of /proc/self/stat */
    uint32_t driver_version; /* cuDriverGetVersion, e.g. 13000 */
    uint32_t shim_version; /* PROTOCOL_VERSION that the shim was built with */
    uint8_t token[64];
    uint8_t program[64]; /* name of the program, for display */
    uint8_t reserved[72];
};
_Static_assert(sizeof(struct cotenant_hello) == 224, "cotenant_hello does not have 224 bytes");

/* Body of HELLO_REPLY. */
struct cotenant_hello_reply {
    uint64_t connection_id;
    uint32_t fail_mode; /* FailMode */
    uint32_t reconnect_ms; /* time between two attempts of the shim to reconnect to an agent that has ended */
    uint8_t tenant[64]; /* name of the tenant, for display */
    uint32_t oversubscribe; /* Oversubscribe */
    uint8_t reserved[140];
};
_Static_assert(sizeof(struct cotenant_hello_reply) == 224, "cotenant_hello_reply does not have 224 bytes");

/* Body of GPU_ATTACH. */
struct cotenant_gpu_attach {
    uint8_t uuid[16]; /* UUID of the GPU or MIG device */
    uint64_t total_bytes;
    uint64_t free_bytes; /* free memory that the driver reports; 0: not known */
    uint32_t ordinal; /* CUDA's index in the process, for display only */
    uint32_t sm_count;
    uint8_t name[64];
    uint8_t reserved[120];
};
_Static_assert(sizeof(struct cotenant_gpu_attach) == 224, "cotenant_gpu_attach does not have 224 bytes");

/* Body of TOKEN_REQUEST. */
struct cotenant_token_request {
    /* estimate of the longest time for which the process keeps the GPU busy without a pause; 0: not known */
    uint64_t burst_ns;
    uint64_t gap_ns; /* estimate of the time for which the process leaves the GPU idle after it was busy */
    uint64_t waiting_since_ns;
    /* bit i: this process also has a context on the GPU of slot i; the agent grants its turns on all these GPUs at
     * once */
    uint32_t gang_mask;
    uint32_t threads_waiting;
    uint8_t reserved[192];
};
_Static_assert(sizeof(struct cotenant_token_request) == 224, "cotenant_token_request does not have 224 bytes");

/* Body of TOKEN_RELEASE. */
struct cotenant_token_release {
    uint64_t epoch;
    uint64_t used_ns; /* drained_ns - first_submit_ns; 0 if nothing was launched */
    uint64_t overuse_ns; /* time from the deadline to drained_ns; 0 if the GPU had finished before the deadline */
    uint64_t first_submit_ns; /* time of the first launch in the turn; 0 if nothing was launched */
    uint64_t drained_ns; /* time at which the GPU had finished this process's work */
    uint64_t launches; /* number of kernel and graph launches in the turn */
    uint64_t copies; /* number of copies and memsets in the turn */
    uint64_t burst_ns; /* new estimate of the busy time, as in TOKEN_REQUEST */
    uint64_t gap_ns;
    uint32_t reason; /* ReleaseReason */
    uint32_t drained; /* 1: the GPU has finished all work of this process; 0: not yet */
    uint32_t wants_more; /* 1: a thread already waits for the next turn; a TOKEN_REQUEST follows */
    uint8_t reserved[140];
};
_Static_assert(sizeof(struct cotenant_token_release) == 224, "cotenant_token_release does not have 224 bytes");

/* Body of TOKEN_GRANT. */
struct cotenant_token_grant {
    uint64_t epoch;
    uint64_t deadline_ns; /* end of the turn; NO_DEADLINE: it lasts until it is revoked */
    uint64_t inflight_allowed_ns; /* largest predicted GPU time of the work that the process may have in flight */
    uint8_t reserved[200];
};
_Static_assert(sizeof(struct cotenant_token_grant) == 224, "cotenant_token_grant does not have 224 bytes");

/* Body of TOKEN_REVOKE. */
struct cotenant_token_revoke {
    uint64_t epoch;
    uint8_t reserved[216];
};
_Static_assert(sizeof(struct cotenant_token_revoke) == 224, "cotenant_token_revoke does not have 224 bytes");

/* Body of all messages whose names begin with MEMORY. */
struct cotenant_memory {
    uint32_t family; /* MemoryFamily */
    uint32_t reserved_0;
    uint64_t reservation; /* number in the reply to MEMORY_RESERVE, repeated in MEMORY_COMMIT */
    /* size that the process requests (MEMORY_RESERVE), has allocated (MEMORY_COMMIT) or freed (MEMORY_RELEASE), or
     * holds now (MEMORY_STATE) */
    uint64_t bytes;
    uint64_t used_bytes; /* MEMORY_REPLY: memory charged to the tenant on this GPU */
    uint64_t limit_bytes; /* MEMORY_REPLY: the tenant's limit, NO_LIMIT if it has none */
    uint8_t reserved[184];
};
_Static_assert(sizeof(struct cotenant_memory) == 224, "cotenant_memory does not have 224 bytes");

/* Body of WARNING, ERROR and GOODBYE. */
struct cotenant_text {
    uint32_t code; /* WarningCode or Status */
    uint32_t reserved_0;
    uint8_t text[216]; /* one sentence */
};
_Static_assert(sizeof(struct cotenant_text) == 224, "cotenant_text does not have 224 bytes");

/* Body of BURST_REPORT. */
struct cotenant_burst {
    uint64_t burst_ns;
    uint64_t gap_ns;
    uint8_t reserved[208];
};
_Static_assert(sizeof(struct cotenant_burst) == 224, "cotenant_burst does not have 224 bytes");

/* Body of all messages whose names begin with MOVE. */
struct cotenant_move {
    /* MOVE_OUT: least number of bytes to evict; MOVE_IN, MOVE_ALLOW: bytes that may be mapped so far; MOVE_ROOM:
     * bytes that are needed; MOVE_PROGRESS, MOVE_DONE: bytes moved so far */
    uint64_t bytes;
    /* MOVE_OUT: begin of the range to which memory is evicted, as an offset in the memfd of MOVE_BACKING_REPLY */
    uint64_t base;
    uint64_t span_bytes; /* MOVE_OUT: length of that range */
    uint64_t resident_bytes; /* MOVE_STATE, MOVE_DONE: swappable memory that is on the GPU */
    uint64_t away_bytes; /* MOVE_STATE, MOVE_DONE: swappable memory that is evicted */
    uint64_t backing_bytes; /* MOVE_STATE, MOVE_DONE: host memory available for evicted memory */
    /* MOVE_STATE, MOVE_DONE: part of backing_bytes that is pinned (registered with the driver) */
    uint64_t pinned_bytes;
    /* MOVE_STATE, MOVE_DONE: the evicted contents are between backing_low and backing_high, which are offsets in the
     * memfd of MOVE_BACKING_REPLY; both are 0 if there are none */
    uint64_t backing_low;
    uint64_t backing_high;
    uint64_t elapsed_ns; /* MOVE_DONE: time from the order to the end, without the time of waiting for MOVE_ALLOW */
    uint32_t flags; /* MoveFlag */
    uint32_t reserved_0;
    uint64_t piece_bytes; /* MOVE_BACKING_REPLY: memory is moved in pieces of at most this size, a multiple of 2 MiB */
    uint64_t mapping_ns; /* MOVE_DONE: part of elapsed_ns spent mapping and unmapping memory */
    uint64_t copying_ns; /* MOVE_DONE: part of elapsed_ns spent waiting for copies */
    /* MOVE_DONE: part of the moved bytes that was exchanged with another process on the GPU without a copy */
    uint64_t handed_bytes;
    /* MOVE_STATE, MOVE_DONE: memory that stays on the GPU because other processes have opened it; not included in
     * the other fields */
    uint64_t staying_bytes;
    uint8_t reserved[96];
};
_Static_assert(sizeof(struct cotenant_move) == 224, "cotenant_move does not have 224 bytes");

/* Body of COPY_REPLY. */
struct cotenant_copies {
    uint32_t queue; /* index of the tenant's queue on the copy page */
    uint32_t participant; /* number of this process on the copy page, never 0 */
    uint32_t page_bytes;
    uint8_t reserved[212];
};
_Static_assert(sizeof(struct cotenant_copies) == 224, "cotenant_copies does not have 224 bytes");

/* Body of CHANNEL_GROUP. */
struct cotenant_channel_group {
    /* client, device, subdevice and group are handles of driver objects; together they identify the channel group */
    uint32_t client;
    uint32_t device;
    uint32_t subdevice;
    uint32_t group;
    uint32_t channel_count; /* number of channels; 0: the group no longer exists */
    uint32_t compute; /* 1: the group is on the compute engine; 0: on a copy engine */
    uint8_t channels[200]; /* the handles of the channels, each a u32 */
};
_Static_assert(sizeof(struct cotenant_channel_group) == 224, "cotenant_channel_group does not have 224 bytes");

/* Body of FLOOR_JOIN; the agent learns from the operating system which process sent it. */
struct cotenant_floor_join {
    uint8_t uuid[16]; /* UUID of the GPU */
    uint8_t reserved_token[64];
    uint32_t role; /* FloorRole */
    /* 1: the process can use a kernel table (what is known about the tenant's kernels), so the agent may send it
     * with FLOOR_KERNELS */
    uint32_t wants_kernels;
    /* 1: the process can use the wait-flag page (flags of latency-sensitive processes for which streams wait), so
     * the agent may send it with FLOOR_WORDS */
    uint32_t wants_words;
    uint8_t reserved[132];
};
_Static_assert(sizeof(struct cotenant_floor_join) == 224, "cotenant_floor_join does not have 224 bytes");

/* Body of FLOOR_PAGE; for a latency-sensitive process, header.slot is its index on the gate page. */
struct cotenant_floor_reply {
    uint32_t work_class; /* WorkClass of this best-effort tenant's kernels */
    uint32_t work_sms; /* number of SMs that this tenant's kernels would fill; may exceed the GPU's; 0: not known */
    /* in-flight budget of this tenant: largest predicted GPU time of its work in flight; 0: the budget on the gate
     * page applies */
    uint32_t in_flight_us;
    /* number of rows of the tenant's kernel table; if not 0, FLOOR_KERNELS follows and carries the table as a memfd */
    uint32_t kernels;
    uint32_t words; /* 1: FLOOR_WORDS follows last, and carries the wait-flag page as a memfd */
    uint8_t reserved[204];
};
_Static_assert(sizeof(struct cotenant_floor_reply) == 224, "cotenant_floor_reply does not have 224 bytes");

/* A message. */
struct cotenant_message {
    struct cotenant_header header;
    union {
        struct cotenant_hello hello;
        struct cotenant_hello_reply hello_reply;
        struct cotenant_gpu_attach gpu_attach;
        struct cotenant_token_request token_request;
        struct cotenant_token_release token_release;
        struct cotenant_token_grant token_grant;
        struct cotenant_token_revoke token_revoke;
        struct cotenant_memory memory;
        struct cotenant_text text;
        struct cotenant_burst burst;
        struct cotenant_move move;
        struct cotenant_copies copies;
        struct cotenant_channel_group channel_group;
        struct cotenant_floor_join floor_join;
        struct cotenant_floor_reply floor_reply;
        uint8_t bytes[224];
    } body;
};
_Static_assert(sizeof(struct cotenant_message) == COTENANT_MESSAGE_BYTES, "a message does not have COTENANT_MESSAGE_BYTES");

#endif
