/* Internals of the driver shim.  Everything that crosses the process boundary is in abi/.
 *
 * driver.c    opens the real driver, resolves entry points gpus.c      the GPUs and their contexts wrap/       the
 * replaced driver functions, thin gate/       the turn gate (gate.c); a turn's state machine: open, close, drain, report
 * (turn.c); kernel times of a
 *             profiled program (kernels.c), and their use (work.c)
 * inflight/   estimated costs of launches (fence.c), per-thread counts of calls (calls.c), streams with pending work
 *             or captures (streams.c)
 * floor/      the LS gate: best-effort launches wait while latency-sensitive work is active, with little in flight
 *             otherwise; latency-sensitive tenants set the LS-activity flag while they have work (holder.c)
 * copies/     copies over the link: unscheduled, or scheduled (link.c; paced.c in their stream, copies.c grants them)
 * memory/     accounts of the process's memory; asks the agent before it grows swap/       memory that is evicted and
 * restored: see swap.h ipc/        the agent's connection, the helper thread, start of threads (agent.c); calls that
 * wait for a reply
 *             (rpc.c); messages on the socket (wire.c); the driver's objects behind contexts (channels.c) */
#ifndef COTENANT_SHIM_H
#define COTENANT_SHIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "cuda_abi.h"
#include "driver_table.h"
#include "abi/protocol.h"
#include "abi/tenant_page.h"

struct cost;
struct ring;

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

/* ---- the real driver: one slot per export, filled at the first call (exports.S) ---- */
HIDDEN int cot_open_driver(void);
HIDDEN void cot_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

HIDDEN uint64_t cot_now_ns(void);

/* Poll interval of a thread that waits for the GPU or for another process. */
#define COT_NAP_NS 30000
#define COT_STALL_NS 100000000 /* nothing has ended for this long: it may depend on a later launch */
static inline void cot_nap_for(long ns)
{
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}
static inline void cot_nap(void)
{
    cot_nap_for(COT_NAP_NS);
}

/* ---- calls that passed the gate ---- */
struct call_counts {
    uint64_t started;                 /* gated calls entered: launches and copies */
    uint64_t finished;                /* gated calls left */
    uint64_t copies;
    uint64_t graph_launches;
};

/* Counters of one thread on one GPU: everything that its launches write, in a single cache line, since a launch of the
 * driver evicts most others.  Only that thread counts, with plain stores; other threads write `open` and `handle`, to
 * force it to the slow path. */
struct calls {
    _Atomic uint64_t started, finished;
    _Atomic uint64_t open;            /* launches may go: the GPU's turn is open, as far as the closing thread has got */
    _Atomic(CUstream) handle;         /* stream used last; COT_NO_STREAM if it was destroyed */
    int64_t budget_ns;                /* predicted time left in the interval */
    struct cost **log_next;           /* where the next launch of the open interval is logged */
    intptr_t log_step;                /* 1; 0 in an unsampled interval: everything goes to `unnoted` */
    struct cost *unnoted;
    /* rarely used */
    struct gpu *gpu;
    _Atomic uint64_t copies, graph_launches;
    struct calls *next;
} __attribute__((aligned(64)));

/* ---- one GPU as this process sees it ---- */
enum gate_state { GATE_CLOSED, GATE_REQUESTED, GATE_OPEN, GATE_CLOSING, GATE_DRAINING };

#define EPOCH_CLOSED UINT64_MAX

struct gpu {
    uint64_t epoch;                   /* epoch of the turn in which launches may go; EPOCH_CLOSED: none */
    _Atomic(struct cotenant_slot *) page_slot;
    struct floor *floor;              /* gate of a best-effort tenant, else NULL */
    struct holder *holder;            /* LS gate of a latency-sensitive tenant, else NULL */
    /* guarded by the lock of calls.c */
    struct calls *calls;              /* counters of living threads */
    struct call_counts calls_retired; /* sum of the counters of ended threads */
    /* written under cot_lock; atomic members are also read without it */
    _Atomic enum gate_state state;
    CUdevice device;
    uint32_t slot;                    /* COTENANT_NO_SLOT until attached */
    _Atomic bool attached;
    _Atomic bool stale;                       /* the agent was lost: the GPU is not yet attached to the new one */
    _Atomic bool denied;
    struct cu_uuid uuid;
    _Atomic uint64_t floor_again_ns;  /* time of the next attempt to connect to the LS gate; 0: connected, or no LS gate */
    uint64_t floor_patience_ns;       /* interval between attempts to connect to the LS gate */
    /* how often the process was restored on another GPU, which invalidates what it had joined */
    _Atomic uint32_t relocations;
    uint64_t total_bytes;
    uint32_t sm_count;
    _Atomic uint64_t turn_epoch;              /* epoch of the turn that is open or being closed */
    uint64_t released_epoch;          /* the last returned turn: a late message may still name it */
    _Atomic uint64_t deadline_ns;
    uint64_t grant_ns;
    uint64_t started_at_grant;
    uint64_t copies_at_grant;
    _Atomic uint64_t first_submit_ns;
    uint64_t close_began_ns;
    uint32_t close_reason;
    bool reported_hung;
    uint64_t activity_seen;           /* value of `started` at the last poll */
    uint64_t activity_ns;             /* time at which `started` last changed */
    uint64_t empty_ns;                /* time at which the GPU was first seen drained since then; 0: not yet */
    _Atomic uint32_t waiting;                 /* number of threads that wait for a turn */
    uint64_t waiting_since_ns;
    uint64_t burst_ns;                /* estimates, see gate.c */
    uint64_t gap_ns;
    uint64_t busy_since_ns;
    uint64_t idle_since_ns;
    _Atomic uint32_t contexts;
    _Atomic(CUcontext) any_context;            /* an existing context, for queries from the helper thread */
    uint64_t held[COTENANT_MEMORY_HOST + 1]; /* bytes by family, under the memory lock */
    uint64_t published_ns;
    _Atomic uint64_t fences;
    _Atomic uint64_t predicted_busy_ns;
    _Atomic uint64_t waited_ns;
    uint64_t turns;
};

