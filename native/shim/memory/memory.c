/* The memory that the process holds on each GPU, by kind of allocation (family). The shim asks the agent before the
 * driver allocates memory, and reports afterwards how much was allocated. An address that is not recorded here was
 * never charged, so only the driver handles it when it is freed. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "shim.h"
#include "swap/swap.h"

#define BUCKETS 4096
/* The upper bits of a stored reservation say which agent made it (the number of agents that were lost before). After a
 * reconnection, the new agent does not know the reservation, or has given the same number to another one. */
#define AGENT_SHIFT 48
#define NUMBER_MASK ((UINT64_C(1) << AGENT_SHIFT) - 1)
#define AGENT_MASK UINT64_C(0xffff)

struct holding {
    uint64_t address;
    uint64_t bytes;
    struct gpu *gpu;
    uint32_t family;
    struct holding *next;
};

/* this lock is never held during a call of the driver or a message to the agent */
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static struct holding *buckets[BUCKETS];
static uint64_t host_held;
static bool host_stale; /* the agent was lost, and the next agent has not been told of the pinned host memory yet */
static _Atomic bool unconfirmed; /* a message was sent whose effect may not be visible on the shared page yet */

static struct holding **bucket(uint64_t address)
{
    return &buckets[(address * UINT64_C(0x9e3779b97f4a7c15)) >> 52];
}

static uint32_t slot_of(const struct gpu *gpu)
{
    return gpu ? gpu->slot : COTENANT_NO_SLOT;
}

/* After a reconnection, waits until the GPU is attached to the new agent. */
static void wait_until_attached(const struct gpu *gpu)
{
    pthread_mutex_lock(&cot_lock);
    while (gpu && gpu->stale && cot_agent_is_connected() && !cot_exiting())
        pthread_cond_wait(&cot_changed, &cot_lock);
    pthread_mutex_unlock(&cot_lock);
}

/* Returns whether the process has yet to report to a new agent how much memory of this family it holds. That report
 * includes the change that the caller makes, so the caller must not send a message about the change: the agent would
 * count it twice. The caller holds memory_lock. */
static bool is_reported_later(const struct gpu *gpu, uint32_t family)
{
    /* a context's size is not in the report: the agent knows it */
    return gpu ? gpu->stale || (family != COTENANT_MEMORY_CONTEXT && gpu->untold >> family & 1) : host_stale;
}

static CUresult reserve(struct gpu *gpu, uint32_t family, uint64_t bytes, uint64_t *reservation)
{
    *reservation = 0;
    struct cotenant_memory ask = {.family = family, .bytes = bytes};
    for (;;) {
        struct cotenant_message reply;
        wait_until_attached(gpu);
        if (cot_agent_call(COTENANT_MEMORY_RESERVE, slot_of(gpu), &ask, sizeof ask, &reply) == 0) {
            if (reply.body.memory.reservation)
                *reservation = reply.body.memory.reservation | cot_answered_by << AGENT_SHIFT;
            return reply.header.status == COTENANT_OK       ? CUDA_SUCCESS
                   /* the allocation is allowed, since the tenant oversubscribes the GPU, but other tenants occupy the
                    * memory now */
                   : reply.header.status == COTENANT_DENIED ? CUDA_ERROR_NOT_READY
                                                            : CUDA_ERROR_OUT_OF_MEMORY;
        }
        pthread_mutex_lock(&cot_lock);
        while (!cot_agent_is_connected() && cot_fail_mode() == COTENANT_FAIL_CLOSED && !cot_exiting())
            pthread_cond_wait(&cot_changed, &cot_lock);
        bool go = !cot_agent_is_connected() || cot_exiting();
        pthread_mutex_unlock(&cot_lock);
        if (go)
            return CUDA_SUCCESS;
    }
}

/* Asks the agent whether memory may be allocated. If the agent has ended, waits for its restart if so configured.
 * CUDA_ERROR_NOT_READY is returned only for memory that can be swapped: the allocation is allowed, but other tenants
 * occupy the memory now, so the caller may have to allocate it without memory on the GPU at first. */
