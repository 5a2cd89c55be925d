/* Schedules the copies between host and device of several tenants on the GPU's link (abi/copy_page.h, copy_rule.h).
 *
 * A copy from or to pinned memory is split into pieces. They stay in the program's own stream, where each piece is
 * three operations:
 *
 *     write ready   tells the host that the stream has arrived here, so earlier pieces are done
 *     wait go       makes the stream wait until the piece may run
 *     copy          copies the piece
 *
 * `ready` and `go` are the copy's *wait words*: words of host memory that the GPU can access. A worker thread, or
 * the thread that waits for its copy, polls `ready`. For each piece it requests a slot on the copy page. When the
 * piece has its slot, which is its turn on the link, one store to `go` lets the stream continue. So an asynchronous
 * copy costs the calling thread no more than the enqueuing, the order in the stream is the program's own, and
 * letting a piece go depends on no work that the GPU has yet to do.
 *
 * At most in_flight pieces of all tenants are on the link, enough to keep it busy between two pieces. The size of
 * pieces depends on the other tenants (copy_piece); a tenant that is alone on its GPU requests no slots at all.
 *
 * The driver copies pageable memory on the calling thread, so there that thread itself waits for the slot of each
 * piece. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "copies/copies.h"

#define MOST_NAP_NS 1000000
#define FEW_PROCESSORS 8
/* for pieces that take less time on the link than this, the waiting thread polls without a pause */
#define QUICK_NS 400000
#define LEARNT_BYTES 65536  /* smaller pieces are too short to measure the link's rate by */
#define STILL_NS 1000000    /* threads poll without a pause only if some copy has made progress within this time */
/* a piece loses its slot if it takes longer than this and longer than eight times its expected time */
#define LATE_NS 10000000
/* a copy of a latency-sensitive tenant (rank AHEAD) keeps its slot on the link this long while its stream has not
 * reached the copy */
#define EARLY_NS 1000000
#define LEAD_NS 40000       /* upper estimate of the time from the request of a slot to the piece's first byte */

pthread_mutex_t cot_copy_lock = PTHREAD_MUTEX_INITIALIZER;
struct copy_record cot_copy_records[COPY_RECORDS];
struct copy_record *cot_copy_first;
struct copy_words *cot_copy_words;

static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static bool worker_runs, worker_sleeps;

#define PLACES (2 * COTENANT_MAX_GPUS) /* one entry for each direction of each GPU's link */
static struct place {
    struct copy_link link;            /* this process's queue on the copy page, noted at the last request for a slot */
    uint64_t mib_ns;                  /* estimated time that the link takes for 1 MiB */
    uint64_t begun_ns;                /* start time of the piece that is on the link */
    uint64_t on_link_bytes;           /* size of the piece that is on the link */
    uint32_t flying;                  /* number of pieces that hold a slot */
    /* number of granted pieces that have not ended, including those that have lost their slot */
    uint32_t issued;
    /* at the last poll of this process's copies, one of their pieces was waiting for a slot on this link */
    bool waited;
    /* What the current poll found: asked: a piece requested a slot. waits: a piece waits for a slot. soon: a piece
     * will request a slot soon. behind: a copy waits behind another one of this process. */
    bool asked, waits, soon, behind;
} places[PLACES];

static _Atomic uint32_t callers; /* number of threads that wait for cot_copy_lock */

void cot_copies_enter(void)
{
    atomic_fetch_add(&callers, 1);
    pthread_mutex_lock(&cot_copy_lock);
    atomic_fetch_sub(&callers, 1);
}

void cot_copies_leave(void)
{
    pthread_mutex_unlock(&cot_copy_lock);
}

/* Pauses a thread between two polls. If there are few processors, the thread yields, since other threads may need its
 * processor. If there are many, it only spins: a yield would take milliseconds if another polling thread happened to be
 * on the same processor. */
