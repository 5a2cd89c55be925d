/* Plain, managed, pitched, array and pinned memory, and copies.  Device memory is ordinary memory that the system
 * provides page by page, so what a program writes it can read back. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "softgpu.h"

struct block {
    uint64_t address, bytes;
    int device;
    struct block *next;
};

struct soft_array {
    enum soft_kind kind;
    uint64_t bytes;
    int device;
};

static struct block *blocks; /* under soft_lock */

static void *map(uint64_t bytes)
{
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    CHECK_CONTEXT();
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult forbidden = soft_unsafe_call();
    if (forbidden != CUDA_SUCCESS)
        return forbidden;
    if (!soft_take_memory(context->device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *address = map(bytes);
    struct block *block = address ? malloc(sizeof *block) : NULL;
    if (!block) {
        soft_give_memory(context->device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&soft_lock);
    *block = (struct block){(uint64_t)(uintptr_t)address, bytes, context->device, blocks};
    blocks = block;
    pthread_mutex_unlock(&soft_lock);
    *out = block->address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    (void)flags;
    return cuMemAlloc_v2(out, bytes);
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
    soft_give_memory(found->device, found->bytes);
    free(found);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    CHECK_CONTEXT();
    uint64_t used = soft_used_memory(context->device), total = soft_state()->memory_bytes;
    if (free_bytes)
        *free_bytes = used < total ? total - used : 0;
    if (total_bytes)
        *total_bytes = total;
    return CUDA_SUCCESS;
}

/* ---- arrays: no content ---- */

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

EXPORT CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    CHECK_CONTEXT();
    (void)context, (void)flags;
    return posix_memalign(out, 4096, bytes ? bytes : 1) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
    return cuMemHostAlloc(out, bytes, 0);
}

EXPORT CUresult cuMemFreeHost(void *address)
{
    free(address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
    (void)flags;
    return address && bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemHostUnregister(void *address)
{
    return address ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- copies ---- */

static CUresult copy(uint64_t to, uint64_t from, size_t bytes, uint64_t bytes_per_us, struct soft_stream *stream, bool waits)
{
    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = soft_enqueue(stream, bytes * 1000 / bytes_per_us + 1000, waits);
    if (result == CUDA_SUCCESS && stream->capture == CU_CAPTURE_NONE)
        memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return result;
}

#define COPY(name, to_type, from_type, rate)                                                               \
    EXPORT CUresult name(to_type to, from_type from, size_t bytes)                                         \
    {                                                                                                      \
        return copy((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, rate, soft_stream_of(NULL, false), true); \
    }
#define COPY_ASYNC(name, to_type, from_type, rate, per_thread)                                             \
    EXPORT CUresult name(to_type to, from_type from, size_t bytes, CUstream stream)                        \
    {                                                                                                      \
        return copy((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, rate,                       \
                    soft_stream_of(stream, per_thread), false);                                            \
    }
COPY(cuMemcpyHtoD_v2, CUdeviceptr, const void *, SOFT_TO_DEVICE_BYTES_PER_US)
COPY(cuMemcpyDtoH_v2, void *, CUdeviceptr, SOFT_TO_HOST_BYTES_PER_US)
COPY(cuMemcpyDtoD_v2, CUdeviceptr, CUdeviceptr, SOFT_ON_DEVICE_BYTES_PER_US)
COPY(cuMemcpy, CUdeviceptr, CUdeviceptr, SOFT_TO_DEVICE_BYTES_PER_US)
COPY_ASYNC(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, SOFT_TO_DEVICE_BYTES_PER_US, false)
COPY_ASYNC(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, SOFT_TO_HOST_BYTES_PER_US, false)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, SOFT_ON_DEVICE_BYTES_PER_US, false)
COPY_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, CUdeviceptr, CUdeviceptr, SOFT_ON_DEVICE_BYTES_PER_US, true)
COPY_ASYNC(cuMemcpyAsync, CUdeviceptr, CUdeviceptr, SOFT_TO_DEVICE_BYTES_PER_US, false)
COPY_ASYNC(cuMemcpyAsync_ptsz, CUdeviceptr, CUdeviceptr, SOFT_TO_DEVICE_BYTES_PER_US, true)

static CUresult set(uint64_t to, uint32_t value, size_t element, size_t count, struct soft_stream *stream)
{
    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = soft_enqueue(stream, element * count * 1000 / SOFT_ON_DEVICE_BYTES_PER_US + 1000, false);
    for (size_t i = 0; result == CUDA_SUCCESS && stream->capture == CU_CAPTURE_NONE && i < count; i++)
        memcpy((char *)(uintptr_t)to + i * element, &value, element);
    return result;
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
