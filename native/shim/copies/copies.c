/* Copies over the link take turns with those of other tenants (abi/copy_page.h, copy_rule.h).
 *
 * A copy from or to pinned memory is cut into pieces that stay in the program's own stream, with this around each:
 *
 *     write ready   the stream has come here: the pieces before are done, this one can go
 *     wait go       until the piece has its turn
 *     copy          the piece
 *
 * The two words lie in host memory that the GPU sees.  Whoever looks at them (the worker thread, or the thread that waits
 * for its copy) asks the page for turns and grants with one store, so an asynchronous copy costs its thread only the
 * enqueuing, order in the stream is the program's own, and a grant depends on nothing that the GPU has yet to do.  At most
 * in_flight pieces of all tenants are on the link: enough that it never idles while one ends and another is granted.  What a
 * piece is depends on who else is there (copy_piece): a tenant that has the GPU to itself takes no turns at all.
 *
 * Pageable memory is copied by the driver on the calling thread; there the thread itself waits for each piece's turn. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "copies/copies.h"

#define MOST_NAP_NS 1000000
#define FEW_PROCESSORS 8
#define QUICK_NS 400000     /* pieces shorter than that are watched without a pause */
#define LEARNT_BYTES 65536  /* pieces smaller than that say little of the link's rate */
#define STILL_NS 1000000    /* while something moves */
#define LATE_NS 10000000    /* a piece that takes so long, and eight times as long as others, holds no slot */
#define EARLY_NS 1000000    /* how long a copy that goes ahead holds its place before its stream comes to it */
#define LEAD_NS 40000       /* from asking to the first byte, generously */

pthread_mutex_t cot_copy_lock = PTHREAD_MUTEX_INITIALIZER;
struct copy_record cot_copy_records[COPY_RECORDS];
struct copy_record *cot_copy_first;
struct copy_words *cot_copy_words;

static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static bool worker_runs, worker_sleeps;

#define PLACES (2 * COTENANT_MAX_GPUS) /* a direction of a GPU's link */
static struct place {
    struct copy_link link;            /* that this process last asked on */
    uint64_t mib_ns;                  /* what a MiB takes */
    uint64_t begun_ns;                /* when the piece that is on the link now was begun */
    uint64_t on_link_bytes;           /* its size */
    uint32_t flying;                  /* pieces with a slot */
    uint32_t issued;                  /* pieces that may go and are not done, with a slot or too late to keep it */
    bool waited;                      /* this process waited for a turn, by the last look */
    bool asked, waits, soon, behind;  /* in this look: it asked; it waits; it will ask soon; a copy waits behind others */
} places[PLACES];

static _Atomic uint32_t callers; /* that want the lock */

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

/* Where there are processors for all, a thread keeps the one it has: beside another that also only looks, yielding it costs
 * milliseconds. */
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

/* ---- advancing: with lock ---- */

static uint32_t reached(const struct copy_record *record) /* 0: not yet at the first piece; pieces + 1: done */
{
    const struct copy_words *mine = &cot_copy_words[record - cot_copy_records];
    int32_t at = (int32_t)(__atomic_load_n(&mine->ready, __ATOMIC_ACQUIRE) - record->base);
    if (at <= 0)
        return record->before && !cot_copy_follows(record); /* the end of the copy before it is its begin */
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

/* Slots of pieces that are done, or late: those of a copy that does not move are no use to anybody.  Late pieces count as
 * issued all the same, or more would follow them to wherever they wait. */
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

/* Those who go ahead hold their place from the call on, but not for long while other work is before them in their stream. */
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

static uint64_t due_ns(const struct place *place) /* when the piece on the link should end */
{
    return place->begun_ns + expected_ns(place, place->on_link_bytes);
}

/* Where somebody may come who goes ahead, the second piece is not on its way before the first is about to end. */
static bool too_early(const struct copy_record *record, const struct place *place, uint64_t now)
{
    return place->issued && ahead_are_here(record->link.page, record->direction) && now + LEAD_NS < due_ns(place);
}

/* True: it waits for a turn, so copies behind it in the same direction do not ask. */
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
    for (; record->granted < record->pieces; record->granted++) /* it was over before anybody looked */
        copy_charge(page, &page->links[record->direction], record->link.queue, cot_copy_piece_bytes(record, record->granted));
    record->serial++;
    record->base += record->pieces + 1;
    record->taken = false;
}

/* A queue with pieces on the link and more to come will want the next turn: it is not passed over for the moment between, or
 * weights would mean nothing to a program that queues copies of few pieces.  False: nothing of this process waits there. */
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

/* Looks at every copy under way.  Returns how long nobody needs to look again, 0 for at once; UINT64_MAX: there is none. */
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
        return 0; /* a nap would be longer than a piece */
    uint64_t nap = busy ? COPY_NAP_NS : still_ns / 8;
    return nap < COPY_NAP_NS ? COPY_NAP_NS : nap > MOST_NAP_NS ? MOST_NAP_NS : nap;
}

/* ---- the worker ---- */

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

void cot_copies_wake_worker(void) /* with lock */
{
    if (worker_runs) {
        if (worker_sleeps)
            pthread_cond_signal(&work);
        return;
    }
    worker_runs = cot_start_thread(worker, NULL);
}

void cot_copies_drop_records(void) /* in the child of a fork */
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
