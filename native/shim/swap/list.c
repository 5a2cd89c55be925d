/* The list of movable allocations. It finds regions by address or by GPU, and records where the contents of each
 * piece are (see swap.h). */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "swap/swap.h"

#define BUCKETS 4096

pthread_mutex_t cot_swap_lock = PTHREAD_MUTEX_INITIALIZER;
struct slab *cot_slabs[COTENANT_MAX_GPUS][SLAB_CLASSES];
/* hash table of all regions, by the first address of the region in units of SWAP_GRANULE */
static struct region *buckets[BUCKETS];
static _Atomic uint32_t region_count;

bool cot_swap_any(void)
{
    return atomic_load_explicit(&region_count, memory_order_relaxed) > 0;
}

static struct region **bucket(CUdeviceptr address)
{
    return &buckets[((address / SWAP_GRANULE) * UINT64_C(0x9e3779b97f4a7c15)) >> 52];
}

uint32_t cot_slab_class(uint64_t bytes)
{
    uint32_t class = 0;
    while ((uint64_t)SMALLEST_SLOT << class < bytes)
        class++;
    return class;
}

/* Adds the sizes of a region's pieces to the GPU's sums of resident and evicted memory, or subtracts them. The
 * caller holds cot_lock. */
static void account(struct region *region, bool in)
{
    struct swap_gpu *state = cot_swap_of(region->gpu);
    for (uint32_t i = 0; i < region->pieces; i++) {
        uint64_t *sum = region->stays                          ? &state->staying_bytes
                        : region->piece[i].state == PIECE_HERE ? &state->here_bytes
                                                               : &state->away_bytes;
        *sum += in ? cot_swap_piece_bytes(region, i) : -cot_swap_piece_bytes(region, i);
    }
}

void cot_swap_publish(struct region *region)
{
    pthread_mutex_lock(&cot_swap_lock);
    account(region, true);
    region->next = *bucket(region->address);
    *bucket(region->address) = region;
    region_count++;
    pthread_mutex_unlock(&cot_swap_lock);
}

/* ---- finding ---- */

/* Finds the region that contains the address. The caller holds cot_swap_lock, which protects the list. */
static struct region *find(CUdeviceptr address)
{
    struct region *exact = *bucket(address);
    while (exact && address - exact->address >= exact->bytes)
        exact = exact->next;
    for (uint32_t i = 0; !exact && i < BUCKETS; i++)
        for (struct region *region = buckets[i]; region && !exact; region = region->next)
            if (address - region->address < region->bytes)
                exact = region;
    return exact;
}

/* Finds the region of the allocation that starts at the address; for a small allocation, this is the slab that contains
 * the allocation. */
struct region *cot_swap_find_start(CUdeviceptr address)
{
    struct region *region = region_count ? *bucket(address) : NULL;
    while (region && address / SWAP_GRANULE != region->address / SWAP_GRANULE)
        region = region->next;
    return region;
}

/* the caller holds cot_lock and cot_swap_lock, which protect the list of regions and its sums */
void cot_swap_unlink(struct region *region)
{
    for (struct region **link = bucket(region->address); *link; link = &(*link)->next)
        if (*link == region) {
            *link = region->next;
            break;
        }
    region_count--;
    account(region, false);
    if (region->slab)
        for (struct slab **link = &cot_slabs[region->gpu - cot_gpu_at(0)][cot_slab_class(region->slab->slot_bytes)]; *link;
             link = &(*link)->next)
            if (*link == region->slab) {
                *link = region->slab->next;
                break;
            }
}

/* Finds any one allocation on a GPU that was made in `context`; if that is NULL, in any context. The caller holds
 * cot_swap_lock. */
struct region *cot_swap_find_of(const struct gpu *gpu, CUcontext context)
{
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct region *region = buckets[i]; region; region = region->next)
            if (region->gpu == gpu && (!context || region->context == context))
                return region;
    return NULL;
}

