/* Work in flight: what launches are thought to cost, and the events in streams that say how far the GPU has got. */
#ifndef COTENANT_FENCE_H
#define COTENANT_FENCE_H

#include "shim.h"

struct cost { /* what one launch of a kernel, graph or copy is thought to cost */
    uintptr_t key;
    int64_t ns;
};
#define COST_BITS 12
#define COST_BESIDE 8
#define COST_FLOOR_NS 4000            /* so that one interval holds fewer than INTERVAL_LOG launches */
#define COST_UNKNOWN_NS 1000000       /* a new kernel has an interval to itself */
#define INTERVAL_NS 1000000
#define INTERVAL_ALONE_NS 8000000     /* in a turn without an end: nobody waits */
#define INTERVAL_LOG 2048
_Static_assert(INTERVAL_LOG > INTERVAL_ALONE_NS / COST_FLOOR_NS + 1, "the log must hold every launch of an interval");
#define INFLIGHT_ALONE 16             /* so many times more than the agent allows may be queued then */
#define UNNOTED_ALONE 15              /* intervals without notes after one that confirmed what was thought */
#define FENCES 16                     /* power of two */

struct fence {
    CUevent event;                    /* with a time */
    int64_t predicted_ns;
    bool exact;                       /* the GPU had older work when this was recorded: no idle time inside */
    bool before_sync;                 /* recorded before a wait, not before a later launch: no idle tail */
    uint32_t count;                   /* launches noted */
    struct cost *log[INTERVAL_LOG];
};

struct ring { /* the fences of one thread on one GPU: [oldest, newest) are recorded, newest is the open interval */
    CUcontext context;
    uint32_t oldest, newest;          /* grow without bound; the index is taken modulo FENCES */
    uint32_t stalls;                  /* so often the oldest fence did not come in time */
    int64_t more_ns;                  /* for which reason so much more may be queued */
    bool have_origin;                 /* fence oldest - 1 is complete: a point to measure from */
    bool doubt;                       /* a fence took much longer than was thought: short intervals until one has taught */
    bool probe;                       /* an estimate was found wrong while the GPU idled: close the next at a sync */
    uint32_t noted;                   /* recorded fences from which something is to be learned */
    uint32_t unnoted_left;            /* so many intervals need no notes */
    uint64_t began_ns;                /* when the open interval did */
    int64_t outstanding_ns;           /* predicted time of the recorded fences */
    struct fence fences[FENCES];
};

extern HIDDEN struct cost cot_costs[(1 << COST_BITS) + COST_BESIDE];

/* Where the hot path looks for a key; it takes the low half, so keys differ there.  cot_cost_of finds or makes the entry,
 * beside this place when another key has it: such a kernel takes the slow path, but with its own cost. */
static inline struct cost *cot_cost(uintptr_t key)
{
    return &cot_costs[((uint32_t)key * 0x9e3779b1u) >> (32 - COST_BITS)];
}
HIDDEN struct cost *cot_cost_of(uintptr_t key, bool *fresh);

/* A turn without an end: nobody else wants the GPU. */
static inline bool cot_is_alone(const struct gpu *gpu)
{
    return gpu->deadline_ns == COTENANT_NO_DEADLINE;
}

/* ---- fence.c ---- */
HIDDEN void cot_interval_begin(struct thread *t);
HIDDEN bool cot_interval_is_empty(const struct thread *t);
HIDDEN void cot_interval_note(struct thread *t); /* what comes now is to be learned from: with an interval of its own */
HIDDEN void cot_fence_close(struct thread *t, bool before_sync);
HIDDEN void cot_fence_resolve(struct thread *t);
HIDDEN bool cot_fence_wait_oldest(struct thread *t, uint64_t patience_ns);
HIDDEN void cot_interval_look(struct thread *t);
HIDDEN bool cot_ring_is_long(const struct ring *ring, int64_t allowed_ns);
HIDDEN void cot_ring_let_more(struct ring *ring, int64_t allowed_ns);
HIDDEN void cot_ring_forget(struct ring *ring, bool destroy);

#endif
