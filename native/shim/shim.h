/* The internals of the driver shim.  Everything that crosses the process boundary is in abi/.
 *
 * driver.c    opens the real driver and resolves entry points
 * gpus.c      the GPUs of the process and its contexts on them
 * wrap/       the wrappers of driver functions, which contain little else than calls of the other directories
 * gate/       turns: gate.c lets launches through during a turn, turn.c opens and ends it; kernels.c measures kernel times for
 *             a kernel profile, and work.c looks up kernels in such a profile
 * inflight/   the estimated GPU time of launches (fence.c), counts of calls per thread (calls.c), and the streams that have
 *             pending work or are captured (streams.c)
 * floor/      the LS gate: best-effort launches wait while latency-sensitive work is active, and at other times their
 *             work in flight is limited; latency-sensitive processes set a flag while they have work (holder.c)
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

/* a thread that waits for the GPU or for another process sleeps this long between two polls */
#define COT_NAP_NS 30000
/* if no work has ended for this long, the work may depend on a launch that the program has not made yet */
#define COT_STALL_NS 100000000
static inline void cot_nap_for(long ns)
{
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}
static inline void cot_nap(void)
{
    cot_nap_for(COT_NAP_NS);
}

/* ---- calls that passed the turn gate ---- */
struct call_counts {
    uint64_t started;                 /* launches and copies that passed the turn gate */
    uint64_t finished;                /* number of those launches and copies whose driver call has returned */
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
    int64_t budget_ns;                /* predicted GPU time that may still be launched in the thread's interval */
    /* the entry of the interval's log in which the thread's next launch is recorded */
    struct cost **log_next;
    /* size of a step in the log: 1 gives each launch an entry of its own; 0 means that the thread's interval of
     * launches is not measured, so all its launches overwrite `unnoted` */
    intptr_t log_step;
    struct cost *unnoted;
    /* the members below are rarely used */
    struct gpu *gpu;
    _Atomic uint64_t copies, graph_launches;
    struct calls *next;
} __attribute__((aligned(64)));

/* ---- one GPU as this process sees it ---- */
enum gate_state { GATE_CLOSED, GATE_REQUESTED, GATE_OPEN, GATE_CLOSING, GATE_DRAINING };

#define EPOCH_CLOSED UINT64_MAX

struct gpu {
    /* number of the turn in which launches may go; EPOCH_CLOSED: no turn, so launches wait */
    uint64_t epoch;
    _Atomic(struct cotenant_slot *) page_slot;
    /* state of a best-effort process at the GPU's LS gate; NULL in processes that are not best-effort */
    struct floor *floor;
    /* state of a latency-sensitive process at the GPU's LS gate; NULL in processes that are not latency-sensitive */
    struct holder *holder;
    /* guarded by the lock of calls.c */
    struct calls *calls;              /* one record for each running thread that has used the GPU */
    struct call_counts calls_retired; /* sum of the counters of threads that have ended */
    /* the members from here on are written under cot_lock; atomic members are also read without the lock */
    _Atomic enum gate_state state;
    CUdevice device;
    /* index of the GPU's slot on the shared page; COTENANT_NO_SLOT until the GPU is attached to the agent */
    uint32_t slot;
    _Atomic bool attached;
    /* the agent that the GPU was attached to has ended, and the GPU is not attached to the next agent yet */
    _Atomic bool stale;
    _Atomic bool denied;
    struct cu_uuid uuid;
    /* time of the next attempt to join the LS gate; 0: the process has joined, or needs no LS gate */
    _Atomic uint64_t floor_again_ns;
    uint64_t floor_patience_ns;       /* time between two attempts to join the LS gate */
    /* number of relocations, in which this process was restored on another GPU. After a relocation, the process joins
     * the LS gate of the new GPU and maps the copy page (abi/copy_page.h) of the new GPU. */
    _Atomic uint32_t relocations;
    uint64_t total_bytes;
    uint32_t sm_count;
    _Atomic uint64_t turn_epoch;              /* number of the turn that is in use or is being returned */
    /* number of the turn that was returned last, because a late message of the agent may still name it */
    uint64_t released_epoch;
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
    /* time at which all streams were found idle for the first time since the last launch; 0: not found idle since that
     * launch */
    uint64_t empty_ns;
    _Atomic uint32_t waiting;                 /* number of threads that wait for a turn */
    uint64_t waiting_since_ns;
    /* estimates of how long the process keeps the GPU busy and then idle: see struct cotenant_token_request */
    uint64_t burst_ns;
    uint64_t gap_ns;
    uint64_t busy_since_ns;
    uint64_t idle_since_ns;
    _Atomic uint32_t contexts;
    /* any one of the contexts on this GPU; the helper thread makes it current to query streams */
    _Atomic(CUcontext) any_context;
    uint64_t held[COTENANT_MEMORY_HOST + 1]; /* bytes held, by kind of allocation; protected by the memory lock */
    /* a bit for each kind of allocation whose `held` a new agent was not told yet; protected by the memory lock */
    uint32_t untold;
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
    /* event that marks the end of queued work; only per-thread streams have one, since other threads cannot query
     * such a stream */
    CUevent drain_event;
    uint64_t marked_at;               /* call_counts.started on the GPU at the time at which drain_event was recorded */
};
#define COT_NO_STREAM ((CUstream)(uintptr_t)-1)