void cot_copies_breathe(void)
{
    static _Atomic int processors;
    if (!atomic_load_explicit(&processors, memory_order_relaxed))
        atomic_store(&processors, (int)sysconf(_SC_NPROCESSORS_ONLN));
    bool few = atomic_load_explicit(&processors, memory_order_relaxed) <= FEW_PROCESSORS;
    if (few)
        sched_yield();
    for (uint32_t i = 0; i < (few ? 8u : 24u) || (i < 4000 && atomic_load_explicit(&callers, memory_order_relaxed)); i++)
        __builtin_ia32_pause();
}

/* ---- advancing copies: the caller holds cot_copy_lock ---- */

/* Returns how far the stream has come: 0: it has not reached the first piece; n: it has reached piece n; pieces + 1:
 * all pieces are done. */
static uint32_t reached(const struct copy_record *record)
{
    const struct copy_words *mine = &cot_copy_words[record - cot_copy_records];
    int32_t at = (int32_t)(__atomic_load_n(&mine->ready, __ATOMIC_ACQUIRE) - record->base);
    if (at <= 0)
        /* if the previous copy in the stream has ended, this one has begun */
        return record->before && !cot_copy_follows(record);
    return (uint32_t)at > record->pieces + 1 ? record->pieces + 1 : (uint32_t)at;
}

void cot_copy_give_back(struct copy_record *record, uint32_t done)
{
    for (; record->returned < done && record->returned < record->granted; record->returned++)
        copy_done(record->link.page, record->direction, record->tickets[record->returned % COTENANT_COPY_SLOTS]);
}

static uint32_t place_of(const struct copy_record *record)
{
    return 2 * record->link.number + record->direction;
}

static uint64_t expected_ns(const struct place *place, uint64_t bytes)
{
    return (place->mib_ns * (bytes >> 10)) >> 10;
}

static void note_issued(struct place *place, const struct copy_record *record, uint32_t pieces)
{
    if (pieces && place->issued == 0)
        place->on_link_bytes = cot_copy_piece_bytes(record, record->done);
    place->issued += pieces;
}

static bool ask(struct copy_record *record, uint64_t now)
{
    struct copy_link *link = &record->link;
    struct place *place = &places[place_of(record)];
    if (!record->asked_ns)
        record->asked_ns = now;
    if (now - record->asked_ns > COPY_RESCUE_NS)
        copy_rescue(link->page, record->direction, link->queue, now);
    place->asked = true;
    place->link = *link;
    if (!copy_try(link->page, record->direction, link->queue, link->participant, cot_copy_piece_bytes(record, record->granted), now,
                  &record->tickets[record->granted % COTENANT_COPY_SLOTS]))
        return false;
    struct cotenant_copy_queue *queue = &link->page->links[record->direction].queues[link->queue];
    __atomic_fetch_add(&queue->waited_ns, now - record->asked_ns, __ATOMIC_RELAXED);
    record->asked_ns = 0;
    if (record->granted == record->done)
        record->moved_ns = now;
    if (place->issued == 0)
        place->begun_ns = now;
    record->granted++;
    place->flying++;
    note_issued(place, record, 1);
    __atomic_store_n(&cot_copy_words[record - cot_copy_records].go, record->base + record->granted, __ATOMIC_RELEASE);
    return true;
}

static void learn(struct place *place, const struct copy_record *record, uint32_t done, uint64_t now)
{
    uint64_t bytes = 0;
    for (uint32_t i = record->done; i < done; i++)
        bytes += cot_copy_piece_bytes(record, i);
    if (bytes < LEARNT_BYTES)
        return;
    uint64_t took = ((now - place->begun_ns) << 10) / (bytes >> 10);
    place->mib_ns = place->mib_ns ? (3 * place->mib_ns + took) / 4 : took;
}

/* Gives back the slots of pieces that are done or late. A late piece loses its slot because a stalled copy must not
 * block other tenants; it still counts as issued, so no further piece follows it. */
