/* The internals of the driver shim.  Everything that crosses the process boundary is in abi/.
 *
 * driver.c    opens the real driver and resolves entry points
 * gpus.c      the GPUs of the process and its contexts on them
 * wrap/       the wrappers of driver functions, which contain little else than calls of the other directories
 * gate/       turns: gate.c lets launches through during a turn, turn.c opens and ends it; kernels.c measures kernel times for
 *             a profile, and work.c looks them up in one
 * inflight/   the estimated GPU time of launches (fence.c), counts of calls per thread (calls.c), and the streams that have
 *             pending work or are captured (streams.c)
 * floor/      the LS gate: best-effort launches wait while latency-sensitive work is active, and have little work in flight
 *             otherwise; latency-sensitive processes set a flag while they have work (holder.c)
 * copies/     copies between host and device: link.c decides whether they are scheduled, paced.c makes them wait in their
 *             stream, copies.c grants the waiting ones
 * memory/     the amounts of memory that the process holds; the shim asks the agent before an amount grows
 * swap/       memory whose contents are evicted to the host and restored: see swap.h
 * ipc/        the connection to the agent and the helper thread that serves it (agent.c), calls that wait for a reply (rpc.c),
 *             messages on the socket (wire.c), and the channel groups behind contexts (channels.c)
 *
 * Words.  A *turn* is a time slice on a GPU that the agent grants to a tenant; it has a number, its *epoch*.  The *turn gate*
 * makes launches wait until their tenant has a turn.  A *slot* is the entry of one GPU on the page of shared memory that the
 * agent and this process write (abi/tenant_page.h).  LS is latency-sensitive, BE is best-effort.  An *interval* is a number
 * of launches of one thread that are timed together.  The *hot path* is the inline part of a launch; the *slow path* is
 * cot_gate_slow. */
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

HIDDEN int cot_open_driver(void);
HIDDEN void cot_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

HIDDEN uint64_t cot_now_ns(void);

/* how long a thread that waits for the GPU or for another process sleeps between two polls */
#define COT_NAP_NS 30000
#define COT_STALL_NS 100000000 /* if no work has ended for this long, it may depend on a launch that is yet to come */
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
    uint64_t started;                 /* launches and copies that passed the turn gate */
    uint64_t finished;                /* how many of the started calls have returned */
    uint64_t copies;
    uint64_t graph_launches;
};

/* The counters of one thread on one GPU. Everything that a launch writes is in a single cache line, since the driver's
 * launch evicts most other lines. Only the thread itself counts, with plain stores. Other threads write only `open` and
 * `handle`, to force the thread onto the slow path. */
