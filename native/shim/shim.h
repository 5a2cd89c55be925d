/* Internals of the driver shim.  What crosses the process boundary is in abi/.
 *
 * driver.c    finds and opens the real driver, hands out entry points
 * gpus.c      the GPUs and their contexts
 * wrap/       the replaced driver functions, thin
 * gate/       may this launch go (gate.c); a turn's life: open, close, drain, report (turn.c); times of kernels for a program
 *             that is being profiled (kernels.c), and what kind of work a kernel is once it was (work.c)
 * inflight/   what launches are predicted to cost (fence.c), how many calls went and are on their way, by thread (calls.c),
 *             which streams hold work and which capture (streams.c)
 * floor/      best-effort tenants: nothing beside latency-sensitive work, little in flight; latency-sensitive tenants hold
 *             the floor while they have work (holder.c)
 * copies/     copies over the link: whole, or in turn with others' (link.c; paced.c in their stream, copies.c grants them)
 * memory/     what the process holds, by family; asks the agent before it grows
 * swap/       memory that leaves the GPU and comes back: see swap.h
 * ipc/        the connection to the agent, the helper thread, the start of any thread (agent.c); calls that wait for a
 *             reply (rpc.c); messages on the socket (wire.c); the driver's objects behind contexts (channels.c)
 */
#ifndef COTENANT_SHIM_H
#define COTENANT_SHIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "../abi/protocol.h"
#include "../abi/tenant_page.h"

struct cost;
struct ring;

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

/* ---- the real driver: one slot per export, filled at the first call (exports.S) ---- */
#define REAL(name) cot_real_##name
#define DECLARE_REAL(name) extern HIDDEN void *cot_real_##name
HIDDEN int cot_open_driver(void);
HIDDEN void cot_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

HIDDEN uint64_t cot_now_ns(void);

/* ---- calls that passed the gate ---- */
struct call_counts {
    uint64_t started;                 /* gated calls entered: launches and copies */
    uint64_t finished;                /* gated calls left */
    uint64_t copies;
    uint64_t graph_launches;
};

/* One thread on one GPU: all of ours that its launches write, in one line of the cache, because a driver's launch leaves
 * little of ours there.  Only that thread counts, and with plain stores; others write open and handle, to send it to the
 * slow path. */
struct calls {
    _Atomic uint64_t started, finished;
    _Atomic uint64_t open;            /* launches go: the GPU's turn is open, as far as whoever ends it has got */
    _Atomic(CUstream) handle;         /* of the stream used last; COT_NO_STREAM when it has gone */
    int64_t budget_ns;                /* predicted time left in the interval */
    struct cost **log_next;           /* where the next launch of the open interval is noted */
    intptr_t log_step;                /* 1; 0 in an interval from which nothing is learned: all of it goes to unnoted */
    struct cost *unnoted;
    /* seldom used */
    struct gpu *gpu;
    _Atomic uint64_t copies, graph_launches;
    struct calls *next;
} __attribute__((aligned(64)));

/* ---- one GPU as this process sees it ---- */
enum gate_state { GATE_CLOSED, GATE_REQUESTED, GATE_OPEN, GATE_CLOSING, GATE_DRAINING };

#define EPOCH_CLOSED UINT64_MAX

struct gpu {
    uint64_t epoch;                   /* of the turn in which launches may go; EPOCH_CLOSED: none */
    _Atomic(struct cotenant_slot *) page_slot;
    struct floor *floor;              /* of a best-effort tenant, else NULL */
    struct holder *holder;            /* of a latency-sensitive one, else NULL */
    /* under the lock of calls.c */
    struct calls *calls;              /* of the threads that live */
    struct call_counts calls_retired; /* of those that ended */
    /* written under cot_lock; what is atomic is also read without it */
    _Atomic enum gate_state state;
    CUdevice device;
    uint32_t slot;                    /* COTENANT_NO_SLOT until attached */
    _Atomic bool attached;
    _Atomic bool stale;                       /* the agent was lost: not yet attached to the one that came back */
    _Atomic bool denied;
    struct cu_uuid uuid;
    _Atomic uint64_t floor_again_ns;  /* its floor could not be joined: try again then; 0: it was, or it has none */
    uint64_t floor_patience_ns;       /* between two tries */
    _Atomic uint32_t relocations;     /* how often it has become another GPU: what was joined is the one before's */
    uint64_t total_bytes;
    uint32_t sm_count;
    _Atomic uint64_t turn_epoch;              /* of the turn that is open or being closed */
    uint64_t released_epoch;          /* the last one given back: a late message may still name it */
    _Atomic uint64_t deadline_ns;
    uint64_t grant_ns;
    uint64_t started_at_grant;
    uint64_t copies_at_grant;
    _Atomic uint64_t first_submit_ns;
    uint64_t close_began_ns;
    uint32_t close_reason;
    bool reported_hung;
    uint64_t activity_seen;           /* value of started at the last look */
    uint64_t activity_ns;             /* when it last changed */
    _Atomic uint32_t waiting;                 /* threads that wait for a turn */
    uint64_t waiting_since_ns;
    uint64_t burst_ns;                /* estimates, see gate.c */
    uint64_t gap_ns;
    uint64_t busy_since_ns;
    uint64_t idle_since_ns;
    _Atomic uint32_t contexts;
    _Atomic(CUcontext) any_context;            /* one that lives, to look at the GPU from the helper thread */
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
    CUevent drain_event;              /* only for per-thread streams, which another thread cannot query */
    uint64_t marked_at;               /* gpu->started when drain_event was recorded */
};
#define COT_NO_STREAM ((CUstream)(uintptr_t)-1)

