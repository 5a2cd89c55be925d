/* The one wire protocol between the driver shim (C, in every tenant process) and the agent (one per node),
 * and the layout of the page the two share.  The agent decides; the shim asks and obeys.
 *
 * Transport: AF_UNIX, SOCK_SEQPACKET, one connection per process, host byte order.  Every message is exactly
 * COTENANT_MESSAGE_BYTES long; a receiver drops the connection on any other length, on a wrong magic and on an
 * unknown version (after one ERROR message, if it can still be sent).  Strings are NUL-padded and always hold a NUL.
 * Reserved fields are zero when sent and ignored when received.
 *
 * Order of a connection:
 *   shim  HELLO              ->            token from COTENANT_TOKEN (may be empty); the agent binds the connection
 *   agent HELLO_REPLY        <-            to a tenant by that token or by SO_PEERCRED / cgroup.  It carries, by
 *                                          SCM_RIGHTS, one memfd of COTENANT_PAGE_BYTES: this connection's page.
 *   shim  GPU_ATTACH         ->            once for each GPU on which the process makes a context
 *   agent GPU_REPLY          <-            header.slot = index of the GPU's slot in the page (status DENIED: not yours)
 *   ... token and memory traffic, in any order, several requests outstanding ...
 *   shim  GOODBYE            ->            then close.  A close without it (crash, kill -9) means the same:
 *                                          the agent frees the tokens and the memory of the connection.
 * Replies echo header.sequence of the request.  Messages marked "one way" have no reply.
 *
 * Turns.  A shim without a grant sends TOKEN_REQUEST; it sends one request per slot until it is granted.  To grant, the
 * agent writes the slot of the page (epoch last) and then sends TOKEN_GRANT with the same values.  The same epoch sent
 * again with another deadline_ns moves the deadline (longer or shorter).  deadline_ns == COTENANT_NO_DEADLINE: until
 * revoked.  To take a turn back before its deadline, the agent writes slot.epoch = 0 and sends TOKEN_REVOKE.
 * At its deadline, on revocation, or when idle (no launch for slot.idle_release_ns, GPU drained, slot.flags has
 * CONTENDED) the shim closes its gate, waits until calls_in_flight is 0, drains its streams and sends TOKEN_RELEASE
 * with what it used.  If the streams do not drain within slot.drain_timeout_ns it sends TOKEN_RELEASE with
 * drained = 0 and sends a second one (drained = 1, same epoch) once they do.  A shim that still has work after its
 * TOKEN_RELEASE sends a new TOKEN_REQUEST.  Epochs of one slot only grow; 0 is never a valid epoch.
 * A tenant with several processes has several connections: the turn belongs to the tenant, the agent gives each of
 * its processes that asks a grant with the same deadline and counts the turn as over when all have released.
 *
 * Memory.  Amounts are charged to the tenant.  MEMORY_RESERVE before the driver is called; the reply says yes
 * (status OK, a reservation number) or no (status OUT_OF_MEMORY); DENIED, to a tenant that oversubscribes, is yes, but ask for
 * MOVE_ROOM before taking it.  MEMORY_COMMIT after it with what was really taken
 * (0: the driver refused).  Reservation 0 in a COMMIT: taken without asking, because it could only be counted afterwards
 * (graphs, a pool that grew by itself); it is charged, over the cap or not.  MEMORY_RELEASE when it is given back.  The agent keeps slot.memory_used_bytes (the whole
 * tenant's charge on that GPU, context reserve included) and slot.memory_limit_bytes current, so that queries need no
 * message.  After a lost agent comes back, a new HELLO is followed by MEMORY_STATE for each slot and family in use.
 *
 * Moves.  HELLO_REPLY says whether the tenant oversubscribes; for swap, MOVE_BACKING then asks for the memfd (SCM_RIGHTS)
 * that its contents go to, one for all processes of the tenant.  The agent decides who is resident; the process that owns
 * a context moves its own memory, only while it has no turn.  MOVE_OUT names a span of that host memory and how much is to
 * leave; MOVE_IN brings everything back, never more than the agent has allowed so far (MOVE_ALLOW raises it, so that one
 * tenant's way in follows another's way out).  MOVE_PROGRESS counts, MOVE_DONE ends a move and echoes the order's
 * sequence; its status says whether everything went as ordered.  A process that cannot take memory because the GPU is full
 * asks with MOVE_ROOM: OK (room was made), DENIED (not now: it has no turn, so the memory comes when it gets one) or
 * OUT_OF_MEMORY.  MOVE_STATE says what is where.
 *
 * All times are nanoseconds of CLOCK_MONOTONIC.  Only fixed-width integers, so every field has one offset everywhere.
 */