bool cot_swap_extent(CUdeviceptr address, CUdeviceptr *base, size_t *bytes)
{
    if (!cot_swap_any())
        return false;
    pthread_mutex_lock(&cot_swap_lock);
    struct region *region = find(address);
    if (region && region->slab) {
        uint64_t index = (address - region->address) / region->slab->slot_bytes;
        *base = region->address + index * region->slab->slot_bytes;
        *bytes = region->slab->asked[index];
    } else if (region) {
        *base = region->address;
        *bytes = region->asked_bytes;
    }
    pthread_mutex_unlock(&cot_swap_lock);
    return region != NULL;
}

bool cot_swap_is_managed(CUdeviceptr address)
{
    pthread_mutex_lock(&cot_swap_lock);
    const struct region *region = find(address);
    bool managed = region && region->managed;
    pthread_mutex_unlock(&cot_swap_lock);
    return managed;
}

/* Finds the region of an address and the allocation in it, and makes the region stay on the GPU from now on. Returns
 * NULL if the region is not on the GPU now. */
struct region *cot_swap_keep(CUdeviceptr address, CUdeviceptr *base, size_t *bytes)
{
    if (!cot_swap_extent(address, base, bytes) || !*bytes)
        return NULL;
    pthread_mutex_lock(&cot_lock);
    pthread_mutex_lock(&cot_swap_lock);
    struct region *region = find(address);
    bool here = region && !cot_swap_of(region->gpu)->moving;
    for (uint32_t i = 0; here && i < region->pieces; i++)
        here = region->piece[i].state == PIECE_HERE;
    if (here && !region->stays) {
        account(region, false);
        region->stays = true;
        account(region, true);
    }
    pthread_mutex_unlock(&cot_swap_lock);
    pthread_mutex_unlock(&cot_lock);
    return here ? region : NULL;
}

/* ---- functions for the mover thread ---- */

static int larger_first(const void *a, const void *b)
{
    uint64_t left = (*(struct region *const *)a)->bytes, right = (*(struct region *const *)b)->bytes;
    return left < right ? 1 : left > right ? -1 : 0;
}

struct region **cot_swap_snapshot(const struct gpu *gpu, uint32_t *count)
{
    *count = 0;
    pthread_mutex_lock(&cot_swap_lock);
    struct region **list = malloc((region_count + 1) * sizeof *list);
    for (uint32_t i = 0; list && i < BUCKETS; i++)
        for (struct region *region = buckets[i]; region; region = region->next)
            if (region->gpu == gpu && !region->stays)
                list[(*count)++] = region;
    pthread_mutex_unlock(&cot_swap_lock);
    if (list)
        qsort(list, *count, sizeof *list, larger_first);
    return list;
}

void cot_swap_backing_range(uint64_t *low, uint64_t *high)
{
    *low = *high = 0;
    pthread_mutex_lock(&cot_swap_lock);
    for (uint32_t b = 0; b < BUCKETS; b++)
        for (struct region *region = buckets[b]; region; region = region->next)
            for (uint32_t i = 0; i < region->pieces && !region->managed; i++) {
                if (region->piece[i].state != PIECE_AWAY)
                    continue;
                uint64_t begin = region->piece[i].backing, end = begin + cot_swap_piece_bytes(region, i);
                if (*low == *high || begin < *low)
                    *low = begin;
                if (end > *high)
                    *high = end;
            }
    pthread_mutex_unlock(&cot_swap_lock);
}

void cot_swap_list_reset(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&cot_swap_lock, &fresh, sizeof fresh);
    /* the child of a fork must not keep device memory in use that its parent frees */
    for (uint32_t b = 0; b < BUCKETS; b++)
        for (struct region *region = buckets[b]; region; region = region->next)
            for (uint32_t i = 0; i < region->pieces; i++) {
                int memory = cot_hand_part_with(&region->piece[i]);
                if (memory >= 0)
                    close(memory);
            }
    /* the allocations belong to the parent process: the child of a fork has no CUDA context */
    memset(buckets, 0, sizeof buckets);
    memset(cot_slabs, 0, sizeof cot_slabs);
    region_count = 0;
}
