/* Scheduled copies: declarations shared by copies.c (pending copies), paced.c (waits in the stream) and link.c (the copy
 * page; waits on the thread). */
#ifndef COTENANT_COPIES_H
#define COTENANT_COPIES_H

#include "copies/copy_rule.h"
#include "copies/host_copy.h"
#include "shim.h"

struct copy_link { /* this process's entry on the copy page of a GPU */
    struct cotenant_copy_page *page; /* NULL: copies are not scheduled there */
    uint32_t queue;
    uint32_t participant;
    uint32_t number;                 /* number of the GPU in this process */
};

struct copy_words { /* wait flags on separate cache lines: one is written by the GPU, the other by the host */
    uint32_t ready, before_go[15];
    uint32_t go, after_go[15];
};

struct copy_record { /* a pending copy */
    struct copy_record *next;
    struct copy_link link;
    uint32_t direction, base, pieces, granted, returned, done; /* counts of pieces; returned: their slot is free */
    uint64_t piece_bytes, bytes;
    uint64_t asked_ns;            /* first request for the next piece */
    uint64_t moved_ns;            /* time of the last progress */
    uint64_t serial;              /* changes when the copy ends */
    const struct copy_record *before; /* the copy directly before it in its stream; NULL: unknown */
    uint64_t before_serial;
    struct copy_ticket tickets[COTENANT_COPY_SLOTS];
    bool taken;
    bool free_run;                /* the copy does not wait for turns: copies of other tenants stop for it */
    bool spent;                   /* its slot expired before its stream reached it */
};

static inline bool cot_copy_follows(const struct copy_record *record) /* it follows an unfinished copy in its stream */
{
    return record->before && record->before->serial == record->before_serial;
}

#define COPY_NAP_NS 10000 /* pieces take at least 20 us */
#define COPY_RECORDS 256
extern HIDDEN pthread_mutex_t cot_copy_lock; /* protects the records and their wait flags */
extern HIDDEN struct copy_record cot_copy_records[COPY_RECORDS];
extern HIDDEN struct copy_record *cot_copy_first; /* sorted by the order of the program's calls */
extern HIDDEN struct copy_words *cot_copy_words;  /* one per record; NULL before the first copy */

HIDDEN void cot_copies_enter(void);     /* takes the lock; polling threads let calling threads go first */
HIDDEN void cot_copies_leave(void);
HIDDEN void cot_copies_breathe(void);   /* called between two polls, without the lock */

/* with cot_copy_lock */
HIDDEN uint64_t cot_copies_advance(void);
HIDDEN void cot_copies_wake_worker(void);
HIDDEN uint64_t cot_copy_due(const struct copy_record *record); /* expected end of the piece on its link; 0: none */
HIDDEN void cot_copy_give_back(struct copy_record *record, uint32_t done);

static inline uint64_t cot_copy_piece_bytes(const struct copy_record *record, uint32_t piece)
{
    return piece + 1 < record->pieces ? record->piece_bytes : record->bytes - record->piece_bytes * (record->pieces - 1);
}

HIDDEN CUresult cot_copy_paced_by_stream(const struct copy_link *link, const struct host_copy *copy);
HIDDEN void cot_copies_drop_records(void);
HIDDEN void cot_copies_reset_after_fork(void);

#endif