#ifndef COTENANT_PROTOCOL_H
#define COTENANT_PROTOCOL_H

#include <stdint.h>

#define COTENANT_PROTOCOL_MAGIC 0x434f5445u /* "COTE" */
#define COTENANT_PROTOCOL_VERSION 1u
#define COTENANT_MESSAGE_BYTES 256u
#define COTENANT_PAGE_BYTES 8192u
#define COTENANT_MAX_GPUS 16u
#define COTENANT_NO_SLOT 0xffffffffu
#define COTENANT_NO_DEADLINE UINT64_MAX
#define COTENANT_NO_LIMIT UINT64_MAX

/* Where things are, never what is allowed: the environment that the launcher gives a tenant. */
#define COTENANT_ENV_SOCKET "COTENANT_SOCKET" /* path of the agent's socket */
#define COTENANT_ENV_TOKEN "COTENANT_TOKEN"   /* launcher-issued secret that names the tenant to the agent */
#define COTENANT_ENV_DRIVER "COTENANT_DRIVER" /* absolute, versioned path of the real libcuda (or the software GPU) */
#define COTENANT_ENV_KERNELS "COTENANT_KERNELS" /* where times of kernels are written: set for `cotenant profile kernels` only */
#define COTENANT_ENV_NVML "COTENANT_NVML"     /* absolute, versioned path of the real libnvidia-ml */

enum cotenant_message_type {
    /* shim -> agent */
    COTENANT_HELLO = 1,
    COTENANT_GPU_ATTACH = 2,
    COTENANT_TOKEN_REQUEST = 3,
    COTENANT_TOKEN_RELEASE = 4,   /* one way */
    COTENANT_MEMORY_RESERVE = 5,
    COTENANT_MEMORY_COMMIT = 6,   /* one way */
    COTENANT_MEMORY_RELEASE = 7,  /* one way */
    COTENANT_MEMORY_QUERY = 8,
    COTENANT_MEMORY_STATE = 9,    /* one way */
    COTENANT_BURST_REPORT = 10,   /* one way */
    COTENANT_WARNING = 11,        /* one way: something the operator must see */
    COTENANT_GOODBYE = 12,        /* one way */
    COTENANT_COPY_ATTACH = 13,
    /* agent -> shim */
    COTENANT_HELLO_REPLY = 64,
    COTENANT_GPU_REPLY = 65,
    COTENANT_TOKEN_GRANT = 66,    /* answers TOKEN_REQUEST, or comes unasked: start of a turn, moved deadline */
    COTENANT_TOKEN_REVOKE = 67,
    COTENANT_MEMORY_REPLY = 68,   /* answers MEMORY_RESERVE and MEMORY_QUERY */
    COTENANT_PAGE_UPDATE = 69,    /* look at the page again: flags or numbers changed */
    COTENANT_ERROR = 70,          /* answers anything that cannot be done; header.status says why */
    COTENANT_COPY_REPLY = 71,     /* answers COPY_ATTACH; status OK: carries the GPU's copy page (copy_page.h) */
    /* moving a tenant's memory: shim -> agent */
    COTENANT_MOVE_STATE = 80,     /* one way */
    COTENANT_MOVE_ROOM = 81,
    COTENANT_MOVE_PROGRESS = 82,  /* one way */
    COTENANT_MOVE_DONE = 83,      /* one way; header.sequence of the order */
    COTENANT_MOVE_BACKING = 84,
    /* agent -> shim */
    COTENANT_MOVE_OUT = 88,
    COTENANT_MOVE_IN = 89,
    COTENANT_MOVE_ALLOW = 90,
    COTENANT_MOVE_ROOM_REPLY = 91,
    COTENANT_MOVE_BACKING_REPLY = 92, /* move.backing_bytes and the memfd; 0 bytes: there is none */
};