/* ---- per thread ---- */
struct thread {
    struct gpu *gpu;
    struct calls *calls;              /* the thread's counters on `gpu`; cot_calls points to them, too */
    struct stream *stream;            /* the stream that the thread used last */
    int64_t budget_begin_ns;
    struct cost **log;                /* the log entry of the first launch of the current interval */
    CUcontext context;
    struct ring *ring;                /* the thread's fences on `gpu` (inflight/fence.h), or NULL */
    struct ring *rings[COTENANT_MAX_GPUS];
    struct calls *calls_of[COTENANT_MAX_GPUS];
    /* best-effort processes: the launch that the thread is making has no cost estimate yet, so it is timed alone */
    bool solo;
};

extern HIDDEN __thread struct thread *cot_thread __attribute__((tls_model("initial-exec")));
extern HIDDEN __thread struct calls *cot_calls __attribute__((tls_model("initial-exec")));
/* protects turns, the state of the connection, and the list of waiting threads */
extern HIDDEN pthread_mutex_t cot_lock;

#include "inflight/fence.h"

/* What cot_gate_slow returns. GATE_PASS: the launch is not counted, because its stream is being captured or no rule
 * applies to it. */
enum gate_answer { GATE_GO = 0, GATE_PASS = 1 };

HIDDEN enum gate_answer cot_gate_slow(uintptr_t key, CUstream stream);

/* Increments a counter that only this thread writes, with one instruction without a lock prefix. The compiler does
 * not reorder it with the stores and calls around it. */
static inline void cot_count(_Atomic uint64_t *own, int64_t more)
{
    __asm__ volatile("addq %1, %0" : "+m"(*own) : "er"(more) : "memory", "cc");
}

/* The hot path. Decides without a call whether a launch may go; if so, counts it as in flight and returns the
 * thread's counters. Returns NULL if the caller must call cot_gate_slow. The turn gate may be closed by another
 * thread: by the helper thread at the deadline or when the agent revokes the turn, or by a launching thread that
 * finds that the turn has ended. */
static inline struct calls *cot_gate_try(uintptr_t key, CUstream stream)
{
    struct calls *calls = cot_calls;
    /* the launch is counted before `open` is checked: cot_calls_close says why */
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

/* Takes the hot path (cot_gate_try) or, if that is not possible, the slow path (cot_gate_slow). It is for calls other than
 * kernel launches, in which a few more instructions do not matter. */
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
