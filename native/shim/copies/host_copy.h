/* Copies as the replaced functions, and moves of memory, hand them on to link.c: it cuts them and has them take turns. */
#ifndef COTENANT_HOST_COPY_H
#define COTENANT_HOST_COPY_H

#include "shim.h"

struct host_copy { /* a copy over the link; rows of one length, mostly one row */
    uint32_t direction;               /* cotenant_copy_direction */
    uint64_t bytes;                   /* of all of it */
    uint64_t unit;                    /* it may be cut at multiples of this */
    const void *host;                 /* where it begins in host memory: pinned or not */
    /* issues [from, from + bytes) of it in the stream: asynchronously, or as the program called it */
    CUresult (*issue)(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous);
    const void *call;                 /* the arguments, for issue */
    CUstream stream;
    bool host_waits;                  /* the call returns when the copy is done */
    uintptr_t key;
};
HIDDEN CUresult cot_copy_over_link(const struct host_copy *copy);
HIDDEN CUresult cot_copy_of_shim(struct gpu *gpu, const struct host_copy *copy);
HIDDEN void cot_copy_charge_whole(uint32_t direction, uint64_t bytes); /* one that passes as it is */
HIDDEN bool cot_is_on_device(word address);
HIDDEN uint64_t cot_copy_slice_bytes(void); /* pieces of a copy on the device, of the current GPU; 0: whole */

/* Copies of one kind and like size (same power of two) are one kind of work. */
static inline uintptr_t cot_copy_key(const void *kind, uint64_t bytes)
{
    return (uintptr_t)kind * 64 + (bytes ? (uintptr_t)(64 - __builtin_clzll(bytes)) : 0);
}

/* May copies of this thread's GPU take turns?  A thread that has not used it yet has to look. */
static inline bool cot_copies_perhaps_on(void)
{
    const struct gpu *gpu = cot_thread->gpu;
    return UNLIKELY(gpu->page_slot->flags & COTENANT_SLOT_COPIES || gpu->slot == COTENANT_NO_SLOT);
}

#endif
