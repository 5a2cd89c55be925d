/* Plain, managed, pitched, array and pinned memory, and memsets. Device memory is a mapping of ordinary host memory, so
 * a program can copy back what it wrote. The mapping takes memory of the host only for the pages that are used. Copies
 * are in copies.c. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "limits.h"
#include "softgpu.h"

struct block {
    uint64_t address, bytes;
    int device;
    bool on_device; /* false only for managed memory while its pages are in host memory */
    struct block *next;
};

struct soft_array {
    enum soft_kind kind;
    uint64_t bytes;
    int device;
};

static struct block *blocks, *pinned_blocks; /* protected by soft_lock */

static void *map(uint64_t bytes)
{
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, bool on_device)
{
    CHECK_CONTEXT();
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult forbidden = soft_unsafe_call();
    if (forbidden != CUDA_SUCCESS)
        return forbidden;
    if (on_device && !soft_take_memory(context->device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *address = map(bytes);
    struct block *block = address ? malloc(sizeof *block) : NULL;
    if (!block) {
        if (on_device)
            soft_give_memory(context->device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&soft_lock);
    *block = (struct block){(uint64_t)(uintptr_t)address, bytes, context->device, on_device, blocks};
    blocks = block;
    pthread_mutex_unlock(&soft_lock);
    *out = block->address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    return allocate(out, bytes, true);
}

/* Allocates managed memory. Its pages are in host memory at first, and later wherever they were last prefetched to. */
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    (void)flags;
    CUresult result = allocate(out, bytes, false);
    if (result == CUDA_SUCCESS)
        soft_note_managed();
    return result;
}

/* Prefetches managed memory: charges the memory to the device, and takes the time that the link needs; the contents
 * themselves need not move. If the device is full, the pages stay in host memory. */
static CUresult prefetch(CUdeviceptr address, size_t bytes, CUdevice where, struct soft_stream *stream)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&soft_lock);
    for (struct block *block = blocks; block; block = block->next)
        if (block->address == address && block->bytes <= bytes) {
            if (where < 0 && block->on_device)
                soft_give_memory(block->device, block->bytes);
            block->on_device = where >= 0 && (block->on_device || soft_take_memory(block->device, block->bytes));
        }
    pthread_mutex_unlock(&soft_lock);
    uint64_t rate = where < 0 ? SOFT_TO_HOST_BYTES_PER_US : SOFT_TO_DEVICE_BYTES_PER_US;
    return soft_enqueue(stream, soft_plain(bytes * 1000 / rate), false);
}

EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice where, CUstream stream)
{
    return prefetch(address, bytes, where, soft_stream_of(stream, false));
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    (void)element;
    *pitch = (width + 511) & ~(size_t)511;
    return cuMemAlloc_v2(out, *pitch * height);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    CHECK_READY();
    if (!address)
        return CUDA_SUCCESS;
    struct block *found = NULL;
    pthread_mutex_lock(&soft_lock);
    for (struct block **link = &blocks; *link; link = &(*link)->next)
        if ((*link)->address == address) {
            found = *link;
            *link = found->next;
            break;
        }
    pthread_mutex_unlock(&soft_lock);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)(uintptr_t)found->address, found->bytes);
    if (found->on_device)
        soft_give_memory(found->device, found->bytes);
    free(found);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    CHECK_CONTEXT();
    uint64_t used = soft_used_memory(context->device), total = soft_state()->memory_bytes;
    uint64_t left = used < total ? total - used : 0;
    soft_limit_view(context->device, &left, &total);
    left = left < soft_mps_left(context->device) ? left : soft_mps_left(context->device);
    if (free_bytes)
        *free_bytes = left;
    if (total_bytes)
        *total_bytes = total;
    return CUDA_SUCCESS;
}

/* ---- arrays: they have no contents ---- */

