/* The rule that chooses the next chunk on a link, from the copy page that all tenants of a GPU share. It makes no
 * system call and takes no lock.
 *
 * Each tenant has a queue. The queue's *vruntime* (virtual runtime) grows by the copied bytes divided by the
 * tenant's weight. The next chunk is that of the waiting queue with the smallest vruntime; queues of rank AHEAD come
 * first. A queue may copy a *slice* of several chunks in a row: page->period_bytes * its weight / sum of the weights
 * of the waiting queues, but at least one chunk. It loses the rest of the slice if its vruntime exceeds the smallest
 * one by more than a slice adds to it.
 *
 * When an idle queue starts to wait, its vruntime is clamped to within COPY_CREDIT_SLICES slices of the link's
 * clock. The clock is the vruntime of the queue that copied last, and never decreases. So an idle tenant has a
 * bounded credit, and a tenant that copied much while no other tenant waited has a bounded debt. The credit is so
 * large because of programs that make one copy after the other: their queue is idle between two copies, while the
 * other tenants copy their slice and the chunks that were already in flight.
 *
 * A test compares this rule with one in Python (copy_oracle.py).
 *
 * In the functions below, `direction` is the number of a link; links of pageable memory have numbers that are
 * COTENANT_COPY_PAGEABLE higher.
 *
 * Several fields are not read atomically together, so two processes may decide on slightly different states of the
 * page. Then a chunk may run out of order, but all bytes are charged, so the tenants' shares are right in the long
 * run. */
#ifndef COTENANT_COPY_RULE_H
#define COTENANT_COPY_RULE_H

#include <stdbool.h>

#include "abi/copy_page.h"
#include "abi/rules.h"

#define COPY_SCALE UINT64_C(16)
#define COPY_CREDIT_SLICES UINT64_C(3)
#define COPY_LEAST_CHUNK UINT64_C(4096)
#define COPY_USUAL_CHUNK (UINT64_C(8) << 20)
#define COPY_MOST_CHUNK (UINT64_C(1) << 40)
#define COPY_MOST_LAPSE_NS UINT64_C(10000000000)
/* a queue that has waited longer than this time is served before the other queues of its rank */
#define COPY_RESCUE_NS UINT64_C(2000000000)
#define COPY_AHEAD_BIT (UINT64_C(1) << 47)
#define COPY_DATE_MASK (COPY_AHEAD_BIT - 1)

static inline uint64_t copy_load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void copy_store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* returns whether vruntime a is before vruntime b; both may wrap around */
static inline bool copy_before(uint64_t a, uint64_t b)
{
    return (int64_t)(a - b) < 0;
}

static inline uint64_t copy_vtime(uint64_t bytes, uint32_t weight_milli)
{
    return bytes * COPY_SCALE * 1000 / (weight_milli ? weight_milli : 1);
}

/* The functions below limit parameters and times of the page to plausible values. Every tenant can write to the
 * page, also by mistake, and must not be able to block the others for ever. The agent restores its own fields. */
static inline uint64_t copy_chunk(const struct cotenant_copy_page *page)
{
    uint64_t bytes = page->chunk_bytes;
    return bytes >= COPY_LEAST_CHUNK && bytes <= COPY_MOST_CHUNK ? bytes : COPY_USUAL_CHUNK;
}

static inline uint32_t copy_most(const struct cotenant_copy_page *page)
{
    uint32_t most = page->in_flight;
    return most == 0 ? 1 : most < COTENANT_COPY_SLOTS ? most : COTENANT_COPY_SLOTS;
}

static inline bool copy_is_recent(uint64_t date_ns, uint64_t now_ns, uint64_t lapse_ns)
{
    if (lapse_ns > COPY_MOST_LAPSE_NS)
        lapse_ns = COPY_MOST_LAPSE_NS;
    return date_ns && (now_ns < date_ns ? date_ns - now_ns : now_ns - date_ns) < lapse_ns;
}

static inline bool copy_waits(const struct cotenant_copy_page *page, const struct cotenant_copy_queue *queue, uint64_t now_ns)
{
    return queue->weight_milli && copy_is_recent(copy_load(&queue->seen_ns), now_ns, page->wait_lapse_ns);
}

