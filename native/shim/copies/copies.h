/* Declarations of scheduled copies that are shared by copies.c (the pending copies), paced.c (copies that wait in
 * their stream) and link.c (the copy page, and copies that wait on their thread). A *piece* is a part of a copy; it
 * runs when it has a slot on the copy page, or at once if the copy
 * has the flag free_run. */
#ifndef COTENANT_COPIES_H
#define COTENANT_COPIES_H

#include "copies/copy_rule.h"
#include "copies/host_copy.h"
#include "shim.h"

/* This process's queue on one GPU's copy page, the shared memory in which all processes schedule their copies. */
struct copy_link {
    struct cotenant_copy_page *page; /* NULL: copies on this GPU are not scheduled */
    uint32_t queue;
    uint32_t participant;
    uint32_t number;                 /* index of the GPU in this process */
};

/* The two words of host memory by which a copy waits (see copies.c). They are on separate cache lines, since the GPU
 * writes one and the host the other. */
struct copy_words {
    uint32_t ready, before_go[15];
    uint32_t go, after_go[15];
};

struct copy_record { /* a copy between host and device that has been enqueued but has not ended */
    struct copy_record *next;
    struct copy_link link;
    /* base: value of the wait words when the copy was enqueued. The four fields after it count pieces: all, those that
     * were granted a slot, those whose slot was given back, and those that are done. */
    uint32_t direction, base, pieces, granted, returned, done;
    uint64_t piece_bytes, bytes;
    uint64_t asked_ns;            /* time of the first request for a slot for the next piece */
    uint64_t moved_ns;            /* time at which a piece was last granted or done */
    uint64_t serial;              /* changes when the copy ends, so that other copies can notice the end of this one */
    /* the previous copy in the same stream, if the program enqueued nothing between the two copies; NULL: not known */
    const struct copy_record *before;
    uint64_t before_serial;
    struct copy_ticket tickets[COTENANT_COPY_SLOTS];
    bool taken;
    /* the copy, of a latency-sensitive tenant, runs in one piece without waiting for its slot; the slot is requested
     * only so that copies of other tenants wait for the end of this copy */
    bool free_run;
    bool spent;                   /* the copy lost its slot before its stream reached it */
};

/* Returns whether the previous copy in the same stream is unfinished. */
static inline bool cot_copy_follows(const struct copy_record *record)
{
    return record->before && record->before->serial == record->before_serial;
}

#define COPY_NAP_NS 10000 /* sleep of a polling thread between two polls; a piece takes at least 20 us on the link */
#define COPY_RECORDS 256
extern HIDDEN pthread_mutex_t cot_copy_lock; /* protects the records of pending copies and their wait words */
extern HIDDEN struct copy_record cot_copy_records[COPY_RECORDS];
extern HIDDEN struct copy_record *cot_copy_first; /* list of pending copies, in the order of the program's calls */
/* the wait words, one pair for each record of a copy; NULL before the process's first copy */
extern HIDDEN struct copy_words *cot_copy_words;

/* takes cot_copy_lock; polling threads let threads that make copies take it first */
HIDDEN void cot_copies_enter(void);
HIDDEN void cot_copies_leave(void);
HIDDEN void cot_copies_breathe(void);   /* pauses between two polls; the caller does not hold cot_copy_lock */

/* the caller of the functions below holds cot_copy_lock */
HIDDEN uint64_t cot_copies_advance(void);
HIDDEN void cot_copies_wake_worker(void);
/* returns the time at which the piece on the copy's link is expected to end; 0: no piece is on the link */
HIDDEN uint64_t cot_copy_due(const struct copy_record *record);
HIDDEN void cot_copy_give_back(struct copy_record *record, uint32_t done);

static inline uint64_t cot_copy_piece_bytes(const struct copy_record *record, uint32_t piece)
{
    return piece + 1 < record->pieces ? record->piece_bytes : record->bytes - record->piece_bytes * (record->pieces - 1);
}

HIDDEN CUresult cot_copy_paced_by_stream(const struct copy_link *link, const struct host_copy *copy);
HIDDEN void cot_copies_drop_records(void);
HIDDEN void cot_copies_reset_after_fork(void);

#endif
