/* Memory held by the process on each GPU, by family.  The agent is asked before the driver allocates, and told how much
 * was allocated.  An address that is not known here was never charged: freeing it is left to the driver. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "shim.h"
#include "swap/swap.h"

#define BUCKETS 4096

struct holding {
    uint64_t address;
    uint64_t bytes;
    struct gpu *gpu;
    uint32_t family;
    struct holding *next;
};

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER; /* never held during a call of driver or agent */
static struct holding *buckets[BUCKETS];
static uint64_t host_held;
static bool host_stale; /* the agent was lost: the new one does not know the pinned host memory yet */
static _Atomic bool unconfirmed; /* a message was sent whose effect the page may not show yet */

static struct holding **bucket(uint64_t address)
{
    return &buckets[(address * UINT64_C(0x9e3779b97f4a7c15)) >> 52];
}

static uint32_t slot_of(const struct gpu *gpu)
{
    return gpu ? gpu->slot : COTENANT_NO_SLOT;
}

/* After a reconnection, waits until the GPU's slot is known. */
static void wait_until_attached(const struct gpu *gpu)
{
    pthread_mutex_lock(&cot_lock);
    while (gpu && gpu->stale && cot_agent_is_connected() && !cot_exiting())
        pthread_cond_wait(&cot_changed, &cot_lock);
    pthread_mutex_unlock(&cot_lock);
}

static CUresult reserve(struct gpu *gpu, uint32_t family, uint64_t bytes, uint64_t *reservation)
{
    *reservation = 0;
    struct cotenant_memory ask = {.family = family, .bytes = bytes};
    for (;;) {
        struct cotenant_message reply;
        wait_until_attached(gpu);
        if (cot_agent_call(COTENANT_MEMORY_RESERVE, slot_of(gpu), &ask, sizeof ask, &reply) == 0) {
            *reservation = reply.body.memory.reservation;
            return reply.header.status == COTENANT_OK       ? CUDA_SUCCESS
                   : reply.header.status == COTENANT_DENIED ? CUDA_ERROR_NOT_READY /* memory of a tenant that oversubscribes */
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

/* Requests permission to allocate.  Waits for a lost agent if configured so.  CUDA_ERROR_NOT_READY: granted, but other
 * tenants occupy the memory; swappable memory need not be resident yet. */
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
        if (!cot_swap_room_now(gpu, bytes, 0) && family != COTENANT_MEMORY_CONTEXT) { /* the driver decides this */
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
    struct cotenant_memory done = {.family = family, .reservation = reservation, .bytes = bytes};
    pthread_mutex_lock(&memory_lock);
    *(gpu ? &gpu->held[family] : &host_held) += bytes;
    bool stale = gpu ? gpu->stale : host_stale;
    pthread_mutex_unlock(&memory_lock);
    atomic_store(&unconfirmed, true);
    if (!stale)
        cot_agent_send(COTENANT_MEMORY_COMMIT, slot_of(gpu), &done, sizeof done);
}

void cot_memory_release(struct gpu *gpu, uint32_t family, uint64_t bytes)
{
    struct cotenant_memory back = {.family = family, .bytes = bytes};
    pthread_mutex_lock(&memory_lock);
    uint64_t *held = gpu ? &gpu->held[family] : &host_held;
    *held -= bytes < *held ? bytes : *held;
    bool stale = gpu ? gpu->stale : host_stale;
    pthread_mutex_unlock(&memory_lock);
    atomic_store(&unconfirmed, true);
    if (!stale)
        cot_agent_send(COTENANT_MEMORY_RELEASE, slot_of(gpu), &back, sizeof back);
}

void cot_memory_remember(uint64_t address, uint64_t bytes, struct gpu *gpu, uint32_t family)
{
    struct holding *holding = malloc(sizeof *holding);
    if (!holding)
        return; /* stays charged until the process ends, so that the charge is never too low */
    *holding = (struct holding){.address = address, .bytes = bytes, .gpu = gpu, .family = family};
    pthread_mutex_lock(&memory_lock);
    holding->next = *bucket(address);
    *bucket(address) = holding;
    pthread_mutex_unlock(&memory_lock);
}

/* The allocation at an address, removed from the accounts before the driver frees it, since another thread may get the
 * same address afterwards.  NULL: never charged. */
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

/* The driver freed the removed allocation: credit the GPU on which it was allocated.  If it refused, the allocation is
 * restored. */
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

/* The last context on the GPU is gone, with all its allocations. */
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

void cot_memory_report_state(struct gpu *gpu)
{
    for (uint32_t family = COTENANT_MEMORY_PLAIN; family <= COTENANT_MEMORY_CONTEXT; family++) {
        pthread_mutex_lock(&memory_lock);
        struct cotenant_memory state = {.family = family, .bytes = gpu->held[family]};
        pthread_mutex_unlock(&memory_lock);
        if (state.bytes || (family == COTENANT_MEMORY_CONTEXT && gpu->contexts > 0))
            cot_agent_send(COTENANT_MEMORY_STATE, gpu->slot, &state, sizeof state);
    }
}

void cot_memory_agent_lost(void)
{
    pthread_mutex_lock(&memory_lock);
    host_stale = true;
    pthread_mutex_unlock(&memory_lock);
}

/* Reports pinned host memory, which belongs to no GPU.  Changes during the report are reported again, as a total, so
 * nothing is counted twice. */
void cot_memory_report_host(void)
{
    for (bool told = false; !told;) {
        pthread_mutex_lock(&memory_lock);
        struct cotenant_memory state = {.family = COTENANT_MEMORY_HOST, .bytes = host_held};
        pthread_mutex_unlock(&memory_lock);
        told = cot_agent_send(COTENANT_MEMORY_STATE, COTENANT_NO_SLOT, &state, sizeof state) != 0; /* lost again */
        pthread_mutex_lock(&memory_lock);
        if (!told && state.bytes == host_held) {
            host_stale = false;
            told = true;
        }
        pthread_mutex_unlock(&memory_lock);
    }
}

/* The tenant's limit and charge, from the page.  False: no limit, use the driver's numbers. */
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
    return true;
}

uint64_t cot_memory_kept(struct gpu *gpu)
{
    return gpu && gpu->attached ? gpu->page_slot->memory_kept_bytes : 0;
}

void cot_memory_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&memory_lock, &fresh, sizeof fresh);
    memset(buckets, 0, sizeof buckets); /* the child must not release memory that its parent holds */
    host_held = 0;
    host_stale = false;
}
