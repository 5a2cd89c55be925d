/* Wrappers of virtual memory management. The tenant is charged for a handle on a device from the handle's creation
 * until its last reference and its last mapping are gone. */
#include <stdlib.h>

#include "shim.h"
#include "swap/swap.h"

#define BUCKETS 1024

struct handle {
    uint64_t value;
    uint64_t bytes;
    struct gpu *gpu;
    uint32_t references;
    uint32_t mappings;
    struct handle *next;
};

struct mapping {
    uint64_t address;
    uint64_t bytes;
    struct handle *handle;
    struct mapping *next;
};

static pthread_mutex_t vmm_lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle *handles[BUCKETS];
static struct mapping *mappings;

static struct handle **handle_bucket(uint64_t value)
{
    return &handles[(value * UINT64_C(0x9e3779b97f4a7c15)) >> 54];
}

static struct handle *find(uint64_t value)
{
    struct handle *handle = *handle_bucket(value);
    while (handle && handle->value != value)
        handle = handle->next;
    return handle;
}

static void put_in(struct handle *handle)
{
    handle->next = *handle_bucket(handle->value);
    *handle_bucket(handle->value) = handle;
}

/* Removes the handle from the table if it has no references and no mappings left. The caller then reduces the charge
 * and frees the record, without holding the lock. */
static struct handle *take_if_dead(struct handle *handle)
{
    if (!handle || handle->references || handle->mappings)
        return NULL;
    struct handle **link = handle_bucket(handle->value);
    while (*link != handle)
        link = &(*link)->next;
    *link = handle->next;
    return handle;
}

static void credit(struct handle *dead)
{
    if (dead)
        cot_memory_release(dead->gpu, COTENANT_MEMORY_VMM, dead->bytes);
    free(dead);
}

EXPORT CUresult cuMemCreate(uint64_t *out, size_t bytes, const struct cu_allocation_prop *prop, uint64_t flags)
{
    CUresult (*call)(uint64_t *, size_t, const struct cu_allocation_prop *, uint64_t) =
        REAL(cuMemCreate);
    bool on_device = prop && prop->location.type == CU_LOCATION_DEVICE;
    struct gpu *gpu = on_device ? cot_gpu_of_device(prop->location.id, true) : NULL;
    if (on_device && !gpu && cot_gpu_is_denied(prop->location.id))
        return CUDA_ERROR_NOT_PERMITTED;
    if (!gpu)
        /* the handle is for host memory, or the driver itself returns the error */
        return call(out, bytes, prop, flags);
    uint64_t reservation;
    CUresult result = cot_memory_reserve(gpu, COTENANT_MEMORY_VMM, bytes, &reservation);
    if (result != CUDA_SUCCESS)
        return result;
    result = call(out, bytes, prop, flags);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && cot_memory_make_room(gpu, bytes))
        result = call(out, bytes, prop, flags);
    cot_memory_commit(gpu, COTENANT_MEMORY_VMM, reservation, result == CUDA_SUCCESS ? bytes : 0);
    struct handle *handle = result == CUDA_SUCCESS ? malloc(sizeof *handle) : NULL;
    if (handle) {
        *handle = (struct handle){.value = *out, .bytes = bytes, .gpu = gpu, .references = 1};
        pthread_mutex_lock(&vmm_lock);
        put_in(handle);
        pthread_mutex_unlock(&vmm_lock);
    }
    return result;
}

EXPORT CUresult cuMemRelease(uint64_t value)
{
    /* the reference is subtracted before the driver call, because another thread may get the same handle value after
     * the call */
    pthread_mutex_lock(&vmm_lock);
    struct handle *handle = find(value);
    bool counted = handle && handle->references;
    if (counted)
        handle->references--;
    struct handle *dead = counted ? take_if_dead(handle) : NULL;
    pthread_mutex_unlock(&vmm_lock);
    CUresult result = REAL(cuMemRelease)(value);
    if (result == CUDA_SUCCESS) {
        credit(dead);
        return result;
    }
    pthread_mutex_lock(&vmm_lock);
    if (counted)
        handle->references++;
    if (dead)
        put_in(dead);
    pthread_mutex_unlock(&vmm_lock);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, uint64_t value, uint64_t flags)
{
    CUresult result = REAL(cuMemMap)(address, bytes, offset,
                                                                                                    value, flags);
    struct mapping *mapping = result == CUDA_SUCCESS ? malloc(sizeof *mapping) : NULL;
    if (!mapping)
        return result;
    pthread_mutex_lock(&vmm_lock);
    struct handle *handle = find(value);
    if (handle) {
        handle->mappings++;
        *mapping = (struct mapping){.address = address, .bytes = bytes, .handle = handle, .next = mappings};
        mappings = mapping;
        mapping = NULL;
    }
    pthread_mutex_unlock(&vmm_lock);
    free(mapping);
    return result;
}

static struct mapping *take_mappings(CUdeviceptr address, size_t bytes)
{
    struct mapping *taken = NULL;
    pthread_mutex_lock(&vmm_lock);
    for (struct mapping **link = &mappings; *link;) {
        struct mapping *mapping = *link;
        if (mapping->address < address || mapping->address + mapping->bytes > address + bytes) {
            link = &mapping->next;
            continue;
        }
        *link = mapping->next;
        mapping->next = taken;
        taken = mapping;
    }
    pthread_mutex_unlock(&vmm_lock);
    return taken;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    /* the mappings are removed before the driver call, because another thread may get the same addresses after the
     * call */
    struct mapping *taken = take_mappings(address, bytes);
    CUresult result = REAL(cuMemUnmap)(address, bytes);
    while (taken) {
        struct mapping *mapping = taken;
        struct handle *dead = NULL;
        taken = mapping->next;
        pthread_mutex_lock(&vmm_lock);
        if (result == CUDA_SUCCESS) {
            mapping->handle->mappings--;
            dead = take_if_dead(mapping->handle);
        } else {
            mapping->next = mappings;
            mappings = mapping;
        }
        pthread_mutex_unlock(&vmm_lock);
        credit(dead);
        if (result == CUDA_SUCCESS)
            free(mapping);
    }
    return result;
}

EXPORT CUresult cuMemRetainAllocationHandle(uint64_t *out, void *address)
{
    cot_swap_fix_around((CUdeviceptr)(uintptr_t)address, "the program takes the memory behind an allocation (cuMemRetainAllocationHandle)");
    CUresult result = REAL(cuMemRetainAllocationHandle)(out, address);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&vmm_lock);
    struct handle *handle = find(*out);
    if (handle)
        handle->references++;
    pthread_mutex_unlock(&vmm_lock);
    return result;
}
