/* Movable allocations (regions): each one is a reserved range of addresses, to which pieces of device memory are
 * mapped.
 *
 * Small allocations share a region of one piece, a *slab* of slots of equal size, since each region takes a multiple of
 * SWAP_GRANULE. So the memory of a program with thousands of small allocations is little more than their sum. A slab is
 * moved as a whole. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "swap/swap.h"

#define CU_ACCESS_READ_WRITE 3
#define CU_ALLOCATION_PINNED 1


static uint64_t round_up(uint64_t bytes)
{
    return (bytes + SWAP_GRANULE - 1) / SWAP_GRANULE * SWAP_GRANULE;
}

/* ---- pieces ---- */

uint64_t cot_swap_piece_bytes(const struct region *region, uint32_t index)
{
    if (region->managed)
        return region->bytes;
    uint64_t begin = (uint64_t)index * region->piece_bytes;
    return region->bytes - begin < region->piece_bytes ? region->bytes - begin : region->piece_bytes;
}

CUdeviceptr cot_swap_piece_address(const struct region *region, uint32_t index)
{
    return region->address + (uint64_t)index * region->piece_bytes;
}

/* Maps memory at an address of the program. It releases the handle at once, since the mapping alone keeps the memory
 * in use. */
CUresult cot_swap_map(CUdeviceptr address, uint64_t bytes, uint64_t handle, CUdevice device)
{
    struct cu_access access = {{CU_LOCATION_DEVICE, device}, CU_ACCESS_READ_WRITE};
    CUresult result = REAL(cuMemMap)(address, bytes, 0, handle, 0);
    REAL(cuMemRelease)(handle);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuMemSetAccess)(address, bytes, &access, 1);
    if (result != CUDA_SUCCESS)
        REAL(cuMemUnmap)(address, bytes);
    return result;
}

CUresult cot_swap_place_piece(struct region *region, uint32_t index, uint64_t handle)
{
    return cot_swap_map(cot_swap_piece_address(region, index), cot_swap_piece_bytes(region, index), handle,
                        region->gpu->device);
}

/* Maps new memory for a piece. If the driver supports it, the memory is of a kind that can later be passed to
 * another process (swap/hand.c, swap/share.c). */
CUresult cot_swap_map_piece(struct region *region, uint32_t index)
{
    static _Atomic bool cannot_share;
    uint64_t bytes = cot_swap_piece_bytes(region, index), handle;
    bool shared = !atomic_load(&cannot_share);
    struct cu_allocation_prop prop = {.type = CU_ALLOCATION_PINNED,
                                      .handle_types = shared ? SWAP_SHARED_AS_DESCRIPTOR : 0,
                                      .location = {CU_LOCATION_DEVICE, region->gpu->device}};
    CUresult (*create)(uint64_t *, size_t, const struct cu_allocation_prop *, uint64_t) =
        REAL(cuMemCreate);
    CUresult result = create(&handle, bytes, &prop, 0);
    /* the driver does not support memory that can be passed on, so ordinary memory is used */
    if (shared && result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY) {
        atomic_store(&cannot_share, true);
        prop.handle_types = 0;
        result = create(&handle, bytes, &prop, 0);
    }
    return result == CUDA_SUCCESS ? cot_swap_place_piece(region, index, handle) : result;
}

CUresult cot_swap_unmap_piece(struct region *region, uint32_t index)
{
    int memory = cot_hand_part_with(&region->piece[index]);
    if (memory >= 0)
        close(memory);
    return REAL(cuMemUnmap)(cot_swap_piece_address(region, index),
                                                                cot_swap_piece_bytes(region, index));
}

/* ---- regions ---- */

static void destroy(struct region *region) /* the caller has removed the region from the list of allocations */
{
    if (region->shared)
        cot_share_end(region);
    if (region->managed)
        REAL(cuMemFree_v2)(region->address);
    else {
        for (uint32_t i = 0; i < region->pieces; i++)
            if (region->piece[i].state == PIECE_HERE)
                cot_swap_unmap_piece(region, i);
        REAL(cuMemAddressFree)(region->address, region->bytes);
    }
    free(region->slab);
    free(region);
}

static struct region *new_region(struct gpu *gpu, uint64_t asked)
{
    bool managed = cot_swap_mode() == COTENANT_OVERSUBSCRIBE_MANAGED;
    uint64_t bytes = round_up(asked), piece_bytes = cot_swap_piece();
    uint32_t pieces = managed ? 1 : (uint32_t)((bytes + piece_bytes - 1) / piece_bytes);
    struct region *region = calloc(1, sizeof *region + pieces * sizeof region->piece[0]);
    if (!region)
        return NULL;
    region->bytes = bytes;
    region->asked_bytes = asked;
    region->gpu = gpu;
    region->context = cot_thread->context;
    region->managed = managed;
    region->piece_bytes = piece_bytes;
    region->pieces = pieces;
    CUresult result =
        managed ? REAL(cuMemAllocManaged)(&region->address, bytes, 1)
                : REAL(cuMemAddressReserve)(&region->address, bytes, SWAP_GRANULE, 0, 0);
    if (result == CUDA_SUCCESS)
        return region;
    free(region);
    return NULL;
}