/* What a tenant does when its memory and that of others exceed the card. */
enum cotenant_oversubscribe {
    COTENANT_OVERSUBSCRIBE_NONE = 0,
    COTENANT_OVERSUBSCRIBE_SWAP = 1,    /* moved in bulk at the same addresses, by its own process */
    COTENANT_OVERSUBSCRIBE_MANAGED = 2, /* managed memory: prefetched in bulk, paged by the driver */
    COTENANT_OVERSUBSCRIBE_PARK = 3,    /* whole processes, by the driver's checkpoint */
};

enum cotenant_move_flags {
    COTENANT_MOVE_FIXED = 1, /* STATE: this process's memory cannot be moved (any more) */
    COTENANT_MOVE_STOP = 2,  /* ALLOW: no more will be allowed, end the move with what is there */
    COTENANT_MOVE_NOW = 4,   /* ROOM: it cannot come with the next turn, whoever runs has to make way */
    COTENANT_MOVE_CONTEXT = 8, /* ROOM: the driver had no room for a context, whose size is not known */
    COTENANT_MOVE_HAND = 16, /* BACKING_REPLY: pieces are to be of memory that other processes can have */
};

enum cotenant_status {
    COTENANT_OK = 0,
    COTENANT_BAD_MESSAGE = 1,
    COTENANT_BAD_VERSION = 2,
    COTENANT_UNKNOWN_TENANT = 3,
    COTENANT_DENIED = 4,
    COTENANT_OUT_OF_MEMORY = 5,
    COTENANT_UNKNOWN_GPU = 6,
    COTENANT_TOO_MANY = 7, /* connections, slots, outstanding reservations */
    COTENANT_SHUTTING_DOWN = 8,
    COTENANT_INTERNAL = 9,
};

/* What the memory was taken for. */
enum cotenant_memory_family {
    COTENANT_MEMORY_PLAIN = 1,   /* cuMemAlloc, cuMemAllocPitch */
    COTENANT_MEMORY_MANAGED = 2, /* cuMemAllocManaged: charged whole */
    COTENANT_MEMORY_ARRAY = 3,   /* arrays, mipmapped arrays */
    COTENANT_MEMORY_POOL = 4,    /* stream-ordered pools: change of RESERVED_MEM_CURRENT */
    COTENANT_MEMORY_VMM = 5,     /* cuMemCreate on a device */
    COTENANT_MEMORY_GRAPH = 6,   /* memory nodes of graphs: change of the device's graph reserve */
    COTENANT_MEMORY_CONTEXT = 7, /* a context on a GPU; bytes = what it was measured to take, or 0 when not known:
                                    the agent then charges its own reserve.  Never refused for lack of a number. */
    COTENANT_MEMORY_HOST = 8,    /* pinned host memory; slot = COTENANT_NO_SLOT */
};

/* What to do when the agent cannot be reached any more. */
enum cotenant_fail_mode {
    COTENANT_FAIL_CLOSED = 0, /* launches wait until the agent is back */
    COTENANT_FAIL_OPEN = 1,   /* launches go on; memory is counted in the process and reported on reconnection */
};

enum cotenant_release_reason {
    COTENANT_RELEASE_DEADLINE = 1,
    COTENANT_RELEASE_REVOKED = 2,
    COTENANT_RELEASE_IDLE = 3,
    COTENANT_RELEASE_EXIT = 4,
};