static inline bool copy_slot_is_free(const struct cotenant_copy_page *page, uint64_t word, uint64_t now_ns)
{
    uint64_t date_us = word & COPY_DATE_MASK, now_us = now_ns / 1000, lapse_us = page->slot_lapse_ns / 1000;
    if (lapse_us > COPY_MOST_LAPSE_NS / 1000)
        lapse_us = COPY_MOST_LAPSE_NS / 1000;
    return word == COTENANT_COPY_UNCLAIMED || now_us > date_us + lapse_us || date_us > now_us + lapse_us;
}

/* Returns the slice of a queue: how many bytes it may copy in a row while other queues wait. */
static inline uint64_t copy_slice(const struct cotenant_copy_page *page, const struct cotenant_copy_link *link,
                                  uint32_t queue, uint64_t now_ns)
{
    uint64_t weights = 0, mine = link->queues[queue].weight_milli;
    for (uint32_t i = 0; i < COTENANT_COPY_QUEUES; i++)
        if (i == queue || copy_waits(page, &link->queues[i], now_ns))
            weights += link->queues[i].weight_milli;
    uint64_t slice = weights ? page->period_bytes * mine / weights : 0;
    return slice > copy_chunk(page) ? slice : copy_chunk(page);
}

/* Returns the link in the same direction for the other kind of memory (pinned or pageable). */
static inline const struct cotenant_copy_link *copy_twin(const struct cotenant_copy_page *page, uint32_t direction)
{
    return &page->links[direction ^ COTENANT_COPY_PAGEABLE];
}

static inline bool copy_is_active(const struct cotenant_copy_page *page, const struct cotenant_copy_queue *queue, uint64_t now_ns)
{
    return copy_is_recent(copy_load(&queue->active_ns), now_ns, page->slot_lapse_ns);
}

/* Returns whether no other tenant has a queue on this GPU. */
static inline bool copy_is_sole(const struct cotenant_copy_link *link, uint32_t number)
{
    for (uint32_t i = 0; i < COTENANT_COPY_QUEUES; i++)
        if (i != number && link->queues[i].weight_milli)
            return false;
    return true;
}

/* Returns the piece size for a copy that starts now. It is one chunk if other tenants copy, or if a copy of a
 * latency-sensitive tenant (rank AHEAD) may come. Otherwise pieces are larger, which costs less time. Copies of rank
 * AHEAD are not split for the sake of others. */
static inline uint64_t copy_piece(const struct cotenant_copy_page *page, uint32_t direction, uint32_t number, uint64_t now_ns)
{
    const struct cotenant_copy_link *link = &page->links[direction], *twin = copy_twin(page, direction);
    bool mine_ahead = link->queues[number].rank == COTENANT_COPY_AHEAD;
    for (uint32_t i = 0; i < COTENANT_COPY_QUEUES; i++) {
        const struct cotenant_copy_queue *other = &link->queues[i];
        if (i == number || !other->weight_milli)
            continue;
        bool ahead = other->rank == COTENANT_COPY_AHEAD;
        bool copies = copy_is_active(page, other, now_ns) || copy_is_active(page, &twin->queues[i], now_ns);
        if (ahead || (copies && !mine_ahead))
            return copy_chunk(page);
    }
    return page->alone_bytes > copy_chunk(page) ? page->alone_bytes : copy_chunk(page);
}

/* Returns the queue whose chunk is next; COTENANT_COPY_QUEUES: no queue waits. */
static inline uint32_t copy_next(const struct cotenant_copy_page *page, const struct cotenant_copy_link *link, uint64_t now_ns)
{
    uint32_t best = COTENANT_COPY_QUEUES;
    bool best_ahead = false;
    for (uint32_t i = 0; i < COTENANT_COPY_QUEUES; i++) {
        const struct cotenant_copy_queue *queue = &link->queues[i];
        if (!copy_waits(page, queue, now_ns))
            continue;
        bool ahead = queue->rank == COTENANT_COPY_AHEAD;
        if (best < COTENANT_COPY_QUEUES && (best_ahead && !ahead))
            continue;
        if (best == COTENANT_COPY_QUEUES || (ahead && !best_ahead) ||
            copy_before(copy_load(&queue->vruntime), copy_load(&link->queues[best].vruntime))) {
            best = i;
            best_ahead = ahead;
        }
    }
    uint64_t slice = copy_load(&link->slice);
    uint32_t holder = (uint32_t)(slice >> 48);
    if (best == COTENANT_COPY_QUEUES || holder == 0 || holder > COTENANT_COPY_QUEUES || holder - 1 == best)
        return best;
    const struct cotenant_copy_queue *queue = &link->queues[holder - 1];
    bool same_rank = (queue->rank == COTENANT_COPY_AHEAD) == best_ahead;
    uint64_t bytes = copy_slice(page, link, holder - 1, now_ns);
    bool left = (slice & ((UINT64_C(1) << 48) - 1)) < bytes;
    uint64_t most = copy_load(&link->queues[best].vruntime) + copy_vtime(bytes, queue->weight_milli);
    bool fair = copy_before(copy_load(&queue->vruntime), most);
    return same_rank && left && fair && copy_waits(page, queue, now_ns) ? holder - 1 : best;
}

