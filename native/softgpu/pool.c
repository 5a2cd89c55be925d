/* Stream-ordered pools. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softgpu.h"
#include "visible.h"

struct soft_pool {
    enum soft_kind kind;
    int device;
    uint64_t used, reserved, threshold;
    struct soft_pool *next;
};

struct pool_block {
    uint64_t address, bytes;
    struct soft_pool *pool; /* the memory pool; NULL: the memory belongs to a node of a graph */
    struct pool_block *next;
};

static struct soft_pool *pools;
static struct soft_pool *defaults[SOFT_MAX_DEVICES];
static struct pool_block *pool_blocks;

static struct soft_pool *make_pool(int device) /* the caller holds soft_lock, which protects the process's objects */
{
    struct soft_pool *pool = calloc(1, sizeof *pool);
    pool->kind = SOFT_POOL;
    pool->device = device;
    pool->next = pools;
    pools = pool;
    return pool;
}

static struct soft_pool *default_pool(int device)
{
    pthread_mutex_lock(&soft_lock);
    if (!defaults[device])
        defaults[device] = make_pool(device);
    struct soft_pool *pool = defaults[device];
    pthread_mutex_unlock(&soft_lock);
    return pool;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(struct soft_pool **out, CUdevice ordinal)
{
    CHECK_READY();
    int device = soft_device_at(ordinal);
    if (device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = default_pool(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(struct soft_pool **out, CUdevice device)
{
    return cuDeviceGetDefaultMemPool(out, device);
}

EXPORT CUresult cuMemPoolCreate(struct soft_pool **out, const struct cu_pool_prop *prop)
{
    CHECK_READY();
    bool on_device = prop->location.type == CU_LOCATION_DEVICE;
    int device = on_device ? soft_device_at(prop->location.id) : -1;
    if (on_device && device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&soft_lock);
    *out = make_pool(device); /* device -1 stands for a pool of host memory */
    pthread_mutex_unlock(&soft_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolDestroy(struct soft_pool *pool)
{
    if (!pool || pool->kind != SOFT_POOL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&soft_lock);
    if (pool->device >= 0)
        soft_give_memory(pool->device, pool->reserved);
    pool->reserved = 0;
    pool->kind = 0;
    pthread_mutex_unlock(&soft_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAttribute(struct soft_pool *pool, int attribute, uint64_t *value)
{
    if (!pool || pool->kind != SOFT_POOL)
        return CUDA_ERROR_INVALID_HANDLE;
    *value = attribute == 4 ? pool->threshold : attribute == CU_POOL_USED_CURRENT ? pool->used : pool->reserved;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(struct soft_pool *pool, int attribute, const uint64_t *value)
{
    if (!pool || pool->kind != SOFT_POOL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == 4)
        pool->threshold = *value;
    return CUDA_SUCCESS;
}

static uint64_t granules(uint64_t bytes)
{
    return (bytes + SOFT_POOL_GRANULE - 1) / SOFT_POOL_GRANULE * SOFT_POOL_GRANULE;
}

/* the caller holds soft_lock, which protects the process's objects */
static void trim(struct soft_pool *pool, uint64_t keep)
{
    uint64_t least = granules(pool->used > keep ? pool->used : keep);
    if (pool->reserved > least) {
        if (pool->device >= 0)
            soft_give_memory(pool->device, pool->reserved - least);
        pool->reserved = least;
    }
}

void soft_pools_trim(int device)
{
    pthread_mutex_lock(&soft_lock);
    for (struct soft_pool *pool = pools; pool; pool = pool->next)
        if (pool->kind == SOFT_POOL && pool->device == device)
            trim(pool, pool->threshold);
    pthread_mutex_unlock(&soft_lock);
}

EXPORT CUresult cuMemPoolTrimTo(struct soft_pool *pool, size_t keep)
{
    if (!pool || pool->kind != SOFT_POOL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&soft_lock);
    trim(pool, keep);
    pthread_mutex_unlock(&soft_lock);
    return CUDA_SUCCESS;
}

/* the caller holds soft_lock, which protects the process's objects */
static CUresult grow(struct soft_pool *pool, uint64_t bytes)
{
    uint64_t wanted = granules(pool->used + bytes);
    if (wanted > pool->reserved) {
        if (pool->device >= 0 && !soft_take_memory(pool->device, wanted - pool->reserved))
            return CUDA_ERROR_OUT_OF_MEMORY;
        pool->reserved = wanted;
    }
    pool->used += bytes;
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, struct soft_pool *pool, struct soft_stream *stream)
{
    if (!stream || !bytes)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    bool captured = stream->capture != CU_CAPTURE_NONE;
    if (captured)
        soft_add_node(stream, (struct soft_node){.allocates = granules(bytes)});
    else if (!pool)
        pool = default_pool(stream->context->device);
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct pool_block *block = malloc(sizeof *block);
    pthread_mutex_lock(&soft_lock);
    CUresult result = address == MAP_FAILED || !block ? CUDA_ERROR_OUT_OF_MEMORY : captured ? CUDA_SUCCESS : grow(pool, bytes);
    if (result == CUDA_SUCCESS) {
        *block = (struct pool_block){(uint64_t)(uintptr_t)address, bytes, captured ? NULL : pool, pool_blocks};
        pool_blocks = block;
        *out = block->address;
    }
    pthread_mutex_unlock(&soft_lock);
    if (result != CUDA_SUCCESS) {
        if (address != MAP_FAILED)
            munmap(address, bytes);
        free(block);
    }
    return result;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    return allocate(out, bytes, NULL, soft_stream_of(stream, false));
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    return allocate(out, bytes, NULL, soft_stream_of(stream, true));
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, struct soft_pool *pool, CUstream stream)
{
    return pool && pool->kind == SOFT_POOL ? allocate(out, bytes, pool, soft_stream_of(stream, false))
                                           : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    (void)stream;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&soft_lock);
    for (struct pool_block **link = &pool_blocks; *link; link = &(*link)->next)
        if ((*link)->address == address) {
            struct pool_block *block = *link;
            *link = block->next;
            if (block->pool)
                block->pool->used -= block->bytes;
            munmap((void *)(uintptr_t)block->address, block->bytes);
            free(block);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&soft_lock);
    return result;
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    return cuMemFreeAsync(address, stream);
}

bool soft_is_pooled(uint64_t address)
{
    for (struct pool_block *block = pool_blocks; block; block = block->next)
        if (address - block->address < block->bytes)
            return true;
    return false;
}
