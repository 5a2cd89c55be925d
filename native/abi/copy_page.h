/* Generated from copy_page.toml by native/abi/generate.py: change the TOML file, then run the script.
 * The copy page: shared memory by which the tenants of a GPU schedule copies on its link (see copy_rule.h).  docs/protocol.md explains it. */
#ifndef COTENANT_ABI_COPY_PAGE_H
#define COTENANT_ABI_COPY_PAGE_H

#include <stdbool.h>
#include <stdint.h>

#define COTENANT_COPY_MAGIC 0x434F5059u /* "COPY" */
#define COTENANT_COPY_VERSION 4u
#define COTENANT_COPY_PAGE_BYTES 20480u
#define COTENANT_COPY_QUEUES 64u /* largest number of tenants of a GPU whose copies are scheduled */
#define COTENANT_COPY_SLOTS 8u /* largest number of chunks that may be in flight on a link */
#define COTENANT_COPY_UNCLAIMED UINT64_C(0) /* value of a slot that no process has claimed */
/* copies up to this size start at once, but are charged to the tenant's queue */
#define COTENANT_COPY_SMALL_BYTES UINT64_C(65536)
#define COTENANT_COPY_DIRECTIONS 2u
/* added to the direction of a copy of pageable memory: such copies have a link of their own, because the CPU limits
 * their rate */
#define COTENANT_COPY_PAGEABLE 2u
/* number of links on the page: one per direction for pinned memory, then one per direction for pageable memory */
#define COTENANT_COPY_LINKS 4u

/* Direction of a copy. */
enum cotenant_copy_direction {
    COTENANT_COPY_TO_DEVICE = 0,
    COTENANT_COPY_TO_HOST = 1,
};

/* Rank of a tenant's queue. */
enum cotenant_copy_rank {
    COTENANT_COPY_AHEAD = 0, /* latency-sensitive tenants: their queues come before all others */
    COTENANT_COPY_NORMAL = 1, /* other tenants: the queues share the link by weight */
    /* best-effort tenants: the queues share the link by weight, and copies within the device are split into chunks,
     * as copies over the link are */
    COTENANT_COPY_BEST_EFFORT = 2,
};

/* The queue of a tenant on a link. */
struct cotenant_copy_queue {
    /* The agent writes these fields. */
    uint32_t weight_milli; /* 1000 times the weight; 0: the queue is not used */
    uint32_t rank; /* CopyRank */
    /* The tenant's processes write these fields. */
    /* virtual runtime of the queue: 16 * bytes / weight; it may wrap around, so only differences are used */
    uint64_t vruntime;
    uint64_t seen_ns; /* time at which a process last requested a chunk; 0: no copy waits */
    uint64_t bytes; /* total bytes of the chunks that the queue was granted */
    uint64_t chunks;
    uint64_t waited_ns; /* sum, over all chunks, of the time from the first request to the grant */
    uint64_t small; /* number of copies of at most COPY_SMALL_BYTES, which do not wait but are charged */
    uint64_t active_ns; /* last time at which a copy of this queue waited or was on the link */
};
_Static_assert(sizeof(struct cotenant_copy_queue) == 64, "cotenant_copy_queue does not have 64 bytes");

/* A link: the copies of one direction and of one kind of memory, pinned or pageable. */
struct cotenant_copy_link {
    /* one claim for each chunk in flight, from high to low: 16 bits number of the process, 1 bit for rank AHEAD, 47
     * bits time of the claim in microseconds */
    uint64_t slots[COTENANT_COPY_SLOTS];
    uint64_t min_vruntime; /* smallest vruntime of the queues of ranks NORMAL and BEST_EFFORT; never decreases */
    /* the queue whose chunks are copied now: 1 + its number in the high 16 bits; the other bits are the bytes that
     * it has copied in a row */
    uint64_t slice;
    uint64_t min_ahead; /* smallest vruntime of the queues of latency-sensitive tenants (rank AHEAD) */
    uint64_t reserved[5];
    struct cotenant_copy_queue queues[COTENANT_COPY_QUEUES];
};
_Static_assert(sizeof(struct cotenant_copy_link) == 4224, "cotenant_copy_link does not have 4224 bytes");

/* The copy page, by which the tenants of a GPU schedule their copies; its memfd has COPY_PAGE_BYTES. */
struct cotenant_copy_page {
    uint32_t magic;
    uint32_t version;
    uint32_t page_bytes;
    uint32_t in_flight; /* number of chunks that may be in flight on a link */
    uint64_t chunk_bytes;
    /* number of bytes that all waiting queues together copy before it is the first queue's turn again */
    uint64_t period_bytes;
    /* size into which copies within the device are split for best-effort tenants; 0: they are not split */
    uint64_t slice_bytes;
    uint64_t wait_lapse_ns; /* a queue counts as waiting for this long after its last request for a chunk */
    uint64_t slot_lapse_ns; /* a process's claim of a slot expires after this time */
    /* size of chunks while no other tenant copies and no latency-sensitive tenant is admitted; values below
     * chunk_bytes count as chunk_bytes */
    uint64_t alone_bytes;
    uint8_t reserved[192];
    struct cotenant_copy_link links[COTENANT_COPY_LINKS];
};
_Static_assert(sizeof(struct cotenant_copy_page) == 17152, "cotenant_copy_page does not have 17152 bytes");

#endif