struct calls {
    _Atomic uint64_t started, finished;
    _Atomic uint64_t open;            /* 1: this thread may launch; a thread that closes the turn gate sets it to 0 */
    _Atomic(CUstream) handle;         /* the stream that the thread used last; COT_NO_STREAM if that was destroyed */
    int64_t budget_ns;                /* how much predicted GPU time may still be launched in the current interval */
    struct cost **log_next;           /* where the next launch of the current interval is logged */
    /* 1: each launch gets an entry of the log; 0: the current interval is not sampled, so all its launches overwrite
     * `unnoted` */
    intptr_t log_step;
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
    uint64_t epoch;                   /* number of the turn in which launches may go; EPOCH_CLOSED: launches wait */
    _Atomic(struct cotenant_slot *) page_slot;
    struct floor *floor;              /* state of a best-effort process at the LS gate; NULL in other processes */
    struct holder *holder;            /* state of a latency-sensitive process at the LS gate; NULL in other processes */
    /* guarded by the lock of calls.c */
    struct calls *calls;              /* the counters of running threads */
    struct call_counts calls_retired; /* sum of the counters of threads that have ended */
    /* these members are written under cot_lock; atomic ones are also read without it */
    _Atomic enum gate_state state;
    CUdevice device;
    uint32_t slot;                    /* index of the GPU's slot; COTENANT_NO_SLOT until the GPU is attached */
    _Atomic bool attached;
    /* true after the agent ended, until the GPU is attached to the next agent */
    _Atomic bool stale;
    _Atomic bool denied;
    struct cu_uuid uuid;
    _Atomic uint64_t floor_again_ns;  /* time of the next attempt to connect to the LS gate; 0: connected, or no LS gate */
    uint64_t floor_patience_ns;       /* interval between attempts to connect to the LS gate */
    /* how often this process was restored on another GPU; each time, its connections to the LS gate and copy page
     * become invalid */
    _Atomic uint32_t relocations;
    uint64_t total_bytes;
    uint32_t sm_count;
    _Atomic uint64_t turn_epoch;              /* number of the turn that is open or being closed */
    uint64_t released_epoch;          /* number of the turn that was returned last; a late message may still name it */
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
    /* time at which all streams were first found idle after the last launch; 0: not yet */
    uint64_t empty_ns;
    _Atomic uint32_t waiting;                 /* number of threads that wait for a turn */
    uint64_t waiting_since_ns;
    /* estimates of busy spans and of the pauses between them: see struct cotenant_token_request */
    uint64_t burst_ns;
    uint64_t gap_ns;
    uint64_t busy_since_ns;
    uint64_t idle_since_ns;
    _Atomic uint32_t contexts;
    /* some context on this GPU, in which the helper thread queries streams */
    _Atomic(CUcontext) any_context;
    uint64_t held[COTENANT_MEMORY_HOST + 1]; /* bytes by kind of allocation; protected by the memory lock */
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
    /* event that marks the end of queued work; only for per-thread streams, which other threads cannot query */
    CUevent drain_event;
    uint64_t marked_at;               /* gpu->started when drain_event was recorded */
};
#define COT_NO_STREAM ((CUstream)(uintptr_t)-1)

/* ---- per thread ---- */
struct thread {
    struct gpu *gpu;
    struct calls *calls;              /* the thread's counters on `gpu`; cot_calls points to them, too */
    struct stream *stream;            /* the stream that the thread used last */
    int64_t budget_begin_ns;
    struct cost **log;                /* where the first launch of the current interval is logged */
    CUcontext context;
    struct ring *ring;                /* the thread's fences on `gpu` (inflight/fence.h), or NULL */
    struct ring *rings[COTENANT_MAX_GPUS];
    struct calls *calls_of[COTENANT_MAX_GPUS];
    bool solo;                        /* best-effort: the launch has no cost estimate yet, so it is timed alone */
};

extern HIDDEN __thread struct thread *cot_thread __attribute__((tls_model("initial-exec")));
extern HIDDEN __thread struct calls *cot_calls __attribute__((tls_model("initial-exec")));
/* protects turns, the state of the connection, and the list of waiting threads */
extern HIDDEN pthread_mutex_t cot_lock;

#include "inflight/fence.h"

/* what cot_gate_slow returns */
enum gate_answer { GATE_GO = 0, GATE_PASS = 1 /* the launch is not counted, because its stream is captured or no rule applies */ };

HIDDEN enum gate_answer cot_gate_slow(uintptr_t key, CUstream stream);

/* Increments a counter that only this thread writes, with one instruction that is not locked. The compiler keeps its
 * order with surrounding stores and calls. */
static inline void cot_count(_Atomic uint64_t *own, int64_t more)
{
    __asm__ volatile("addq %1, %0" : "+m"(*own) : "er"(more) : "memory", "cc");
}

/* The hot path. Decides without a call whether a launch may go, and counts it as in flight in the returned record.
 * NULL: the caller must call cot_gate_slow. Different threads close the turn gate: the helper thread at the deadline or
 * when the agent revokes the turn, a launching thread when it finds that the turn has ended. */
static inline struct calls *cot_gate_try(uintptr_t key, CUstream stream)
{
    struct calls *calls = cot_calls;
    /* the order of this increment and of the check of `open` matters: see cot_calls_close */
    cot_count(&calls->started, 1);
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

/* For calls other than kernel launches, where the time of a few instructions does not matter. */
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