/* ---- a stream that the process has launched into ---- */
struct stream {
    CUstream handle;
    CUcontext context;
    struct gpu *gpu;
    CUevent drain_event;              /* only for per-thread streams, which other threads cannot query */
    uint64_t marked_at;               /* gpu->started when drain_event was recorded */
};
#define COT_NO_STREAM ((CUstream)(uintptr_t)-1)

/* ---- per thread ---- */
struct thread {
    struct gpu *gpu;
    struct calls *calls;              /* the thread's record on `gpu`; the same as cot_calls */
    struct stream *stream;            /* used last */
    int64_t budget_begin_ns;
    struct cost **log;                /* the first launch of the interval */
    CUcontext context;
    struct ring *ring;                /* ring of fences of `gpu`, or NULL */
    struct ring *rings[COTENANT_MAX_GPUS];
    struct calls *calls_of[COTENANT_MAX_GPUS];
    bool solo;                        /* best-effort: the current launch is the first of its kind */
};

extern HIDDEN __thread struct thread *cot_thread __attribute__((tls_model("initial-exec")));
extern HIDDEN __thread struct calls *cot_calls __attribute__((tls_model("initial-exec")));
extern HIDDEN pthread_mutex_t cot_lock; /* gates, connection state, waiting threads */

#include "inflight/fence.h"

/* Answers of gate_slow to the caller. */
enum gate_answer { GATE_GO = 0, GATE_PASS = 1 /* in a capture, or no rule applies: not counted */ };

HIDDEN enum gate_answer cot_gate_slow(uintptr_t key, CUstream stream);

/* Increments the thread's own counter, see struct calls: a single instruction, not locked, and ordered with surrounding
 * stores and calls. */
static inline void cot_count(_Atomic uint64_t *own, int64_t more)
{
    __asm__ volatile("addq %1, %0" : "+m"(*own) : "er"(more) : "memory", "cc");
}

/* The hot path: decides without a call whether the launch may go, and counts it as in flight in the returned record.
 * NULL: call cot_gate_slow.  The gate is closed by whichever thread notices first: the helper at the deadline or when
 * told by the agent, or the launching thread at the end of an interval. */
static inline struct calls *cot_gate_try(uintptr_t key, CUstream stream)
{
    struct calls *calls = cot_calls;
    cot_count(&calls->started, 1); /* cot_calls_close orders this count and the check of `open` */
    if (UNLIKELY(!atomic_load_explicit(&calls->open, memory_order_relaxed)))
        goto no;
    struct cost *cost = cot_cost(key);
    if (UNLIKELY(cost->key != key))
        goto no;
    int64_t left = calls->budget_ns - cost->ns;
    if (UNLIKELY(left < 0))
        goto no;
    if (UNLIKELY(atomic_load_explicit(&calls->handle, memory_order_relaxed) != stream))
        goto no;
    calls->budget_ns = left;
    *calls->log_next = cost;
    calls->log_next += calls->log_step;
    if (!calls) /* never true: lets the compiler drop the caller's test for NULL */
        __builtin_unreachable();
    return calls;
no:
    cot_count(&calls->started, -1);
    return NULL;
}

HIDDEN void cot_floor_launched(struct thread *t);

static inline void cot_gate_exit(struct calls *calls)
{
    if (UNLIKELY(cot_thread->solo))
        cot_floor_launched(cot_thread);
    if (calls)
        cot_count(&calls->finished, 1);
}

/* For calls other than kernel launches, where a few instructions do not matter. */
static inline struct calls *cot_gate_enter(uintptr_t key, CUstream stream)
{
    struct calls *calls = cot_gate_try(key, stream);
    return calls ? calls : cot_gate_slow(key, stream) == GATE_GO ? cot_calls : NULL;
}

static inline void cot_count_copy(struct calls *calls)
{
    if (calls)
        cot_count(&calls->copies, 1);
}

static inline void cot_count_graph(struct calls *calls)
{
    if (calls)
        cot_count(&calls->graph_launches, 1);
}

#include "inflight/inflight.h"
#include "gate/gate.h"
#include "floor/floor.h"
#include "ipc/ipc.h"
#include "memory/memory.h"

#endif