static inline uint64_t *copy_clock(struct cotenant_copy_link *link, const struct cotenant_copy_queue *queue)
{
    return queue->rank == COTENANT_COPY_AHEAD ? &link->min_ahead : &link->min_vruntime;
}

/* Called when an idle queue starts to wait: clamps its vruntime to within COPY_CREDIT_SLICES slices of the link's
 * clock. */
static inline void copy_wake(const struct cotenant_copy_page *page, struct cotenant_copy_link *link, uint32_t number, uint64_t now_ns)
{
    struct cotenant_copy_queue *queue = &link->queues[number];
    uint64_t credit = copy_vtime(COPY_CREDIT_SLICES * copy_slice(page, link, number, now_ns), queue->weight_milli);
    uint64_t clock = copy_load(copy_clock(link, queue)), own = copy_load(&queue->vruntime), begin;
    do {
        begin = copy_before(own, clock - credit) ? clock - credit : copy_before(clock + credit, own) ? clock + credit : own;
    } while (begin != own &&
             !__atomic_compare_exchange_n(&queue->vruntime, &own, begin, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
}

static inline uint32_t copy_held_ahead(const struct cotenant_copy_page *page, const struct cotenant_copy_link *link, uint64_t now_ns)
{
    uint32_t held = 0;
    for (uint32_t i = 0; i < COTENANT_COPY_SLOTS; i++) {
        uint64_t word = copy_load(&link->slots[i]);
        held += (word & COPY_AHEAD_BIT) && !copy_slot_is_free(page, word, now_ns);
    }
    return held;
}

/* Finds a free slot for a chunk of a queue. A queue of a latency-sensitive tenant (rank AHEAD) ignores the chunks of
 * other ranks that are in flight. A queue of another rank gets no slot while a chunk of rank AHEAD is in flight,
 * whether that chunk is of pinned or pageable memory. */
static inline int copy_free_slot(const struct cotenant_copy_page *page, uint32_t direction, bool ahead, uint64_t now_ns)
{
    const struct cotenant_copy_link *link = &page->links[direction];
    uint32_t held = 0, held_ahead = 0, most = copy_most(page);
    int place = -1;
    for (uint32_t i = 0; i < COTENANT_COPY_SLOTS; i++) {
        uint64_t word = copy_load(&link->slots[i]);
        if (copy_slot_is_free(page, word, now_ns)) {
            if (place < 0 && (ahead || i < most))
                place = (int)i;
            continue;
        }
        held++;
        held_ahead += (word & COPY_AHEAD_BIT) != 0;
    }
    if (ahead)
        return held_ahead < most ? place : -1;
    return held_ahead == 0 && held < most && copy_held_ahead(page, copy_twin(page, direction), now_ns) == 0 ? place : -1;
}

/* Counts bytes that are copied while no other tenant has a queue. They need no slot and do not change the vruntime. */
static inline void copy_count(struct cotenant_copy_link *link, uint32_t number, uint64_t bytes)
{
    __atomic_fetch_add(&link->queues[number].bytes, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&link->queues[number].chunks, 1, __ATOMIC_RELAXED);
}

static inline void copy_charge(const struct cotenant_copy_page *page, struct cotenant_copy_link *link, uint32_t number, uint64_t bytes)
{
    (void)page;
    struct cotenant_copy_queue *queue = &link->queues[number];
    __atomic_fetch_add(&queue->vruntime, copy_vtime(bytes, queue->weight_milli), __ATOMIC_ACQ_REL);
    __atomic_fetch_add(&queue->bytes, bytes, __ATOMIC_RELAXED);
}

/* Called after a grant: advances the link's clock, and continues the present slice or starts a new one. */
static inline void copy_account(const struct cotenant_copy_page *page, struct cotenant_copy_link *link, uint32_t number, uint64_t bytes, uint64_t now_ns)
{
    uint64_t *clock = copy_clock(link, &link->queues[number]);
    uint64_t before = copy_load(&link->queues[number].vruntime), least = copy_load(clock);
    while (copy_before(least, before) &&
           !__atomic_compare_exchange_n(clock, &least, before, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        ;
    uint64_t slice = copy_load(&link->slice), used = slice & ((UINT64_C(1) << 48) - 1);
    bool goes_on = slice >> 48 == number + 1 && used < copy_slice(page, link, number, now_ns);
    copy_store(&link->slice, (uint64_t)(number + 1) << 48 | (goes_on ? used + bytes : bytes));
    copy_charge(page, link, number, bytes);
    __atomic_fetch_add(&link->queues[number].chunks, 1, __ATOMIC_RELAXED);
}

/* Requests a slot for one chunk. Returns true if the chunk may be copied; the ticket is its slot, which copy_done
 * gives back. Returns false if the process must request again soon, or call copy_withdraw. A queue without a weight
 * belongs to a tenant that has ended but still has a process; such a queue would never be next, so it copies without
 * a slot. */
static inline bool copy_try(struct cotenant_copy_page *page, uint32_t direction, uint32_t number, uint32_t participant,
                            uint64_t bytes, uint64_t now_ns, struct copy_ticket *ticket)
{
    struct cotenant_copy_link *link = &page->links[direction];
    struct cotenant_copy_queue *queue = &link->queues[number];
    if (!queue->weight_milli) {
        *ticket = (struct copy_ticket){.word = COTENANT_COPY_UNCLAIMED};
        return true;
    }
    if (!copy_waits(page, queue, now_ns))
        copy_wake(page, link, number, now_ns);
    copy_store(&queue->active_ns, now_ns);
    copy_store(&queue->seen_ns, now_ns);
    if (copy_next(page, link, now_ns) != number)
        return false;
    bool ahead = queue->rank == COTENANT_COPY_AHEAD;
    int place = copy_free_slot(page, direction, ahead, now_ns);
    if (place < 0)
        return false;
    uint64_t held = copy_load(&link->slots[place]);
    uint64_t mine = (uint64_t)participant << 48 | (ahead ? COPY_AHEAD_BIT : 0) | (now_ns / 1000 & COPY_DATE_MASK);
    if (!copy_slot_is_free(page, held, now_ns) ||
        !__atomic_compare_exchange_n(&link->slots[place], &held, mine, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return false;
    copy_account(page, link, number, bytes, now_ns);
    *ticket = (struct copy_ticket){.slot = (uint32_t)place, .word = mine};
    return true;
}

/* Ensures that no queue waits longer than COPY_RESCUE_NS, even if the queue's vruntime is wrong because its weight is
 * tiny or because a process has overwritten it. */
static inline void copy_rescue(struct cotenant_copy_page *page, uint32_t direction, uint32_t number, uint64_t now_ns)
{
    struct cotenant_copy_link *link = &page->links[direction];
    struct cotenant_copy_queue *queue = &link->queues[number];
    uint64_t own = copy_load(&queue->vruntime), least = own;
    for (uint32_t i = 0; i < COTENANT_COPY_QUEUES; i++) {
        struct cotenant_copy_queue *other = &link->queues[i];
        bool rival = (other->rank == COTENANT_COPY_AHEAD) == (queue->rank == COTENANT_COPY_AHEAD);
        if (rival && copy_waits(page, other, now_ns) && copy_before(copy_load(&other->vruntime), least))
            least = copy_load(&other->vruntime);
    }
    if (least != own)
        __atomic_compare_exchange_n(&queue->vruntime, &own, least - 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static inline void copy_done(struct cotenant_copy_page *page, uint32_t direction, struct copy_ticket ticket)
{
    /* if the ticket has expired, its slot may belong to another chunk by now, so it is freed only if it still has
     * the ticket's value */
    uint64_t held = ticket.word;
    __atomic_compare_exchange_n(&page->links[direction].slots[ticket.slot], &held, COTENANT_COPY_UNCLAIMED, false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static inline void copy_withdraw(struct cotenant_copy_page *page, uint32_t direction, uint32_t number)
{
    copy_store(&page->links[direction].queues[number].seen_ns, 0);
}

#endif