/* Adds a region without memory to the list if its process has no turn: the region gets its memory when the process's
 * other contents are restored, before the next launch. If only_if_away is set, the region is added only if other memory
 * of the process is evicted. */
static bool publish_empty(struct region *region, bool only_if_away)
{
    struct gpu *gpu = region->gpu;
    pthread_mutex_lock(&cot_lock);
    bool away = cot_swap_is_away(gpu);
    /* if the turn is ending, the calls that passed the gate do not use the new region */
    bool done = away || (gpu->state != GATE_OPEN && !only_if_away);
    if (done)
        cot_swap_publish(region);
    pthread_mutex_unlock(&cot_lock);
    if (done)
        cot_swap_report_state(gpu);
    return done;
}

/* Maps memory for all pieces of a new region. If the GPU is full, asks the agent to evict other tenants' memory. Sets
 * *empty if the region was added to the list without memory. */
static CUresult fill(struct region *region, bool crowded, bool *empty)
{
    *empty = false;
    if (region->managed) {
        region->piece[0].state = PIECE_HERE;
        return CUDA_SUCCESS;
    }
    if (publish_empty(region, true)) {
        *empty = true;
        return CUDA_SUCCESS;
    }
    for (uint32_t i = 0, tries = 0; i < region->pieces;) {
        CUresult result = crowded ? CUDA_ERROR_OUT_OF_MEMORY : cot_swap_map_piece(region, i);
        crowded = false;
        if (result == CUDA_SUCCESS) {
            region->piece[i++].state = PIECE_HERE;
            continue;
        }
        bool later = false;
        if (result != CUDA_ERROR_OUT_OF_MEMORY)
            return result;
        if (cot_swap_make_room(region->gpu, region->bytes - (uint64_t)i * region->piece_bytes, &later) && tries++ < 8)
            continue;
        for (uint32_t back = 0; back < i; back++) {
            cot_swap_unmap_piece(region, back);
            region->piece[back].state = PIECE_EMPTY;
        }
        if (later && tries++ < 64) {
            if (publish_empty(region, false)) {
                *empty = true;
                return CUDA_SUCCESS;
            }
            i = 0; /* a turn has begun in the meantime, so the agent can evict other tenants' memory now */
            continue;
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

static CUresult make_region(struct gpu *gpu, uint64_t asked, struct region **out, struct slab *slab)
{
    uint64_t reservation, bytes = round_up(asked);
    CUresult result = cot_memory_reserve(gpu, COTENANT_MEMORY_PLAIN, bytes, &reservation);
    /* the agent allows the allocation, but other tenants occupy the memory now */
    bool crowded = result == CUDA_ERROR_NOT_READY, empty = false;
    if (result != CUDA_SUCCESS && !crowded)
        return result;
    struct region *region = new_region(gpu, asked);
    if (region) {
        region->slab = slab;
        if (slab)
            slab->region = region;
    }
    result = region ? fill(region, crowded, &empty) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS && !empty) { /* first, since the agent may order to evict memory as soon as it is charged */
        pthread_mutex_lock(&cot_lock);
        cot_swap_publish(region);
        pthread_mutex_unlock(&cot_lock);
    }
    cot_memory_commit(gpu, COTENANT_MEMORY_PLAIN, reservation, result == CUDA_SUCCESS ? bytes : 0);
    if (result != CUDA_SUCCESS) {
        if (region) {
            region->slab = NULL;
            destroy(region);
        }
        return result;
    }
    *out = region;
    return CUDA_SUCCESS;
}

/* ---- small allocations ---- */

static bool take_slot(struct slab *slab, uint64_t bytes, CUdeviceptr *out)
{
    for (uint32_t i = 0; i < slab->slots && slab->used < slab->slots; i++)
        if (slab->asked[i] == 0) {
            slab->asked[i] = (uint32_t)bytes;
            slab->used++;
            *out = slab->region->address + (uint64_t)i * slab->slot_bytes;
            return true;
        }
    return false;
}

static CUresult allocate_small(struct gpu *gpu, CUdeviceptr *out, uint64_t bytes)
{
    uint32_t class = cot_slab_class(bytes);
    struct slab **list = &cot_slabs[gpu - cot_gpu_at(0)][class];
    pthread_mutex_lock(&cot_swap_lock);
    for (struct slab *slab = *list; slab; slab = slab->next)
        if (slab->region->context == cot_thread->context && take_slot(slab, bytes, out)) {
            pthread_mutex_unlock(&cot_swap_lock);
            return CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&cot_swap_lock);
    struct slab *slab = calloc(1, sizeof *slab);
    if (!slab)
        return CUDA_ERROR_OUT_OF_MEMORY;
    slab->slot_bytes = SMALLEST_SLOT << class;
    slab->slots = (uint32_t)(SWAP_GRANULE / slab->slot_bytes);
    struct region *region;
    CUresult result = make_region(gpu, SWAP_GRANULE, &region, slab);
    if (result != CUDA_SUCCESS) {
        free(slab);
        return result;
    }
    pthread_mutex_lock(&cot_swap_lock);
    take_slot(slab, bytes, out);
    slab->next = *list;
    *list = slab;
    pthread_mutex_unlock(&cot_swap_lock);
    return CUDA_SUCCESS;
}

CUresult cot_swap_allocate(struct gpu *gpu, CUdeviceptr *out, uint64_t bytes)
{
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes >= UINT64_C(1) << 62)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (bytes <= LARGEST_SLOT && cot_swap_mode() == COTENANT_OVERSUBSCRIBE_SWAP)
        return allocate_small(gpu, out, bytes);
    struct region *region;
    CUresult result = make_region(gpu, bytes, &region, NULL);
    if (result == CUDA_SUCCESS)
        *out = region->address;
    return result;
}

/* Frees a slot of a slab. Returns true if the slab is now empty and another slab with slots of this size has space,
 * so that this slab can be removed. */
static bool free_slot(struct slab *slab, uint32_t index)
{
    slab->asked[index] = 0;
    slab->used--;
    if (slab->used > 0)
        return false;
    for (struct slab *other = cot_slabs[slab->region->gpu - cot_gpu_at(0)][cot_slab_class(slab->slot_bytes)]; other; other = other->next)
        if (other != slab && other->used < other->slots)
            return true;
    return false;
}

/* Waits for enqueued work that may still use the memory, as the driver's own free does. */
static CUresult wait_for_queued(const struct gpu *gpu)
{
    pthread_mutex_lock(&cot_lock);
    bool ended = cot_swap_is_away(gpu) && (gpu->state == GATE_CLOSED || gpu->state == GATE_REQUESTED);
    pthread_mutex_unlock(&cot_lock);
    return ended ? CUDA_SUCCESS : REAL(cuCtxSynchronize)();
}

/* Finds the region of the allocation that begins at an address, and, if that region is a slab, the index of the
 * allocation's slot; NULL: there is no such allocation. The caller holds cot_swap_lock. */
static struct region *allocated_at(CUdeviceptr address, uint32_t *index)
{
    struct region *region = cot_swap_find_start(address);
    *index = 0;
    if (!region || !region->slab)
        return region && address == region->address ? region : NULL;
    const struct slab *slab = region->slab;
    *index = (uint32_t)((address - region->address) / slab->slot_bytes);
    return (address - region->address) % slab->slot_bytes == 0 && slab->asked[*index] ? region : NULL;
}

/* Waits until no contents are being moved. Returns false if the process is ending, since the thread that moves them
 * ends with the process. The caller holds cot_lock. */
static bool nothing_moves(const struct gpu *gpu)
{
    while (cot_swap_of(gpu)->moving && !cot_exiting())
        pthread_cond_wait(&cot_changed, &cot_lock);
    return !cot_swap_of(gpu)->moving;
}

bool cot_swap_free(CUdeviceptr address, CUresult *result)
{
    if (!cot_swap_any())
        return false;
    uint32_t index;
    pthread_mutex_lock(&cot_swap_lock);
    struct region *region = allocated_at(address, &index);
    struct gpu *gpu = region ? region->gpu : NULL;
    pthread_mutex_unlock(&cot_swap_lock);
    if (!region)
        return false;
    *result = wait_for_queued(gpu);
    pthread_mutex_lock(&cot_lock);
    if (!nothing_moves(gpu)) {
        pthread_mutex_unlock(&cot_lock);
        return true;
    }
    pthread_mutex_lock(&cot_swap_lock);
    /* another thread may have freed the memory while this thread waited */
    region = allocated_at(address, &index);
    bool gone = region && (!region->slab || free_slot(region->slab, index));
    bool was_away = cot_swap_of(gpu)->away_bytes > 0;
    if (gone)
        cot_swap_unlink(region);
    pthread_mutex_unlock(&cot_swap_lock);
    pthread_mutex_unlock(&cot_lock);
    if (!region)
        *result = CUDA_ERROR_INVALID_VALUE;
    if (!gone)
        return true;
    if (was_away)
        cot_swap_report_state(gpu);
    cot_memory_release(gpu, COTENANT_MEMORY_PLAIN, region->bytes);
    destroy(region);
    return true;
}

/* Frees all allocations that were made in a context; if `context` is NULL, all allocations on that GPU. */
void cot_swap_forget_context(struct gpu *gpu, CUcontext context)
{
    struct region *doomed = NULL, *region;
    pthread_mutex_lock(&cot_lock);
    if (!nothing_moves(gpu)) {
        pthread_mutex_unlock(&cot_lock);
        return;
    }
    pthread_mutex_lock(&cot_swap_lock);
    while ((region = cot_swap_find_of(gpu, context))) {
        cot_swap_unlink(region);
        region->next = doomed;
        doomed = region;
    }
    pthread_mutex_unlock(&cot_swap_lock);
    pthread_mutex_unlock(&cot_lock);
    while ((region = doomed)) {
        doomed = region->next;
        cot_memory_release(gpu, COTENANT_MEMORY_PLAIN, region->bytes);
        destroy(region);
    }
}

