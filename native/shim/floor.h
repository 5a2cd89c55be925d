/* The floor of a GPU: a page that says whether latency-sensitive (LS) work is active there, so that best-effort (BE) work
 * stays out of its way.  LS processes raise and lower it with plain stores, BE processes look at it before each launch;
 * neither makes a system call for it.
 *
 * The agent listens at COTENANT_FLOOR_SOCKET beside its other socket: AF_UNIX, SOCK_SEQPACKET, messages of protocol.h's
 * size and header.  A process sends FLOOR_JOIN and gets FLOOR_PAGE with the page of that GPU as a memfd (by SCM_RIGHTS),
 * writable for LS and read-only for BE.  A second page (wants_words) says again who is active, for the streams of BE processes that
 * wait for it on the device: writable for both, since a driver pins only what its process may write and a stream asks no clock, so
 * that BE processes lower there whom the first page does not show (any more).  It keeps the connection: when it closes, whatever the process held is lowered,
 * so that an LS process that is killed does not leave BE waiting. */
#ifndef COTENANT_FLOOR_H
#define COTENANT_FLOOR_H

#include <stdint.h>

#define COTENANT_FLOOR_SOCKET "floor.sock"
#define COTENANT_FLOOR_BYTES 4096u
#define COTENANT_FLOOR_MAGIC 0x464c4f52u /* "FLOR" */
#define COTENANT_FLOOR_VERSION 1u
#define COTENANT_FLOOR_HOLDERS 64u

enum cotenant_floor_message { COTENANT_FLOOR_JOIN = 112, COTENANT_FLOOR_PAGE = 113, COTENANT_FLOOR_KERNELS = 114,
                              COTENANT_FLOOR_WORDS = 115 };
enum cotenant_floor_role { COTENANT_FLOOR_LATENCY_SENSITIVE = 1, COTENANT_FLOOR_BEST_EFFORT = 2 };

/* What work needs most.  A raised byte holds the class of the LS work that is active; 0 there: down. */
enum cotenant_work_class { COTENANT_WORK_UNKNOWN = 1, COTENANT_WORK_MEMORY = 2, COTENANT_WORK_COMPUTE = 3 };

/* Rules of BE; floor/floor_rule.h holds them. */
enum cotenant_floor_scheme {
    COTENANT_SCHEME_FREE = 0,     /* no gate: mps-plus, static */
    COTENANT_SCHEME_TEMPORAL = 1, /* one kernel at a time, and only while LS is idle */
    COTENANT_SCHEME_ORION = 2,    /* beside LS by class and SMs, in batches of interval_ns */
    COTENANT_SCHEME_TIDAL = 3,    /* none beside LS (or a measured part), bounded time in flight otherwise */
};

struct cotenant_floor_join {
    uint8_t uuid[16];
    uint8_t reserved_token[64]; /* who joins is told by the socket */
    uint32_t role;
    uint32_t wants_kernels;  /* 1: FLOOR_KERNELS may follow */
    uint32_t wants_words;    /* 1: FLOOR_WORDS may follow */
    uint8_t reserved[132];
};

struct cotenant_floor_reply { /* header.slot: index of the holder (LS) */
    uint32_t work_class;     /* of this tenant's kernels (BE) */
    uint32_t work_sms;       /* SMs that they fill, which may be more than there are; 0: not known */
    uint64_t interval_ns;    /* what this tenant may have in flight, instead of the page's; 0: the page's */
    uint32_t kernels;        /* entries of a table, not 0: FLOOR_KERNELS follows and brings it as a memfd */
    uint32_t words;          /* 1: FLOOR_WORDS follows, last, and brings the second page as a memfd */
    uint8_t reserved[200];
};

/* One row of the table, ordered by key: FNV-1a of the kernel's name, then grid and block, or of the name alone.  Names count up to
 * COTENANT_KERNEL_NAME bytes, which is what a profile keeps of them: templates have longer ones. */
#define COTENANT_KERNEL_NAME 511u
struct cotenant_kernel {
    uint64_t key;
    uint32_t duration_ns;    /* 0: not known */
    uint16_t sms;            /* as work_sms */
    uint8_t work_class;      /* cotenant_work_class */
    uint8_t reserved;
};

struct cotenant_floor { /* 4096 bytes */
    /* written by the agent */
    uint32_t magic;
    uint32_t version;
    uint32_t page_bytes;
    uint32_t holders;         /* COTENANT_FLOOR_HOLDERS */
    uint32_t scheme;          /* cotenant_floor_scheme */
    uint32_t tenants;         /* BE processes here: they divide interval_ns, unless their slots say how (floor_parts) */
    uint64_t interval_ns;     /* predicted BE work that may be in flight, all BE processes together */
    uint64_t lead_ns;         /* a kernel may be queued this long before the one in front of it ends */
    uint64_t hold_limit_ns;   /* a holder that has not raised again for so long is not believed any more */
    uint32_t beside_permille; /* part of the time that BE may work beside LS */
    uint32_t sm_threshold;    /* orion: SMs that BE may fill beside LS; 0: those that the GPU has */
    uint32_t stretch_permille; /* interval_ns may grow so far for a process that leaves the GPU dry */
    uint32_t present;         /* LS processes that have joined; 0: nobody is there to be protected */
    uint64_t check_ns;        /* work between two events; 0: every piece has one */
    uint32_t duty_permille;   /* part of the time that BE may keep the GPU busy while no LS work is active; 0: all */
    uint32_t ahead_us;        /* predicted work that a BE process may launch before its time, held on the device; 0: none */
    uint32_t present_words;   /* of those present, how many write the second page: if fewer, streams must not rely on it */
    uint32_t ahead_below_permille; /* ahead is for programs whose launches wait for less than that part of the time */
    uint8_t reserved_agent[168];
    /* written by LS processes, each its own index, raised_ns before raised */
    uint8_t raised[COTENANT_FLOOR_HOLDERS]; /* cotenant_work_class, 0: down; one cache line, read by every BE launch */
    uint8_t reserved_raised[192];
    uint64_t raised_ns[COTENANT_FLOOR_HOLDERS];
    uint64_t raises[COTENANT_FLOOR_HOLDERS]; /* since it joined */
    /* written by the agent, for people */
    uint32_t pid[COTENANT_FLOOR_HOLDERS];
    uint8_t reserved[2304];
};

/* The second page: as `raised`, written after it by who raises and before it by who lowers. */
struct cotenant_floor_words { /* 4096 bytes */
    uint8_t raised[COTENANT_FLOOR_HOLDERS];
    uint8_t reserved[COTENANT_FLOOR_BYTES - COTENANT_FLOOR_HOLDERS];
};

typedef char cotenant_check_floor[sizeof(struct cotenant_floor) == COTENANT_FLOOR_BYTES ? 1 : -1];
typedef char cotenant_check_floor_join[sizeof(struct cotenant_floor_join) == 224 ? 1 : -1];
typedef char cotenant_check_kernel[sizeof(struct cotenant_kernel) == 16 ? 1 : -1];
typedef char cotenant_check_floor_reply[sizeof(struct cotenant_floor_reply) == 224 ? 1 : -1];

#endif