enum cotenant_slot_flags {           /* written by the agent */
    COTENANT_SLOT_ATTACHED = 1u << 0,  /* the slot describes a GPU */
    COTENANT_SLOT_CONTENDED = 1u << 1, /* somebody else waits for this GPU: give the turn back when idle */
    COTENANT_SLOT_UNGATED = 1u << 2,   /* this tenant needs no turns on this GPU (whole, mps): count, do not wait */
    COTENANT_SLOT_UNFENCED = 1u << 3,  /* do not bound work in flight (with UNGATED: the least overhead) */
    COTENANT_SLOT_BEST_EFFORT = 1u << 4, /* launches wait while latency-sensitive work holds the floor: see floor.h */
    COTENANT_SLOT_HOLDS_FLOOR = 1u << 5, /* the tenant's work is latency-sensitive: it holds the floor while it has some */
    COTENANT_SLOT_COPIES = 1u << 8,    /* copies take turns on this GPU's link: ask for its page with COPY_ATTACH */
};

enum cotenant_warning_code {
    COTENANT_WARN_NO_LAUNCH_SEEN = 1,  /* the process used the GPU and no launch passed the shim */
    COTENANT_WARN_NOT_INTERCEPTED = 2, /* the driver hands out entry points that the shim cannot replace */
    COTENANT_WARN_DRAIN_TIMEOUT = 3,   /* work did not drain in time: hung kernel, or a wait on something outside */
    COTENANT_WARN_OVER_LIMIT = 4,      /* memory was taken that could only be counted afterwards */
    COTENANT_WARN_NOT_MOVABLE = 8,     /* memory of an oversubscribing tenant stays on the GPU */
    COTENANT_WARN_NO_FLOOR = 16,       /* a best-effort program could not join the floor of its GPU */
};

struct cotenant_header { /* 32 bytes */
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint64_t sequence;
    uint32_t status; /* cotenant_status in replies, 0 in requests */
    uint32_t slot;   /* index of the GPU's slot, or COTENANT_NO_SLOT */
    uint64_t sent_ns;
};

struct cotenant_hello {
    uint32_t pid;             /* as the process sees itself; the agent believes SO_PEERCRED */
    uint32_t flags;           /* reserved */
    uint64_t start_time_ticks; /* field 22 of /proc/self/stat */
    uint32_t driver_version;  /* cuDriverGetVersion, e.g. 13000 */
    uint32_t shim_version;    /* COTENANT_PROTOCOL_VERSION the shim was built with */
    uint8_t token[64];
    uint8_t program[64];      /* for people */
    uint8_t reserved[72];
};

struct cotenant_hello_reply {
    uint64_t connection_id;
    uint32_t fail_mode;       /* cotenant_fail_mode */
    uint32_t reconnect_ms;    /* how long to wait between tries to reconnect */
    uint8_t tenant[64];       /* for people */
    uint32_t oversubscribe;   /* cotenant_oversubscribe */
    uint32_t reserved_0;
    uint8_t reserved[136];
};

struct cotenant_gpu_attach { /* the reply is a bare header */
    uint8_t uuid[16];         /* of the GPU or MIG device */
    uint64_t total_bytes;
    uint64_t free_bytes;      /* at this moment, as the driver says; 0 if not known */
    uint32_t ordinal;         /* CUDA's index in the process: for people, never an identity */
    uint32_t sm_count;
    uint8_t name[64];
    uint8_t reserved[120];
};

struct cotenant_token_request {
    uint64_t burst_ns;        /* estimate of the longest busy span (0: not known) */
    uint64_t gap_ns;          /* estimate of the pauses between busy spans */
    uint64_t waiting_since_ns;
    uint32_t gang_mask;       /* bit i: this process also has a context on the GPU of slot i; grant all or none */
    uint32_t threads_waiting;
    uint8_t reserved[192];
};

