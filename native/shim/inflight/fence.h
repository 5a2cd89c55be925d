/* The estimated GPU time of launches (their *cost*), and the events by which the shim knows the GPU's progress
 * (*fences*): see fence.c. */
#ifndef COTENANT_FENCE_H
#define COTENANT_FENCE_H

#include "shim.h"

struct cost { /* the estimated cost of a launch; launches of the same kernel, graph or copy have the same key */
    uintptr_t key;
    int64_t ns;
};
#define COST_BITS 12
#define COST_BESIDE 8
#define COST_FLOOR_NS 4000            /* smallest cost, so that an interval contains fewer than INTERVAL_LOG launches */
/* cost of a kernel without an estimate; it is so large that the kernel gets an interval of its own */
#define COST_UNKNOWN_NS 1000000
#define INTERVAL_NS 1000000
/* length of an interval while the turn has no deadline, because no other tenant waits */
#define INTERVAL_ALONE_NS 8000000
#define INTERVAL_LOG 2048
_Static_assert(INTERVAL_LOG > INTERVAL_ALONE_NS / COST_FLOOR_NS + 1, "the log must hold every launch of an interval");
/* factor on the work that may be queued, while the turn has no deadline */
#define INFLIGHT_ALONE 16
/* after an interval whose estimate was accurate, this many intervals are not sampled */
#define UNNOTED_ALONE 15
/* a power of two, so that indices stay consecutive when the 32-bit counters overflow */
#define FENCES 16

struct fence {
    CUevent event;                    /* an event with a time stamp, by which GPU time is measured */
    int64_t predicted_ns;             /* predicted GPU time of the interval that the fence ends */
    /* when this fence was recorded, the fence before it had not completed: the interval's work was launched while the
     * GPU was still busy, so the interval's measured time does not begin with idle time */
    bool exact;
    /* the event was recorded before a synchronisation instead of before a later launch, so the interval's measured
     * time does not end with idle time */
    bool before_sync;
    uint32_t count;                   /* number of launches in `log` */
    struct cost *log[INTERVAL_LOG];
};

/* The fences of one thread on one GPU. Those with indices [oldest, newest) are recorded; the one at `newest` will be
 * recorded at the end of the current interval. */
struct ring {
    CUcontext context;
    /* counters of fences, which only increase; indices into the ring are taken modulo FENCES */
    uint32_t oldest, newest;
    uint32_t stalls;                  /* number of times that the present oldest fence did not complete in time */
    /* how much more work than allowed may be launched, because the oldest fence did not complete */
    int64_t more_ns;
    /* the fence before the oldest one has completed, so times can be measured from it */
    bool have_origin;
    /* a fence took much longer than estimated, so intervals stay short until one has been measured */
    bool doubt;
    /* an estimate was wrong while the GPU may have been idle, so the next interval ends at a synchronisation */
    bool probe;
    uint32_t noted;                   /* number of recorded fences whose launches were logged */
    uint32_t unnoted_left;            /* number of coming intervals whose launches are not logged */
    uint64_t began_ns;                /* start of the current interval */
    int64_t outstanding_ns;           /* sum of predicted_ns over all recorded fences */
    struct fence fences[FENCES];
};

extern HIDDEN struct cost cot_costs[(1 << COST_BITS) + COST_BESIDE];

/* Returns the entry in which the hot path looks for a key. If that entry has another key, cot_cost_of stores the
 * cost in a further entry, and launches with this key take the slow path. */
static inline struct cost *cot_cost(uintptr_t key)
{
    return &cot_costs[((uint32_t)key * 0x9e3779b1u) >> (32 - COST_BITS)];
}
HIDDEN struct cost *cot_cost_of(uintptr_t key, bool *fresh);

/* Returns whether the turn has no deadline, which means that no other tenant wants the GPU. */
static inline bool cot_is_alone(const struct gpu *gpu)
{
    return gpu->deadline_ns == COTENANT_NO_DEADLINE;
}

/* ---- fence.c ---- */
HIDDEN void cot_interval_begin(struct thread *t);
HIDDEN bool cot_interval_is_empty(const struct thread *t);
/* ends the current interval; the next launches are an interval of their own, which is sampled */
HIDDEN void cot_interval_note(struct thread *t);
HIDDEN void cot_fence_close(struct thread *t, bool before_sync);
HIDDEN void cot_fence_resolve(struct thread *t);
HIDDEN bool cot_fence_wait_oldest(struct thread *t, uint64_t patience_ns);
HIDDEN void cot_interval_look(struct thread *t);
HIDDEN bool cot_ring_is_long(const struct ring *ring, int64_t allowed_ns);
HIDDEN void cot_ring_let_more(struct ring *ring, int64_t allowed_ns);
HIDDEN void cot_ring_forget(struct ring *ring, bool destroy);

#endif