CUresult cot_memory_reserve(struct gpu *gpu, uint32_t family, uint64_t bytes, uint64_t *reservation)
{
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    CUresult result = reserve(gpu, family, bytes, reservation);
    uint32_t mode = cot_swap_mode();
    bool moves = family == COTENANT_MEMORY_PLAIN &&
                 (mode == COTENANT_OVERSUBSCRIBE_SWAP || mode == COTENANT_OVERSUBSCRIBE_MANAGED);
    if (result == CUDA_ERROR_NOT_READY && !moves) {
        result = CUDA_SUCCESS;
        /* if the memory is for a context, the driver itself finds out whether there is enough */
        if (!cot_swap_room_now(gpu, bytes, 0) && family != COTENANT_MEMORY_CONTEXT) {
            cot_memory_commit(gpu, family, *reservation, 0);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    pthread_setcancelstate(cancel, NULL);
    return result;
}

bool cot_memory_make_room(struct gpu *gpu, uint64_t bytes)
{
    return cot_swap_mode() != COTENANT_OVERSUBSCRIBE_NONE && cot_swap_room_now(gpu, bytes, 0);
}

void cot_memory_commit(struct gpu *gpu, uint32_t family, uint64_t reservation, uint64_t bytes)
{
    struct cotenant_memory done = {.family = family, .bytes = bytes};
    pthread_mutex_lock(&memory_lock);
    *(gpu ? &gpu->held[family] : &host_held) += bytes;
    bool later = is_reported_later(gpu, family);
    bool known = reservation && reservation >> AGENT_SHIFT == (atomic_load(&cot_agents_lost) & AGENT_MASK);
    pthread_mutex_unlock(&memory_lock);
    atomic_store(&unconfirmed, true);
    done.reservation = known ? reservation & NUMBER_MASK : 0;
    if (later && !known)
        return;
    if (later)
        done.bytes = 0; /* the new agent must only forget its reservation */
    cot_agent_send(COTENANT_MEMORY_COMMIT, slot_of(gpu), &done, sizeof done);
}

void cot_memory_release(struct gpu *gpu, uint32_t family, uint64_t bytes)
{
    struct cotenant_memory back = {.family = family, .bytes = bytes};
    pthread_mutex_lock(&memory_lock);
    uint64_t *held = gpu ? &gpu->held[family] : &host_held;
    *held -= bytes < *held ? bytes : *held;
    bool later = is_reported_later(gpu, family);
    pthread_mutex_unlock(&memory_lock);
    atomic_store(&unconfirmed, true);
    if (!later)
        cot_agent_send(COTENANT_MEMORY_RELEASE, slot_of(gpu), &back, sizeof back);
}

void cot_memory_remember(uint64_t address, uint64_t bytes, struct gpu *gpu, uint32_t family)
{
    struct holding *holding = malloc(sizeof *holding);
    if (!holding)
        return; /* the memory stays charged until the process ends, because the charge must never be too low */
    *holding = (struct holding){.address = address, .bytes = bytes, .gpu = gpu, .family = family};
    pthread_mutex_lock(&memory_lock);
    holding->next = *bucket(address);
    *bucket(address) = holding;
    pthread_mutex_unlock(&memory_lock);
}

/* Returns the allocation at an address, and removes it from the accounts. This must happen before the driver frees
 * it, since another thread may get the same address afterwards. NULL: the allocation was never charged. */
struct holding *cot_memory_take_out(uint64_t address, uint32_t family)
{
    pthread_mutex_lock(&memory_lock);
    struct holding *found = NULL;
    for (struct holding **link = bucket(address); *link; link = &(*link)->next)
        if ((*link)->address == address &&
            ((*link)->family == family || (family == COTENANT_MEMORY_PLAIN && (*link)->family == COTENANT_MEMORY_MANAGED))) {
            found = *link;
            *link = found->next;
            break;
        }
    pthread_mutex_unlock(&memory_lock);
    return found;
}

/* Called after the driver's free: reduces the charge of the GPU on which the memory was allocated. If the driver
 * refused to free it, the allocation is recorded again. */
void cot_memory_taken_out(struct holding *holding, bool freed)
{
    if (!holding)
        return;
    if (freed) {
        cot_memory_release(holding->gpu, holding->family, holding->bytes);
        free(holding);
        return;
    }
    pthread_mutex_lock(&memory_lock);
    holding->next = *bucket(holding->address);
    *bucket(holding->address) = holding;
    pthread_mutex_unlock(&memory_lock);
}

/* Called when the last context of this process on a GPU was destroyed together with all its allocations. */
void cot_memory_forget_gpu(struct gpu *gpu)
{
    cot_pools_forget_gpu(gpu);
    pthread_mutex_lock(&memory_lock);
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct holding **link = &buckets[i]; *link;) {
            struct holding *holding = *link;
            if (holding->gpu == gpu) {
                *link = holding->next;
                free(holding);
            } else
                link = &holding->next;
        }
    uint64_t held[COTENANT_MEMORY_HOST + 1];
    memcpy(held, gpu->held, sizeof held);
    pthread_mutex_unlock(&memory_lock);
    for (uint32_t family = COTENANT_MEMORY_PLAIN; family <= COTENANT_MEMORY_GRAPH; family++)
        if (held[family])
            cot_memory_release(gpu, family, held[family]);
}

void cot_memory_agent_lost(void)
{
    pthread_mutex_lock(&memory_lock);
    host_stale = true;
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->attached)
            cot_gpu_at(i)->untold = UINT32_MAX;
    pthread_mutex_unlock(&memory_lock);
}

