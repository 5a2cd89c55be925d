/* Copies that take turns: what copies.c (those under way), paced.c (the stream waits) and link.c (the page; the thread waits)
 * share. */
#ifndef COTENANT_COPIES_H
#define COTENANT_COPIES_H

#include "copies/copy_rule.h"
#include "copies/host_copy.h"
#include "shim.h"

struct copy_link { /* this process on the copy page of a GPU */
    struct cotenant_copy_page *page; /* NULL: no turns there */
    uint32_t queue;
    uint32_t participant;
    uint32_t number;                 /* of the GPU in this process */
};

struct copy_words { /* a cache line each: the GPU writes one, the host the other */
    uint32_t ready, before_go[15];
    uint32_t go, after_go[15];
};

struct copy_record { /* one copy under way */
    struct copy_record *next;
    struct copy_link link;
    uint32_t direction, base, pieces, granted, returned, done; /* may go, have given their slot back, are done */
    uint64_t piece_bytes, bytes;
    uint64_t asked_ns;            /* when the next piece first asked */
    uint64_t moved_ns;            /* when something last happened */
    uint64_t serial;              /* changes when the copy ends */
    const struct copy_record *before; /* the copy right before it in its stream, nothing between; NULL: not known */
    uint64_t before_serial;
    struct copy_ticket tickets[COTENANT_COPY_SLOTS];
    bool taken;
    bool free_run;                /* goes without waiting: the others stop for it */
    bool spent;                   /* it held its place before its stream came to it, for as long as may be */
};

static inline bool cot_copy_follows(const struct copy_record *record) /* one that is not over yet */
{
    return record->before && record->before->serial == record->before_serial;
}

#define COPY_NAP_NS 10000 /* pieces take 20 us and more */
#define COPY_RECORDS 256
extern HIDDEN pthread_mutex_t cot_copy_lock; /* the records and their words */
extern HIDDEN struct copy_record cot_copy_records[COPY_RECORDS];
extern HIDDEN struct copy_record *cot_copy_first; /* in the order in which the program asked */
extern HIDDEN struct copy_words *cot_copy_words;  /* one for each record; NULL until there was a copy */

HIDDEN void cot_copies_enter(void);     /* takes the lock; whoever only watches lets callers go first */
HIDDEN void cot_copies_leave(void);
HIDDEN void cot_copies_breathe(void);   /* between two looks, without the lock */

/* with cot_copy_lock */
HIDDEN uint64_t cot_copies_advance(void);
HIDDEN void cot_copies_wake_worker(void);
HIDDEN uint64_t cot_copy_due(const struct copy_record *record); /* when the piece on its link should end; 0: there is none */
HIDDEN void cot_copy_give_back(struct copy_record *record, uint32_t done);

static inline uint64_t cot_copy_piece_bytes(const struct copy_record *record, uint32_t piece)
{
    return piece + 1 < record->pieces ? record->piece_bytes : record->bytes - record->piece_bytes * (record->pieces - 1);
}

HIDDEN CUresult cot_copy_paced_by_stream(const struct copy_link *link, const struct host_copy *copy);
HIDDEN void cot_copies_drop_records(void);
HIDDEN void cot_copies_reset_after_fork(void);

#endif
