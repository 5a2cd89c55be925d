/* Work in flight: estimated costs of launches, and the events in streams that show the GPU's progress. */
#ifndef COTENANT_FENCE_H
#define COTENANT_FENCE_H

#include "shim.h"

struct cost { /* estimated cost of one launch of a kernel, graph or copy */
    uintptr_t key;
    int64_t ns;
};
#define COST_BITS 12
#define COST_BESIDE 8
#define COST_FLOOR_NS 4000            /* so that an interval contains fewer than INTERVAL_LOG launches */
#define COST_UNKNOWN_NS 1000000       /* a new kernel gets an interval alone */
#define INTERVAL_NS 1000000
#define INTERVAL_ALONE_NS 8000000     /* in an unbounded turn, where no other tenant waits */
#define INTERVAL_LOG 2048
_Static_assert(INTERVAL_LOG > INTERVAL_ALONE_NS / COST_FLOOR_NS + 1, "the log must hold every launch of an interval");
#define INFLIGHT_ALONE 16             /* factor on the work that the agent allows to be queued, in an unbounded turn */
#define UNNOTED_ALONE 15              /* number of intervals without samples after one with an accurate estimate */
#define FENCES 16                     /* power of two */

struct fence {
    CUevent event;                    /* with timing */
    int64_t predicted_ns;
    bool exact;                       /* the GPU had earlier work when this was recorded, so there is no idle time inside */
    /* recorded before a synchronisation, not before a later launch, so there is no idle time at the end */
    bool before_sync;
    uint32_t count;                   /* sampled launches */
    struct cost *log[INTERVAL_LOG];
};

/* The fences of one thread on one GPU. Those at [oldest, newest) are recorded; the one at `newest` will be recorded at the end
 * of the current interval. */
struct ring {
    CUcontext context;
    uint32_t oldest, newest;          /* both only increase; indices are taken modulo FENCES */
    uint32_t stalls;                  /* number of times that the oldest fence did not complete in time */
    int64_t more_ns;                  /* additional work allowed because the oldest fence did not complete */
    bool have_origin;                 /* fence oldest - 1 is complete and serves as reference time */
    bool doubt;                       /* a fence took much longer than estimated: short intervals until one has been measured */
    /* an estimate was wrong while the GPU was idle: close the next interval at a synchronisation */
    bool probe;
    uint32_t noted;                   /* recorded fences with samples */
    uint32_t unnoted_left;            /* number of intervals that follow without samples */
    uint64_t began_ns;                /* start of the open interval */
    int64_t outstanding_ns;           /* predicted time of the recorded fences */
    struct fence fences[FENCES];
};

extern HIDDEN struct cost cot_costs[(1 << COST_BITS) + COST_BESIDE];

/* The entry where the hot path looks for a key, by its low half.  cot_cost_of finds or creates the entry, in another
 * place if this one has another key: such a kernel takes the slow path, but with its own cost. */
static inline struct cost *cot_cost(uintptr_t key)
{
    return &cot_costs[((uint32_t)key * 0x9e3779b1u) >> (32 - COST_BITS)];
}
HIDDEN struct cost *cot_cost_of(uintptr_t key, bool *fresh);

/* Whether the turn is unbounded: no other tenant wants the GPU. */
static inline bool cot_is_alone(const struct gpu *gpu)
{
    return gpu->deadline_ns == COTENANT_NO_DEADLINE;
}

/* ---- fence.c ---- */
HIDDEN void cot_interval_begin(struct thread *t);
HIDDEN bool cot_interval_is_empty(const struct thread *t);
HIDDEN void cot_interval_note(struct thread *t); /* the next launches are sampled, in a separate interval */
HIDDEN void cot_fence_close(struct thread *t, bool before_sync);
HIDDEN void cot_fence_resolve(struct thread *t);
HIDDEN bool cot_fence_wait_oldest(struct thread *t, uint64_t patience_ns);
HIDDEN void cot_interval_look(struct thread *t);
HIDDEN bool cot_ring_is_long(const struct ring *ring, int64_t allowed_ns);
HIDDEN void cot_ring_let_more(struct ring *ring, int64_t allowed_ns);
HIDDEN void cot_ring_forget(struct ring *ring, bool destroy);

#endif
