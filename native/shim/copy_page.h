/* The page that all tenants of one GPU share to take turns on its link.  Layout only; the rule is in copy_rule.h.
 *
 * The agent makes it (a sealed memfd per GPU), gives it to processes that ask with COPY_ATTACH, and writes the parameters
 * and what a queue is; processes write everything else.  Nothing on it is a lock: a slot is taken and given back with one
 * compare-and-swap, every claim has a date, and a claim that is too old counts for nothing.  So a process that is killed
 * at any instruction holds up the others for slot_lapse_ns at most, and less when the agent sees it die.
 *
 * Times are CLOCK_MONOTONIC in nanoseconds.  Fixed-width integers only. */
#ifndef COTENANT_COPY_PAGE_H
#define COTENANT_COPY_PAGE_H

#include <stdint.h>

#define COTENANT_COPY_MAGIC 0x434f5059u /* "COPY" */
#define COTENANT_COPY_VERSION 3u
#define COTENANT_COPY_PAGE_BYTES 20480u
#define COTENANT_COPY_QUEUES 64u
#define COTENANT_COPY_SLOTS 8u
#define COTENANT_COPY_NOBODY UINT64_C(0)

enum cotenant_copy_direction { COTENANT_COPY_TO_DEVICE = 0, COTENANT_COPY_TO_HOST = 1, COTENANT_COPY_DIRECTIONS = 2 };

/* Copies of pageable memory take turns among themselves, on the link of that number more: what they share is the processor's
 * pace, a tenth of the link's, and who could fill the link would stand still for them. */
#define COTENANT_COPY_PAGEABLE 2u
#define COTENANT_COPY_LINKS 4u

/* Smaller goes first; normal and best-effort share by weight. */
enum cotenant_copy_class { COTENANT_COPY_AHEAD = 0, COTENANT_COPY_NORMAL = 1, COTENANT_COPY_BEST_EFFORT = 2 };

struct cotenant_copy_queue { /* 64 bytes: one tenant in one direction */
    /* written by the agent */
    uint32_t weight_milli; /* 1000 times the weight; 0: nobody's queue */
    uint32_t rank;         /* cotenant_copy_class */
    /* written by the tenant's processes */
    uint64_t vruntime;     /* COPY_SCALE * bytes / weight; differences count, it may wrap */
    uint64_t seen_ns;      /* when a copy last asked for its turn; 0: none waits */
    uint64_t bytes;        /* granted since the start */
    uint64_t chunks;
    uint64_t waited_ns;    /* from a chunk's first asking to its grant, summed */
    uint64_t small;        /* copies that passed without a turn, charged all the same */
    uint64_t active_ns;    /* when a copy last asked or was on the link */
};

struct cotenant_copy_link { /* one direction, of pinned or of pageable memory */
    uint64_t slots[COTENANT_COPY_SLOTS]; /* chunks in flight: 16 bits participant, 1 bit ahead, 47 bits microseconds */
    uint64_t min_vruntime;               /* the clock of those who share: only grows */
    uint64_t slice;                      /* whose slice it is: queue + 1 in the high 16 bits, bytes of it used below */
    uint64_t min_ahead;                  /* the clock of those who go ahead */
    uint64_t reserved[5];
    struct cotenant_copy_queue queues[COTENANT_COPY_QUEUES];
};

struct cotenant_copy_page {
    uint32_t magic;
    uint32_t version;
    uint32_t page_bytes;
    uint32_t in_flight;      /* chunks on a link at once */
    uint64_t chunk_bytes;
    uint64_t period_bytes;   /* a round of all that wait moves about this much */
    uint64_t small_bytes;    /* copies up to this size pass at once */
    uint64_t slice_bytes;    /* copies on the device by best-effort tenants are cut into pieces of this size; 0: not */
    uint64_t wait_lapse_ns;  /* a queue that has not asked for so long does not wait */
    uint64_t slot_lapse_ns;  /* a slot held for so long is free */
    uint32_t host_paced;     /* 1: calling threads pace every copy; 0: the stream waits where it can */
    uint32_t reserved_0;
    uint64_t alone_bytes;    /* pieces where nobody else copies and nobody may come who goes ahead; below chunk_bytes: chunks */
    uint64_t lead_ns;        /* a tenant's next piece has its turn only so long before the one on the link ends; 0: at once */
    uint64_t reserved[21];
    struct cotenant_copy_link links[COTENANT_COPY_LINKS];
};

typedef char cotenant_check_copy_queue[sizeof(struct cotenant_copy_queue) == 64 ? 1 : -1];
typedef char cotenant_check_copy_page[sizeof(struct cotenant_copy_page) <= COTENANT_COPY_PAGE_BYTES ? 1 : -1];

#endif