/* ---- per thread ---- */
struct thread {
    struct gpu *gpu;
    struct calls *calls;              /* on gpu; the same as cot_calls */
    struct stream *stream;            /* used last */
    int64_t budget_begin_ns;
    struct cost **log;                /* the interval's first */
    CUcontext context;
    struct ring *ring;                /* of gpu, or NULL */
    struct ring *rings[COTENANT_MAX_GPUS];
    struct calls *calls_of[COTENANT_MAX_GPUS];
    bool solo;                        /* of a best-effort tenant: what it launches now is the first of its kind */
};

extern HIDDEN __thread struct thread *cot_thread __attribute__((tls_model("initial-exec")));
extern HIDDEN __thread struct calls *cot_calls __attribute__((tls_model("initial-exec")));
extern HIDDEN pthread_mutex_t cot_lock; /* gates, connection state, waiting threads */

#include "inflight/fence.h"

/* What gate_slow tells the caller. */
enum gate_answer { GATE_GO = 0, GATE_PASS = 1 /* into a capture, or nothing to enforce: not counted */ };

HIDDEN enum gate_answer cot_gate_slow(uintptr_t key, CUstream stream);

/* The thread's own counter, see struct calls: one instruction, not locked, and in order with the stores and calls around it. */
static inline void cot_count(_Atomic uint64_t *own, int64_t more)
{
    __asm__ volatile("addq %1, %0" : "+m"(*own) : "er"(more) : "memory", "cc");
}

/* The hot path: may the launch go, without a call?  Then it is counted in flight in what is returned.  NULL: ask
 * cot_gate_slow.  Closing is done by whoever notices first: the helper thread, at the deadline or told by the agent, or the
 * launching thread itself at the end of an interval. */