/* Reports to the agent how much memory of a family the process holds. `gpu` is NULL for pinned host memory, which
 * belongs to no GPU. If the amount changes while the report is sent, it is reported again, since no other message tells
 * the agent of that change (is_reported_later). */
static void report(struct gpu *gpu, uint32_t family)
{
    uint64_t *held = gpu ? &gpu->held[family] : &host_held, agent = atomic_load(&cot_agents_lost);
    /* true: an amount of 0 bytes need not be reported, since the agent assumes 0. For contexts it must be reported: to
     * the agent, 0 means that the size is not known, and it charges the estimated size of a context. */
    bool told = gpu && (family != COTENANT_MEMORY_CONTEXT || gpu->contexts == 0);
    struct cotenant_memory state = {.family = family};
    for (;;) {
        pthread_mutex_lock(&memory_lock);
        bool over = agent != atomic_load(&cot_agents_lost); /* the next agent gets the report */
        if (!over && told && state.bytes == *held) {
            if (gpu)
                gpu->untold &= ~(1u << family);
            else
                host_stale = false;
            over = true;
        }
        state.bytes = *held;
        pthread_mutex_unlock(&memory_lock);
        if (over || cot_agent_send(COTENANT_MEMORY_STATE, slot_of(gpu), &state, sizeof state) != 0)
            return;
        told = true;
    }
}

void cot_memory_report_state(struct gpu *gpu)
{
    for (uint32_t family = COTENANT_MEMORY_PLAIN; family <= COTENANT_MEMORY_CONTEXT; family++)
        report(gpu, family);
}

void cot_memory_report_host(void)
{
    report(NULL, COTENANT_MEMORY_HOST);
}

/* Reads the tenant's limit and its charged memory from the shared page. Memory within the limit that the tenant cannot
 * get counts as charged. Returns false if there is no limit, so that the driver's numbers apply. */
bool cot_memory_view(struct gpu *gpu, uint64_t *limit_bytes, uint64_t *used_bytes)
{
    if (!gpu || !gpu->attached || gpu->page_slot->memory_limit_bytes == COTENANT_NO_LIMIT)
        return false;
    *limit_bytes = gpu->page_slot->memory_limit_bytes;
    *used_bytes = gpu->page_slot->memory_used_bytes;
    struct cotenant_message reply;
    struct cotenant_memory ask = {0};
    if (atomic_exchange(&unconfirmed, false) &&
        cot_agent_call(COTENANT_MEMORY_QUERY, gpu->slot, &ask, sizeof ask, &reply) == 0 &&
        reply.header.type == COTENANT_MEMORY_REPLY && reply.header.status == COTENANT_OK) {
        *limit_bytes = reply.body.memory.limit_bytes;
        *used_bytes = reply.body.memory.used_bytes;
    }
    if (gpu->total_bytes && *limit_bytes > gpu->total_bytes)
        *limit_bytes = gpu->total_bytes;
    *used_bytes += gpu->page_slot->memory_withheld_bytes;
    return true;
}

/* If MPS or the kernel limits the tenant's memory, too, the driver reports what is left of the limit, if the GPU has as
 * much. Of that, no more is reserved for others than what they withhold from the limit. */
uint64_t cot_memory_kept(struct gpu *gpu)
{
    if (!gpu || !gpu->attached)
        return 0;
    uint64_t kept = gpu->page_slot->memory_kept_bytes, withheld = gpu->page_slot->memory_withheld_bytes;
    return gpu->page_slot->memory_limit_bytes == COTENANT_NO_LIMIT || kept < withheld ? kept : withheld;
}

void cot_memory_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&memory_lock, &fresh, sizeof fresh);
    memset(buckets, 0, sizeof buckets); /* the child of a fork must not report memory as freed that its parent holds */
    host_held = 0;
    host_stale = false;
}