static void settle(struct copy_record *record, uint32_t at, uint64_t now)
{
    struct place *place = &places[place_of(record)];
    uint32_t done = at ? at - 1 : 0;
    cot_copy_give_back(record, done);
    if (done > record->done) {
        learn(place, record, done, now);
        record->done = done;
        record->moved_ns = place->begun_ns = now;
    }
    uint64_t usual = expected_ns(place, record->piece_bytes), patience = 8 * usual > LATE_NS ? 8 * usual : LATE_NS;
    if (record->granted > record->returned && now - record->moved_ns > patience)
        cot_copy_give_back(record, record->granted);
    place->flying += record->granted - record->returned;
    if (record->granted > record->done)
        note_issued(place, record, record->granted - record->done);
}

/* Advances a copy of a latency-sensitive tenant (rank AHEAD). Its slot is requested when the program calls the copy,
 * and given back if the stream does not reach the copy within EARLY_NS. Returns true if the copy waits for a slot. */
static bool advance_ahead(struct copy_record *record, uint32_t at, uint64_t now)
{
    if (at == 0 && record->granted && now - record->moved_ns > EARLY_NS) {
        cot_copy_give_back(record, 1);
        record->granted = record->returned = 0;
        record->spent = true;
    }
    return record->granted == 0 && (at == 1 || !record->spent) && !ask(record, now);
}

static bool ahead_are_here(const struct cotenant_copy_page *page, uint32_t direction)
{
    for (uint32_t i = 0; i < COTENANT_COPY_QUEUES; i++)
        if (page->links[direction].queues[i].weight_milli && page->links[direction].queues[i].rank == COTENANT_COPY_AHEAD)
            return true;
    return false;
}

/* Returns the time at which the piece that is on the link is expected to end. */
static uint64_t due_ns(const struct place *place)
{
    return place->begun_ns + expected_ns(place, place->on_link_bytes);
}

/* Returns whether it is too early to issue a second piece. If a copy of a latency-sensitive tenant (rank AHEAD) may
 * come, it is too early until the first piece is about to end. */
static bool too_early(const struct copy_record *record, const struct place *place, uint64_t now)
{
    return place->issued && ahead_are_here(record->link.page, record->direction) && now + LEAD_NS < due_ns(place);
}

/* Requests slots for the pieces of a copy. Returns true if the copy waits for a slot; then the copies behind it in
 * the same direction must not request any. */
static bool advance(struct copy_record *record, uint32_t at, uint64_t now)
{
    struct place *place = &places[place_of(record)];
    if (at > record->pieces)
        return false;
    if (record->free_run)
        return advance_ahead(record, at, now);
    if (at == 0 && !(cot_copy_follows(record) && record->before->granted == record->before->pieces))
        return false;
    while (record->granted < record->pieces && place->issued < copy_most(record->link.page)) {
        if (too_early(record, place, now))
            return place->soon = true;
        if (!ask(record, now))
            return true;
    }
    return record->granted < record->pieces && place->flying > 0;
}

static void retire(struct copy_record *record)
{
    cot_copy_give_back(record, record->granted);
    struct cotenant_copy_page *page = record->link.page;
    /* the copy ended before a poll could count these pieces, so they are charged now */
    for (; record->granted < record->pieces; record->granted++)
        copy_charge(page, &page->links[record->direction], record->link.queue, cot_copy_piece_bytes(record, record->granted));
    record->serial++;
    record->base += record->pieces + 1;
    record->taken = false;
}

/* Keeps this process's queue marked as waiting while it has pieces on the link and more pieces to come. Otherwise
 * weights would have no effect for programs whose copies have few pieces. Returns false if no piece of this process
 * waits in this direction. */