static inline struct calls *cot_gate_try(uintptr_t key, CUstream stream)
{
    struct calls *calls = cot_calls;
    cot_count(&calls->started, 1); /* cot_calls_close orders this count and the look at open */
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
    if (!calls) /* never: the caller's test for NULL need not be made */
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

/* For calls that are not launches of kernels: a few instructions do not matter. */
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

/* ---- calls.c ---- */
HIDDEN struct calls *cot_calls_of(struct thread *t, struct gpu *gpu); /* registered; NULL without memory */
HIDDEN struct call_counts cot_calls_sum(const struct gpu *gpu);
HIDDEN void cot_calls_open(struct calls *calls);       /* the thread's own: its launches may go as its GPU's gate says */
HIDDEN void cot_calls_close(struct gpu *gpu);          /* no thread's launches go on the hot path any more */
HIDDEN void cot_calls_forget_stream(CUstream handle);  /* COT_NO_STREAM: any */
HIDDEN void cot_calls_retire(struct thread *t);
HIDDEN void cot_calls_reset_after_fork(void);

/* ---- gate.c ---- */
HIDDEN void cot_thread_context_changed(void);
HIDDEN struct gpu *cot_thread_gpu(void); /* attaches; NULL without a current context */
HIDDEN struct gpu *cot_gpu_of_device(CUdevice device, bool attach);
HIDDEN struct gpu *cot_gpu_at(uint32_t index);
HIDDEN uint32_t cot_gpu_count(void);
HIDDEN void cot_sync_begin(void);    /* before a call in which the host waits for the GPU */
HIDDEN void cot_gate_grant(struct gpu *gpu, uint64_t epoch, uint64_t deadline_ns);
HIDDEN void cot_gate_begin_close(struct gpu *gpu, uint32_t reason);
HIDDEN uint64_t cot_gates_advance(uint64_t now_ns); /* helper thread; returns when to come back, ns */
HIDDEN void cot_gates_agent_lost(uint32_t fail_mode);
HIDDEN void cot_gates_exit(void);
HIDDEN void cot_gate_reset_after_fork(void);
HIDDEN void cot_gpu_publish(struct gpu *gpu, uint64_t now_ns);
HIDDEN bool cot_gpu_is_denied(CUdevice device);
HIDDEN CUresult cot_gpu_before_context(CUdevice device);
HIDDEN bool cot_gpu_room_for_context(CUdevice device); /* the driver had none: is there some now? */
HIDDEN void cot_gpu_context_made(CUdevice device, CUcontext context);
HIDDEN void cot_gpu_context_gone(CUdevice device, CUcontext context);
HIDDEN void cot_gpus_after_reconnect(void);
HIDDEN void cot_gpus_follow(void); /* after PAGE_UPDATE, on the helper */
HIDDEN void cot_gpus_join_again(void); /* floors that could not be joined, on a thread of its own */
HIDDEN uint64_t cot_total_launches(void);
HIDDEN uint32_t cot_total_contexts(void);

HIDDEN struct thread *cot_thread_get(void); /* this thread's own record, made if need be; NULL without memory */

/* ---- kernels.c ---- */
#define COTENANT_KERNELS_PATH_BYTES 512
struct kernel_shape {
    CUfunction function;
    uint32_t grid[3], block[3], shared_bytes, zero;
};
struct pair;
extern HIDDEN bool cot_profiling; /* every launch takes the slow path and is timed */
HIDDEN void cot_kernels_start(void);
HIDDEN struct pair *cot_kernels_before(const struct kernel_shape *shape, CUstream stream);
HIDDEN void cot_kernels_after(struct pair *pair, CUstream stream);

HIDDEN const char *cot_kernel_name(CUfunction function); /* NULL: the driver does not say */

#define HASH_BASIS UINT64_C(14695981039346656037) /* FNV-1a, 64 bits */
static inline uint64_t cot_hash(uint64_t hash, const void *data, size_t length)
{
    for (const uint8_t *at = data, *end = at + length; at < end; at++)
        hash = (hash ^ *at) * UINT64_C(1099511628211);
    return hash;
}

/* ---- work.c ---- */
struct work {
    uint32_t work_class, sms; /* as struct cotenant_floor_reply has them */
    uint32_t duration_ns;     /* 0: not known */
};
extern HIDDEN bool cot_kernels_known;
extern HIDDEN __thread const struct kernel_shape *cot_launching __attribute__((tls_model("initial-exec"))); /* on the slow path */
HIDDEN void cot_work_table(int fd, uint32_t count);
HIDDEN struct work cot_work_now(struct work stated);
HIDDEN void cot_work_after_fork(void);

/* ---- floor.c ---- */
HIDDEN void cot_floor_join(struct gpu *gpu);
HIDDEN bool cot_floor_try(struct thread *t, uintptr_t key, CUstream stream);
HIDDEN bool cot_floor_goes_on(struct thread *t, struct cost *cost);
HIDDEN void cot_floor_enter(struct thread *t, struct cost *cost);
HIDDEN void cot_floor_context_gone(struct gpu *gpu, CUcontext context);
HIDDEN void cot_floor_after_fork(struct gpu *gpu);

/* ---- floor/join.c ---- */
struct cotenant_floor;
struct cotenant_floor_words;
HIDDEN struct cotenant_floor *cot_floor_page(struct gpu *gpu, uint32_t role, int *fd, struct cotenant_message *reply,
                                             struct cotenant_floor_words **shown);

/* ---- holder.c ---- */
struct holder;
extern HIDDEN bool cot_holding;
HIDDEN void cot_holder_join(struct gpu *gpu);
HIDDEN void cot_holder_raise(struct holder *holder);
HIDDEN void cot_holders_settle(void);
HIDDEN void cot_holder_after_fork(struct gpu *gpu);

/* ---- streams.c ---- */
extern HIDDEN _Atomic uint32_t cot_captures;       /* streams that capture now */
extern HIDDEN pthread_mutex_t cot_capture_lock;    /* held while the shim itself touches streams or events */
HIDDEN struct stream *cot_stream_find(CUstream handle, CUcontext context, struct gpu *gpu);
HIDDEN void cot_stream_gone(CUstream handle);
HIDDEN void cot_streams_context_gone(CUcontext context);
HIDDEN bool cot_stream_is_capturing(CUstream handle);
HIDDEN bool cot_streams_drained(struct gpu *gpu);
HIDDEN void cot_exchange_capture_mode(int *mode); /* of this thread: which of its calls would break a capture */
HIDDEN void cot_capture_before_begin(void);
HIDDEN void cot_capture_after_begin(CUstream handle, CUresult result);
HIDDEN void cot_capture_after_end(CUstream handle);
HIDDEN void cot_streams_reset_after_fork(void);
extern HIDDEN struct stream cot_no_stream;

/* ---- wire.c ---- */
HIDDEN void cot_wire_fill(struct cotenant_message *message, uint16_t type, uint32_t slot, const void *body, size_t bytes);
HIDDEN int cot_wire_high(int fd); /* the same file under a high number, where that is possible */
HIDDEN int cot_wire_send(int fd, struct cotenant_message *message);
HIDDEN int cot_wire_send_with(int fd, struct cotenant_message *message, int passed);
HIDDEN int cot_wire_receive(int fd, struct cotenant_message *message, int *passed_fd); /* 1, 0: nothing, -1: lost, -2: broken */
HIDDEN int cot_wire_receive_now(int fd, struct cotenant_message *message, int *passed_fd);
HIDDEN int cot_wire_introduce(struct cotenant_hello_reply *terms, struct cotenant_page **page, bool quiet);

/* ---- channels.c ---- */
HIDDEN void cot_channels_driver(int (*call)(int fd, unsigned long request, void *argument));
HIDDEN void cot_channels_report(int agent_fd); /* what has changed since the last time; on the helper thread */
HIDDEN void cot_channels_report_again(void);   /* all of it, next time */

/* ---- calls of the agent: rpc.c ---- */
HIDDEN int cot_agent_send(uint16_t type, uint32_t slot, const void *body, size_t bytes);
HIDDEN int cot_agent_answer(uint16_t type, uint32_t slot, uint64_t sequence, uint32_t status, const void *body, size_t bytes);
HIDDEN int cot_agent_call_fd(uint16_t type, uint32_t slot, const void *body, size_t bytes, struct cotenant_message *reply,
                             int *passed_fd);
static inline int cot_agent_call(uint16_t type, uint32_t slot, const void *body, size_t bytes, struct cotenant_message *reply)
{
    return cot_agent_call_fd(type, slot, body, bytes, reply, NULL);
}
HIDDEN void cot_agent_warn(uint32_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));
HIDDEN bool cot_rpc_reply(const struct cotenant_message *message, int *passed_fd);
HIDDEN void cot_rpc_heard(void);
HIDDEN void cot_rpc_agent_lost(void);
HIDDEN bool cot_rpc_agent_hangs(void);
HIDDEN void cot_rpc_wait(void);
HIDDEN void cot_rpc_reset_after_fork(void);