struct cotenant_token_release {
    uint64_t epoch;
    uint64_t used_ns;         /* drained_ns - first_submit_ns, 0 if nothing was submitted */
    uint64_t overuse_ns;      /* how far drained_ns lies after the deadline, 0 if before */
    uint64_t first_submit_ns; /* 0 if nothing was submitted in the turn */
    uint64_t drained_ns;      /* when the GPU had finished this process's work */
    uint64_t launches;        /* kernel and graph launches in the turn */
    uint64_t copies;          /* copies and memsets in the turn */
    uint64_t burst_ns;        /* fresh estimates, as in the request */
    uint64_t gap_ns;
    uint32_t reason;          /* cotenant_release_reason */
    uint32_t drained;         /* 1: the GPU is free of this process's work; 0: it is not (see Turns) */
    uint32_t wants_more;      /* 1: a thread waits already; a TOKEN_REQUEST follows */
    uint32_t reserved_0;
    uint8_t reserved[136];
};

struct cotenant_token_grant {
    uint64_t epoch;
    uint64_t deadline_ns;
    uint64_t inflight_allowed_ns;
    uint8_t reserved[200];
};

struct cotenant_token_revoke {
    uint64_t epoch;
    uint8_t reserved[216];
};

struct cotenant_memory { /* RESERVE, COMMIT, RELEASE, QUERY, STATE and MEMORY_REPLY */
    uint32_t family;          /* cotenant_memory_family */
    uint32_t reserved_0;
    uint64_t reservation;     /* from the reply to RESERVE; given to COMMIT */
    uint64_t bytes;           /* RESERVE: wanted; COMMIT: taken; RELEASE: given back; STATE: held now */
    uint64_t used_bytes;      /* MEMORY_REPLY: the tenant's charge on this GPU */
    uint64_t limit_bytes;     /* MEMORY_REPLY: its cap, COTENANT_NO_LIMIT if none */
    uint8_t reserved[184];
};

struct cotenant_text { /* WARNING, ERROR: header.status is the code; GOODBYE: why */
    uint32_t code;            /* cotenant_warning_code or cotenant_status */
    uint32_t reserved_0;
    uint8_t text[216];        /* one sentence */
};

struct cotenant_burst { /* BURST_REPORT */
    uint64_t burst_ns;
    uint64_t gap_ns;
    uint8_t reserved[208];
};

struct cotenant_move { /* MOVE_*; sizes in bytes */
    uint64_t bytes;           /* OUT: at least so much is to leave; IN, ALLOW: allowed to be mapped so far; ROOM: wanted;
                                 PROGRESS, DONE: moved so far */
    uint64_t base;            /* OUT: where the span of host memory begins */
    uint64_t span_bytes;      /* OUT: and how long it is */
    uint64_t resident_bytes;  /* STATE, DONE: movable memory on the GPU */
    uint64_t away_bytes;      /* STATE, DONE: movable memory that is not */
    uint64_t backing_bytes;   /* STATE, DONE: host memory that is there to move to */
    uint64_t pinned_bytes;    /* STATE, DONE: of it, registered with the driver */
    uint64_t backing_low;     /* STATE, DONE: span of host memory that holds contents; low == high: none */
    uint64_t backing_high;
    uint64_t elapsed_ns;      /* DONE: from order to end, waits for allowance left out */
    uint32_t flags;           /* STATE: cotenant_move_flags */
    uint32_t reserved_0;
    uint64_t piece_bytes;     /* BACKING_REPLY: largest unit that moves, a multiple of 2 MiB */
    uint64_t mapping_ns;      /* DONE: of elapsed_ns, spent making and unmaking memory behind addresses */
    uint64_t copying_ns;      /* DONE: of elapsed_ns, spent waiting for copies */
    uint64_t handed_bytes;    /* DONE: of bytes, memory on the GPU that went to, or came from, another process */
    uint8_t reserved[104];
};

struct cotenant_copies { /* COPY_REPLY; the request is a bare header with the GPU's slot */
    uint32_t queue;           /* the tenant's queue on the copy page */
    uint32_t participant;     /* this process's number there, never 0 */
    uint32_t page_bytes;
    uint32_t reserved_0;
    uint8_t reserved[208];
};

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
        struct cotenant_copies copies;
        struct cotenant_move move;
        uint8_t bytes[224];
    } body;
};