static bool keep_place(struct place *place, uint32_t direction, uint64_t now)
{
    bool waits = place->waits;
    if (place->link.page && place->flying) {
        struct cotenant_copy_queue *queue = &place->link.page->links[direction].queues[place->link.queue];
        copy_store(&queue->active_ns, now);
        if (!waits && (place->soon || place->behind)) {
            copy_store(&queue->seen_ns, now);
            waits = true;
        }
    }
    if ((place->waited || place->asked) && !waits)
        copy_withdraw(place->link.page, direction, place->link.queue);
    place->waited = waits;
    return waits;
}

uint64_t cot_copy_due(const struct copy_record *record)
{
    const struct place *place = &places[place_of(record)];
    return place->issued ? due_ns(place) : 0;
}

/* Polls all pending copies. Returns the time in ns until the next poll is needed; 0: poll again at once; UINT64_MAX:
 * no copy is pending. */
uint64_t cot_copies_advance(void)
{
    uint64_t now = cot_now_ns(), still_ns = UINT64_MAX;
    for (uint32_t i = 0; i < PLACES; i++) {
        places[i].asked = places[i].waits = places[i].soon = places[i].behind = false;
        places[i].flying = places[i].issued = 0;
    }
    for (struct copy_record *record = cot_copy_first; record; record = record->next)
        settle(record, reached(record), now);
    for (struct copy_record **link = &cot_copy_first; *link;) {
        struct copy_record *record = *link;
        struct place *place = &places[place_of(record)];
        uint32_t at = reached(record);
        if (at == record->pieces + 1) {
            *link = record->next;
            retire(record);
            continue;
        }
        place->behind |= at == 0 && record->granted == 0;
        if (!place->waits)
            place->waits = advance(record, at, now) && !place->soon;
        if (now - record->moved_ns < still_ns)
            still_ns = now - record->moved_ns;
        link = &record->next;
    }
    bool busy = false, quick = true;
    for (uint32_t i = 0; i < PLACES; i++) {
        bool waits = keep_place(&places[i], i & 1, now);
        busy |= waits || places[i].flying;
        quick &= !places[i].flying || (int64_t)(due_ns(&places[i]) - now) < QUICK_NS;
    }
    if (!cot_copy_first)
        return UINT64_MAX;
    if (busy && quick && still_ns < STILL_NS)
        return 0; /* a sleep would last longer than the piece */
    uint64_t nap = busy ? COPY_NAP_NS : still_ns / 8;
    return nap < COPY_NAP_NS ? COPY_NAP_NS : nap > MOST_NAP_NS ? MOST_NAP_NS : nap;
}

/* ---- the worker thread ---- */

static void *worker(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "cotenant-copies");
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    pthread_mutex_lock(&cot_copy_lock);
    for (;;) {
        uint64_t nap = cot_copies_advance();
        if (nap == UINT64_MAX) {
            worker_sleeps = true;
            pthread_cond_wait(&work, &cot_copy_lock);
            worker_sleeps = false;
            continue;
        }
        pthread_mutex_unlock(&cot_copy_lock);
        if (nap == 0)
            cot_copies_breathe();
        else
            nanosleep(&(struct timespec){.tv_nsec = (long)nap}, NULL);
        pthread_mutex_lock(&cot_copy_lock);
    }
    return NULL;
}

void cot_copies_wake_worker(void) /* the caller holds cot_copy_lock, which protects the list of pending copies */
{
    if (worker_runs) {
        if (worker_sleeps)
            pthread_cond_signal(&work);
        return;
    }
    worker_runs = cot_start_thread(worker, NULL);
}

void cot_copies_drop_records(void) /* Called in the child of a fork, which has none of its parent's pending copies. */
{
    static const pthread_mutex_t fresh_lock = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t fresh_cond = PTHREAD_COND_INITIALIZER;
    memcpy(&cot_copy_lock, &fresh_lock, sizeof fresh_lock);
    memcpy(&work, &fresh_cond, sizeof fresh_cond);
    cot_copy_first = NULL;
    worker_runs = worker_sleeps = false;
    memset(places, 0, sizeof places);
    atomic_store(&callers, 0);
}