/* ---- agent.c ---- */
HIDDEN int cot_agent_connect(void); /* 0, or a CUresult to give the program */
HIDDEN bool cot_agent_is_connected(void);
HIDDEN int cot_agent_fd(void); /* -1: not connected */
HIDDEN void cot_agent_wake_helper(void);
HIDDEN struct cotenant_page *cot_agent_page(void);
HIDDEN uint32_t cot_fail_mode(void);
HIDDEN bool cot_exiting(void);
HIDDEN bool cot_start_thread(void *(*body)(void *), void *argument); /* detached, and no signal is handled on it */
extern HIDDEN pthread_cond_t cot_changed; /* with cot_lock: a gate opened, a reply came, the agent was lost */

/* ---- copies.c ---- */
HIDDEN void cot_copies_reset_after_fork(void);

/* ---- memory.c ---- */
HIDDEN CUresult cot_memory_reserve(struct gpu *gpu, uint32_t family, uint64_t bytes, uint64_t *reservation);
HIDDEN bool cot_memory_make_room(struct gpu *gpu, uint64_t bytes); /* the driver had none of what was reserved: now? */
HIDDEN void cot_memory_commit(struct gpu *gpu, uint32_t family, uint64_t reservation, uint64_t bytes);
HIDDEN void cot_memory_release(struct gpu *gpu, uint32_t family, uint64_t bytes);
HIDDEN void cot_memory_remember(uint64_t address, uint64_t bytes, struct gpu *gpu, uint32_t family);
struct holding;
HIDDEN struct holding *cot_memory_take_out(uint64_t address, uint32_t family);
HIDDEN void cot_memory_taken_out(struct holding *holding, bool freed);
HIDDEN void cot_memory_forget_gpu(struct gpu *gpu);
HIDDEN void cot_memory_agent_lost(void);
HIDDEN void cot_memory_report_state(struct gpu *gpu);
HIDDEN void cot_memory_report_host(void);
HIDDEN void cot_memory_reset_after_fork(void);
HIDDEN bool cot_memory_view(struct gpu *gpu, uint64_t *limit_bytes, uint64_t *used_bytes);
HIDDEN uint64_t cot_memory_kept(struct gpu *gpu); /* what the card has free and keeps for others */
HIDDEN void cot_pools_refresh(void);
HIDDEN void cot_pools_forget_gpu(struct gpu *gpu);
HIDDEN CUresult cot_graph_memory_check(word graph);
HIDDEN void cot_graph_memory_settle(word graph);
HIDDEN void cot_graph_memory_expected(void);

#endif
