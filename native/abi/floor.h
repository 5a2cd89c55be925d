/* Generated from floor.toml by native/abi/generate.py: change the TOML file, then run the script.
 * The LS gate: shared memory by which latency-sensitive (LS) processes hold back best-effort (BE) work.  docs/protocol.md explains it. */
#ifndef COTENANT_ABI_FLOOR_H
#define COTENANT_ABI_FLOOR_H

#include <stdbool.h>
#include <stdint.h>

#define COTENANT_FLOOR_BYTES 4096u
#define COTENANT_FLOOR_MAGIC 0x464C4F52u /* "FLOR" */
#define COTENANT_FLOOR_VERSION 2u
#define COTENANT_FLOOR_HOLDERS 64u /* largest number of LS processes on one GPU */
/* names of kernels are truncated to this many bytes in kernel profiles, and before their keys in the kernel table
 * are computed */
#define COTENANT_KERNEL_NAME 511u
/* scheme tidal: a kernel that takes longer than the in-flight budget is launched this long before the predicted end
 * of the previous kernel */
#define COTENANT_LEAD_NS 10000
/* scheme tidal: GPU time of BE work between two timing events, by which predicted times are checked */
#define COTENANT_EVENT_INTERVAL_NS 150000
/* scheme tidal: while the process leaves the GPU idle, its in-flight budget grows up to this factor, in thousandths */
#define COTENANT_STRETCH_PERMILLE 4000
/* largest GPU time of the BE work that a process may launch ahead; work that is launched ahead waits on the device
 * until it may run */
#define COTENANT_RUN_AHEAD_NS 20000000
/* with run_ahead auto, a process launches ahead only if its launches wait on the host for less than this fraction of
 * the time */
#define COTENANT_RUN_AHEAD_BELOW_PERMILLE 450

/* Role of a process at the LS gate. */
enum cotenant_floor_role {
    COTENANT_FLOOR_LATENCY_SENSITIVE = 1,
    COTENANT_FLOOR_BEST_EFFORT = 2,
};

/* Work class of a kernel: the resource that limits its speed. */
enum cotenant_work_class {
    COTENANT_WORK_NONE = 0, /* no work */
    COTENANT_WORK_UNKNOWN = 1,
    COTENANT_WORK_MEMORY = 2, /* memory bandwidth */
    COTENANT_WORK_COMPUTE = 3, /* arithmetic */
};

/* How a scheme restricts launches of best-effort (BE) processes beside latency-sensitive (LS) processes. */
enum cotenant_rule_kind {
    COTENANT_SCHEME_FREE = 0, /* BE launches never wait (schemes mps-plus and static) */
    COTENANT_SCHEME_TEMPORAL = 1, /* one BE kernel at a time, and only while no LS work is active */
    /* while LS work is active, a BE kernel may run only if its work class differs from that of the LS work (or one
     * of them is unknown) and it fills at most sm_threshold SMs. A process launches its part of in_flight_us, and
     * more only when that work has ended */
    COTENANT_SCHEME_ORION = 2,
    /* while LS work is active, BE work runs for at most overlap_permille of the time (0: not at all). While no LS
     * work is active, the BE work in flight is limited by in_flight_us */
    COTENANT_SCHEME_TIDAL = 3,
};

/* Which BE processes launch work ahead, so that the work, not the launching thread, waits until it may run. */
enum cotenant_run_ahead {
    /* only processes whose launches wait on the host for less than RUN_AHEAD_BELOW_PERMILLE of the time */
    COTENANT_RUN_AHEAD_AUTO = 0,
    COTENANT_RUN_AHEAD_ALWAYS = 1,
    COTENANT_RUN_AHEAD_NEVER = 2,
};

/* A row of a tenant's kernel table: what is known about one kernel. */
struct cotenant_kernel {
    uint64_t key;
    uint32_t duration_ns; /* GPU time of the kernel; 0: not known */
    uint16_t sms; /* number of SMs that the kernel fills; may exceed the GPU's */
    uint8_t work_class; /* WorkClass */
    uint8_t reserved[1];
};
_Static_assert(sizeof(struct cotenant_kernel) == 16, "cotenant_kernel does not have 16 bytes");

/* The gate page: LS-activity flags and settings of a GPU's LS gate. */
struct cotenant_floor {
    /* The agent writes these fields. */
    uint32_t magic;
    uint32_t version;
    uint32_t page_bytes;
    uint32_t holders; /* number of entries of the arrays below: FLOOR_HOLDERS */
    uint32_t scheme; /* RuleKind */
    /* number of BE processes; each may have in_flight_us / tenants in flight, unless `floor_parts` on the shared
     * page between the process and the agent (tenant_page.toml) sets another divisor */
    uint32_t tenants;
    uint32_t in_flight_us; /* how much work all BE processes together may have in flight */
    /* an LS-activity flag counts only for this long after it was last set; older flags are ignored */
    uint32_t heartbeat_timeout_ms;
    uint32_t overlap_permille; /* fraction of the time for which BE work may run while LS work is active */
    /* fraction of the time for which BE work may keep the GPU busy while no LS work is active; 0: always */
    uint32_t duty_cycle_permille;
    /* scheme orion: number of SMs that BE work may fill while LS work is active; 0: all SMs of the GPU */
    uint32_t sm_threshold;
    uint32_t run_ahead; /* RunAhead */
    uint32_t present; /* number of connected LS processes; if it is 0, BE launches do not wait */
    /* number of LS processes that also write the wait-flag page; if it is less than `present`, BE streams must not
     * wait on that page */
    uint32_t present_words;
    uint8_t reserved_agent[200];
    /* LS processes write these fields, each at its own index, and raised_ns before raised. */
    /* LS-activity flags, each a WorkClass (0: not active); BE processes read this one cache line before every launch */
    uint8_t raised[COTENANT_FLOOR_HOLDERS];
    uint8_t reserved_raised[192];
    uint64_t raised_ns[COTENANT_FLOOR_HOLDERS]; /* time at which the process last set its flag */
    uint64_t raises[COTENANT_FLOOR_HOLDERS]; /* number of times that the process has set its flag since it connected */
    /* The agent writes these fields, for display. */
    uint32_t pid[COTENANT_FLOOR_HOLDERS];
    uint8_t reserved[2304];
};
_Static_assert(sizeof(struct cotenant_floor) == 4096, "cotenant_floor does not have 4096 bytes");

/* The wait-flag page: a copy of the LS-activity flags, for which BE streams wait on the device. */
struct cotenant_floor_words {
    /* LS-activity flags: a process sets its flag on the gate page first and then here, and clears it here first */
    uint8_t raised[COTENANT_FLOOR_HOLDERS];
    uint8_t reserved[4032];
};
_Static_assert(sizeof(struct cotenant_floor_words) == 4096, "cotenant_floor_words does not have 4096 bytes");

#endif
