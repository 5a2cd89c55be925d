/* The interface for copies between host and device. The wrappers of driver functions, and the thread that swaps memory
 * (the mover), pass their copies to link.c, which splits and schedules them. */
#ifndef COTENANT_HOST_COPY_H
#define COTENANT_HOST_COPY_H

#include "shim.h"

struct host_copy { /* a copy between host and device; it consists of rows of equal length, mostly of a single row */
    uint32_t direction;               /* cotenant_copy_direction */
    uint64_t bytes;                   /* size of the whole copy */
    uint64_t unit;                    /* the copy may be split only at multiples of this size */
    const void *host;                 /* address of the copy's first byte in host memory, which is pinned or pageable */
    /* enqueues the bytes [from, from + bytes) of the copy in the stream: asynchronously, or by the driver function
     * that the program called */
    CUresult (*issue)(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous);
    const void *call;                 /* arguments that `issue` needs */
    CUstream stream;
    bool host_waits;                  /* the program's call is synchronous: it returns only when the copy has ended */
    uintptr_t key;
};
HIDDEN CUresult cot_copy_over_link(const struct host_copy *copy);
HIDDEN CUresult cot_copy_of_shim(struct gpu *gpu, const struct host_copy *copy);
/* charges the tenant's queue for a copy that is not split */
HIDDEN void cot_copy_charge_whole(uint32_t direction, uint64_t bytes);
HIDDEN bool cot_is_on_device(word address);
/* returns the piece size of copies within the current GPU; 0: copies within the GPU are not split */
HIDDEN uint64_t cot_copy_slice_bytes(void);

/* Returns the key by which copies are timed. Copies of one kind and of similar size (the same power of two) share a
 * key. */
static inline uintptr_t cot_copy_key(const void *kind, uint64_t bytes)
{
    return (uintptr_t)kind * 64 + (bytes ? (uintptr_t)(64 - __builtin_clzll(bytes)) : 0);
}

/* Returns whether copies on this thread's GPU may be scheduled; true for a thread that has not used a GPU yet. */
static inline bool cot_copies_perhaps_on(void)
{
    const struct gpu *gpu = cot_thread->gpu;
    return UNLIKELY(gpu->page_slot->flags & COTENANT_SLOT_COPIES || gpu->slot == COTENANT_NO_SLOT);
}

#endif