static CUresult make_array(struct soft_array **out, uint64_t elements, uint32_t format, uint32_t channels)
{
    CHECK_CONTEXT();
    uint64_t bytes = elements * channels * ((format & 7) == 1 || format == 8 ? 1 : (format & 3) == 3 || format == 0x0a || format == 0x20 ? 4 : 2);
    if (!soft_take_memory(context->device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct soft_array *array = calloc(1, sizeof *array);
    *array = (struct soft_array){SOFT_ARRAY, bytes, context->device};
    *out = array;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayCreate_v2(struct soft_array **out, const struct cu_array_descriptor *d)
{
    return make_array(out, d->width * (d->height ? d->height : 1), d->format, d->channels);
}

EXPORT CUresult cuArray3DCreate_v2(struct soft_array **out, const struct cu_array3d_descriptor *d)
{
    return make_array(out, d->width * (d->height ? d->height : 1) * (d->depth ? d->depth : 1), d->format, d->channels);
}

EXPORT CUresult cuMipmappedArrayCreate(struct soft_array **out, const struct cu_array3d_descriptor *d, unsigned levels)
{
    uint64_t elements = 0;
    for (unsigned level = 0; level < levels; level++)
        elements += (d->width >> level ? d->width >> level : 1) * (d->height >> level ? d->height >> level : 1);
    return make_array(out, elements, d->format, d->channels);
}

EXPORT CUresult cuArrayDestroy(struct soft_array *array)
{
    if (!array || array->kind != SOFT_ARRAY)
        return CUDA_ERROR_INVALID_HANDLE;
    soft_give_memory(array->device, array->bytes);
    array->kind = 0;
    free(array);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayDestroy(struct soft_array *array)
{
    return cuArrayDestroy(array);
}

/* ---- pinned host memory ---- */

/* how host memory was pinned; stored in the place of the number of a device */
enum { ALLOCATED = -1, REGISTERED = -2 };

static CUresult pin(void *address, size_t bytes, int how)
{
    struct block *block = malloc(sizeof *block);
    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&soft_lock);
    *block = (struct block){(uint64_t)(uintptr_t)address, bytes, how, false, pinned_blocks};
    pinned_blocks = block;
    pthread_mutex_unlock(&soft_lock);
    return CUDA_SUCCESS;
}

static bool unpin(const void *address, int how)
{
    struct block *found = NULL;
    pthread_mutex_lock(&soft_lock);
    for (struct block **link = &pinned_blocks; *link && !found; link = &(*link)->next)
        if ((*link)->address == (uint64_t)(uintptr_t)address && (*link)->device == how) {
            found = *link;
            *link = found->next;
            break;
        }
    pthread_mutex_unlock(&soft_lock);
    free(found);
    return found != NULL;
}

EXPORT CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    CHECK_CONTEXT();
    (void)context, (void)flags;
    if (posix_memalign(out, 4096, bytes ? bytes : 1) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return pin(*out, bytes ? bytes : 1, ALLOCATED);
}

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
    return cuMemHostAlloc(out, bytes, 0);
}

EXPORT CUresult cuMemFreeHost(void *address)
{
    if (!unpin(address, ALLOCATED))
        return CUDA_ERROR_INVALID_VALUE;
    free(address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
    (void)flags;
    return address && bytes ? pin(address, bytes, REGISTERED) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemHostUnregister(void *address)
{
    return unpin(address, REGISTERED) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- questions about an address ---- */

static bool holds(uint64_t from, uint64_t bytes, uint64_t address)
{
    return address >= from && address < from + bytes;
}

bool soft_is_device_memory(uint64_t address)
{
    pthread_mutex_lock(&soft_lock);
    bool found = soft_is_pooled_or_mapped(address, true);
    for (struct block *block = blocks; block && !found; block = block->next)
        found = holds(block->address, block->bytes, address);
    pthread_mutex_unlock(&soft_lock);
    return found;
}

static bool is_pinned(uint64_t address)
{
    pthread_mutex_lock(&soft_lock);
    bool found = soft_is_pooled_or_mapped(address, false);
    for (struct block *block = pinned_blocks; block && !found; block = block->next)
        found = holds(block->address, block->bytes, address);
    pthread_mutex_unlock(&soft_lock);
    return found;
}

/* Returns whether the address is in ordinary host memory, which the driver neither allocated nor pinned. */
bool soft_is_pageable(uint64_t address)
{
    return !is_pinned(address) && !soft_is_device_memory(address);
}

/* Returns false if the bytes begin in a range of pinned host memory and end after it; the driver refuses such copies.
 * Returns true if they begin outside pinned host memory. */
bool soft_is_within_its_span(uint64_t address, uint64_t bytes)
{
    bool within = true;
    pthread_mutex_lock(&soft_lock);
    for (struct block *block = pinned_blocks; block && within; block = block->next)
        within = !holds(block->address, block->bytes, address) || bytes <= block->address + block->bytes - address;
    pthread_mutex_unlock(&soft_lock);
    return within;
}

enum { ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_IS_MANAGED = 8, TYPE_HOST = 1, TYPE_DEVICE = 2 };

EXPORT CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
    CHECK_READY();
    bool device = soft_is_device_memory(address);
    if (!device && !is_pinned(address))
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)value = device ? TYPE_DEVICE : TYPE_HOST;
    else if (attribute == ATTRIBUTE_IS_MANAGED)
        *(unsigned *)value = 0;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags)
{
    (void)flags;
    unsigned type;
    CUresult known = cuPointerGetAttribute(&type, ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)address);
    *out = (CUdeviceptr)(uintptr_t)address;
    return known;
}

/* ---- memsets ---- */

static CUresult set(uint64_t to, uint32_t value, size_t element, size_t count, struct soft_stream *stream)
{
    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    struct soft_op contents = {.to = (void *)(uintptr_t)to, .element = value, .element_bytes = element, .bytes = element * count};
    return soft_enqueue_filling(stream, soft_on_device(element * count), contents, false);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    return set(to, value, 1, count, soft_stream_of(NULL, false));
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    return set(to, value, 4, count, soft_stream_of(NULL, false));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    return set(to, value, 1, count, soft_stream_of(stream, false));
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    return set(to, value, 4, count, soft_stream_of(stream, false));
}
