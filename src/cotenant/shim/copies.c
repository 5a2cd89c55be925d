/* Copies over the link take turns with those of other tenants (copy_page.h, copy_rule.h).
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
 * in_flight pieces of all tenants are on the link: enough that it never idles while one ends and another is granted.
 *
 * Pageable memory is copied by the driver on the calling thread; there the thread itself waits for each piece's turn. */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "copies.h"

#define LEAST_NAP_NS 10000
#define MOST_NAP_NS 1000000

pthread_mutex_t cot_copy_lock = PTHREAD_MUTEX_INITIALIZER;
struct copy_record cot_copy_records[COPY_RECORDS];
struct copy_record *cot_copy_first;
struct copy_words *cot_copy_words;

static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static bool worker_runs, worker_sleeps;
static uint32_t waiting; /* bit of GPU and direction: this process waits there, by the last look */
static uint32_t asked;   /* the same: it asked during this look */
static struct copy_link asked_link[2 * COTENANT_MAX_GPUS];

/* ---- advancing: with lock ---- */

static uint32_t reached(const struct copy_record *record) /* 0: not yet at the first piece; pieces + 1: done */
{
    const struct copy_words *mine = &cot_copy_words[record - cot_copy_records];
    int32_t at = (int32_t)(__atomic_load_n(&mine->ready, __ATOMIC_ACQUIRE) - record->base);
    return at < 0 ? 0 : (uint32_t)at > record->pieces + 1 ? record->pieces + 1 : (uint32_t)at;
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

static bool ask(struct copy_record *record, uint64_t now)
{
    struct copy_link *link = &record->link;
    if (!record->asked_ns)
        record->asked_ns = now;
    asked |= 1u << place_of(record);
    asked_link[place_of(record)] = *link;
    if (!copy_try(link->page, record->direction, link->queue, link->participant, cot_copy_piece_bytes(record, record->granted), now,
                  &record->tickets[record->granted % COTENANT_COPY_SLOTS]))
        return false;
    struct cotenant_copy_queue *queue = &link->page->links[record->direction].queues[link->queue];
    __atomic_fetch_add(&queue->waited_ns, now - record->asked_ns, __ATOMIC_RELAXED);
    record->asked_ns = 0;
    record->moved_ns = now;
    record->granted++;
    __atomic_store_n(&cot_copy_words[record - cot_copy_records].go, record->base + record->granted, __ATOMIC_RELEASE);
    return true;
}

/* True: it waits for a turn, so copies behind it in the same direction do not ask. */
static bool advance(struct copy_record *record, uint64_t now)
{
    uint32_t at = reached(record), done = at ? at - 1 : 0, before = record->returned;
    cot_copy_give_back(record, done);
    if (record->returned != before)
        record->moved_ns = now;
    if (at == 0 || at > record->pieces)
        return false;
    uint32_t most = record->link.page->in_flight, in_flight = most < COTENANT_COPY_SLOTS ? most : COTENANT_COPY_SLOTS;
    while (record->granted < record->pieces && record->granted - done < in_flight)
        if (!ask(record, now))
            return true;
    return record->granted < record->pieces;
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

/* A queue with chunks on the link and another copy behind them will want the next turn: it is not passed over for the moment
 * between, or weights would mean nothing to a program that queues copies of few chunks. */
static uint32_t about_to_ask(uint32_t waits, uint64_t now)
{
    uint32_t flying = 0, behind = 0;
    for (const struct copy_record *record = cot_copy_first; record; record = record->next) {
        uint32_t bit = 1u << place_of(record);
        if (record->granted > record->returned)
            flying |= bit;
        else if (reached(record) == 0)
            behind |= bit;
    }
    uint32_t soon = flying & behind & ~waits;
    for (uint32_t i = 0; i < 2 * COTENANT_MAX_GPUS; i++)
        if (soon & 1u << i && asked_link[i].page)
            copy_store(&asked_link[i].page->links[i & 1].queues[asked_link[i].queue].seen_ns, now);
    return waits | soon;
}

/* Looks at every copy under way.  Returns how long nobody needs to look again; UINT64_MAX: there is none. */
uint64_t cot_copies_advance(void)
{
    uint32_t before = waiting, waits = 0;
    uint64_t now = cot_now_ns(), still_ns = UINT64_MAX;
    asked = 0;
    for (struct copy_record **link = &cot_copy_first; *link;) {
        struct copy_record *record = *link;
        uint32_t bit = 1u << place_of(record);
        if (waits & bit)
            cot_copy_give_back(record, reached(record) ? reached(record) - 1 : 0);
        else if (advance(record, now))
            waits |= bit;
        if (reached(record) == record->pieces + 1) {
            *link = record->next;
            retire(record);
            continue;
        }
        if (now - record->moved_ns < still_ns)
            still_ns = now - record->moved_ns;
        link = &record->next;
    }
    waits = about_to_ask(waits, now);
    for (uint32_t i = 0; i < 2 * COTENANT_MAX_GPUS; i++)
        if ((before | asked) & ~waits & 1u << i)
            copy_withdraw(asked_link[i].page, i & 1, asked_link[i].queue);
    waiting = waits;
    if (!cot_copy_first)
        return UINT64_MAX;
    uint64_t nap = waits ? LEAST_NAP_NS : still_ns / 8;
    return nap < LEAST_NAP_NS ? LEAST_NAP_NS : nap > MOST_NAP_NS ? MOST_NAP_NS : nap;
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
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    worker_runs = pthread_create(&thread, NULL, worker, NULL) == 0;
    if (worker_runs)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void cot_copies_drop_records(void) /* in the child of a fork */
{
    static const pthread_mutex_t fresh_lock = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t fresh_cond = PTHREAD_COND_INITIALIZER;
    memcpy(&cot_copy_lock, &fresh_lock, sizeof fresh_lock);
    memcpy(&work, &fresh_cond, sizeof fresh_cond);
    cot_copy_first = NULL;
    worker_runs = worker_sleeps = false;
    waiting = 0;
}