/* The page.  The agent writes the first half of a slot, the shim the second; each 8-byte field is written with one
 * aligned store (from Python: ctypes.c_uint64.from_buffer, not struct with an explicit byte order). */
struct cotenant_slot { /* 256 bytes */
    /* written by the agent */
    uint64_t epoch;                /* 0: no turn now */
    uint64_t deadline_ns;
    uint64_t inflight_allowed_ns;  /* predicted GPU time that may be queued ahead of the host */
    uint64_t idle_release_ns;
    uint64_t drain_timeout_ns;
    uint64_t memory_limit_bytes;   /* COTENANT_NO_LIMIT: none */
    uint64_t memory_used_bytes;    /* whole tenant, this GPU */
    uint32_t flags;                /* cotenant_slot_flags */
    uint32_t reserved_0;
    uint8_t uuid[16];
    uint64_t reserved_1;
    uint64_t memory_kept_bytes;    /* of what the card has free, kept for others */
    uint64_t floor_parts;          /* into how many the bound of floor.h is divided for this process; 0: as its page says */
    uint8_t reserved_agent[24];
    /* written by the shim */
    uint64_t epoch_seen;           /* epoch that the gate obeys; 0: closed */
    uint64_t calls_in_flight;      /* host threads inside a gated driver call */
    uint64_t launches;             /* since start */
    uint64_t copies;
    uint64_t graph_launches;
    uint64_t fences;
    uint64_t last_submit_ns;       /* refreshed about once per millisecond of work */
    uint64_t predicted_busy_ns;    /* sum of predicted GPU time submitted since start */
    uint64_t waited_ns;            /* time that threads spent waiting for a turn, since start */
    uint64_t turns;                /* grants used */
    uint64_t contexts;             /* alive now */
    uint64_t floor_ns;             /* best-effort: when it last asked the floor for a launch */
    uint8_t reserved_shim[32];
};

struct cotenant_page {
    uint32_t magic;
    uint32_t version;
    uint32_t page_bytes;
    uint32_t slot_count;           /* COTENANT_MAX_GPUS */
    uint32_t fail_mode;            /* may change while the tenant runs */
    uint32_t reserved_0;
    uint64_t connection_id;
    uint8_t reserved[224];
    struct cotenant_slot slots[COTENANT_MAX_GPUS];
};

#define COTENANT_CHECK(name, condition) typedef char cotenant_check_##name[(condition) ? 1 : -1]
COTENANT_CHECK(header, sizeof(struct cotenant_header) == 32);
COTENANT_CHECK(message, sizeof(struct cotenant_message) == COTENANT_MESSAGE_BYTES);
COTENANT_CHECK(hello, sizeof(struct cotenant_hello) == 224);
COTENANT_CHECK(hello_reply, sizeof(struct cotenant_hello_reply) == 224);
COTENANT_CHECK(gpu_attach, sizeof(struct cotenant_gpu_attach) == 224);
COTENANT_CHECK(token_request, sizeof(struct cotenant_token_request) == 224);
COTENANT_CHECK(token_release, sizeof(struct cotenant_token_release) == 224);
COTENANT_CHECK(token_grant, sizeof(struct cotenant_token_grant) == 224);
COTENANT_CHECK(token_revoke, sizeof(struct cotenant_token_revoke) == 224);
COTENANT_CHECK(memory, sizeof(struct cotenant_memory) == 224);
COTENANT_CHECK(text, sizeof(struct cotenant_text) == 224);
COTENANT_CHECK(burst, sizeof(struct cotenant_burst) == 224);
COTENANT_CHECK(copies, sizeof(struct cotenant_copies) == 224);
COTENANT_CHECK(move, sizeof(struct cotenant_move) == 224);
COTENANT_CHECK(slot, sizeof(struct cotenant_slot) == 256);
COTENANT_CHECK(page, sizeof(struct cotenant_page) <= COTENANT_PAGE_BYTES);

#endif
