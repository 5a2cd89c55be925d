/* Wrappers of plain, pitched, managed, array and pinned host allocations, and of queries of memory sizes. */
#include "shim.h"
#include "swap/swap.h"


/* Asks the agent for the memory, allocates it, and reports how much was allocated. Afterwards `out` points to the
 * device address or handle. */
#define ALLOCATE(out, amount, family, call)                                                  \
    do {                                                                                     \
        struct gpu *gpu = cot_thread_gpu();                                                  \
        uint64_t bytes = (amount), reservation;                                              \
        if (!gpu)                                                                            \
            return (call);                                                                   \
        CUresult result = cot_memory_reserve(gpu, family, bytes, &reservation);              \
        if (result != CUDA_SUCCESS)                                                          \
            return result;                                                                   \
        result = (call);                                                                     \
        if (result == CUDA_ERROR_OUT_OF_MEMORY && cot_memory_make_room(gpu, bytes))          \
            result = (call);                                                                 \
        cot_memory_commit(gpu, family, reservation, result == CUDA_SUCCESS ? bytes : 0);     \
        if (result == CUDA_SUCCESS)                                                          \
            cot_memory_remember((uint64_t)*(out), bytes, gpu, family);                       \
        return result;                                                                       \
    } while (0)

static bool moves_memory(void)
{
    uint32_t mode = cot_swap_mode();
    return mode == COTENANT_OVERSUBSCRIBE_SWAP || mode == COTENANT_OVERSUBSCRIBE_MANAGED;
}

#define MEM_ALLOC(name)                                                                                      \
    DECLARE_REAL(name);                                                                                      \
    EXPORT CUresult name(CUdeviceptr *out, size_t size)                                                      \
    {                                                                                                        \
        if (moves_memory() && cot_thread_gpu())                                                              \
            return cot_swap_allocate(cot_thread_gpu(), out, size);                                           \
        ALLOCATE(out, size, COTENANT_MEMORY_PLAIN, ((CUresult(*)(CUdeviceptr *, size_t))REAL_POINTER(name))(out, size)); \
    }
MEM_ALLOC(cuMemAlloc)
MEM_ALLOC(cuMemAlloc_v2)

/* The driver chooses the pitch. So the agent is asked for rows that are rounded up to 512 bytes, and the size that
 * the driver really allocated is reported afterwards. */
#define MEM_ALLOC_PITCH(name)                                                                                \
    DECLARE_REAL(name);                                                                                      \
    EXPORT CUresult name(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)     \
    {                                                                                                        \
        struct gpu *gpu = cot_thread_gpu();                                                                  \
        if (gpu && pitch && moves_memory()) {                                                                \
            *pitch = (width + 511) & ~(size_t)511;                                                           \
            return cot_swap_allocate(gpu, out, *pitch * height);                                             \
        }                                                                                                    \
        uint64_t reservation = 0, wanted = ((width + 511) & ~(uint64_t)511) * height;                        \
        CUresult result = gpu ? cot_memory_reserve(gpu, COTENANT_MEMORY_PLAIN, wanted, &reservation) : CUDA_SUCCESS; \
        if (result != CUDA_SUCCESS)                                                                          \
            return result;                                                                                   \
        result = ((CUresult(*)(CUdeviceptr *, size_t *, size_t, size_t, unsigned))REAL_POINTER(name))(out, pitch, width, \
                                                                                              height, element); \
        if (gpu) {                                                                                           \
            uint64_t taken = result == CUDA_SUCCESS ? (uint64_t)*pitch * height : 0;                         \
            cot_memory_commit(gpu, COTENANT_MEMORY_PLAIN, reservation, taken);                               \
            if (taken)                                                                                       \
                cot_memory_remember(*out, taken, gpu, COTENANT_MEMORY_PLAIN);                                \
        }                                                                                                    \
        return result;                                                                                       \
    }
MEM_ALLOC_PITCH(cuMemAllocPitch)
MEM_ALLOC_PITCH(cuMemAllocPitch_v2)

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t size, unsigned flags)
{
    ALLOCATE(out, size, COTENANT_MEMORY_MANAGED,
             REAL(cuMemAllocManaged)(out, size, flags));
}

#define MEM_FREE(name)                                                              \
    DECLARE_REAL(name);                                                             \
    EXPORT CUresult name(CUdeviceptr address)                                       \
    {                                                                               \
        CUresult result;                                                            \
        if (cot_swap_free(address, &result))                                        \
            return result;                                                          \
        struct holding *held = cot_memory_take_out(address, COTENANT_MEMORY_PLAIN); \
        result = ((CUresult(*)(CUdeviceptr))REAL_POINTER(name))(address);                   \
        cot_memory_taken_out(held, result == CUDA_SUCCESS);                         \
        return result;                                                              \
    }
MEM_FREE(cuMemFree)
MEM_FREE(cuMemFree_v2)

/* ---- arrays ---- */

static uint64_t element_bytes(uint32_t format, uint32_t channels)
{
    switch (format) {
    case 0x01: /* 8 bit */
    case 0x08:
        return channels;
    case 0x02: /* 16 bit */
    case 0x09:
    case 0x10:
        return 2 * (uint64_t)channels;
    case 0x03: /* 32 bit */
    case 0x0a:
    case 0x20:
        return 4 * (uint64_t)channels;
    default: /* packed and block-compressed array formats have at most 4 bytes per element and channel */
        return 4 * (uint64_t)(channels ? channels : 1);
    }
}

static uint64_t array_bytes(uint64_t width, uint64_t height, uint64_t depth, uint32_t format, uint32_t channels)
{
    return width * (height ? height : 1) * (depth ? depth : 1) * element_bytes(format, channels);
}

#define ARRAY_CREATE(name, type, depth)                                                                         \
    DECLARE_REAL(name);                                                                                         \
    EXPORT CUresult name(word *out, const struct type *d)                                                       \
    {                                                                                                           \
        if (!d)                                                                                                 \
            return ((CUresult(*)(word *, const struct type *))REAL_POINTER(name))(out, d);                              \
        ALLOCATE(out, array_bytes(d->width, d->height, depth, d->format, d->channels), COTENANT_MEMORY_ARRAY,   \
                 ((CUresult(*)(word *, const struct type *))REAL_POINTER(name))(out, d));                               \
    }
ARRAY_CREATE(cuArrayCreate, cu_array_descriptor_v1, 1)
ARRAY_CREATE(cuArrayCreate_v2, cu_array_descriptor, 1)
ARRAY_CREATE(cuArray3DCreate, cu_array3d_descriptor_v1, d->depth)
ARRAY_CREATE(cuArray3DCreate_v2, cu_array3d_descriptor, d->depth)

EXPORT CUresult cuMipmappedArrayCreate(word *out, const struct cu_array3d_descriptor *d, unsigned levels)
{
    uint64_t all_levels = 0;
    for (unsigned level = 0; d && level < levels && level < 64; level++)
        all_levels += array_bytes(d->width >> level ? d->width >> level : 1, d->height >> level, d->depth >> level,
                                  d->format, d->channels);
    ALLOCATE(out, all_levels, COTENANT_MEMORY_ARRAY,
             REAL(cuMipmappedArrayCreate)(out, d,
                                                                                                                 levels));
}

#define ARRAY_DESTROY(name)                                                       \
    DECLARE_REAL(name);                                                           \
    EXPORT CUresult name(word array)                                              \
    {                                                                             \
        struct holding *held = cot_memory_take_out(array, COTENANT_MEMORY_ARRAY); \
        CUresult result = ((CUresult(*)(word))REAL_POINTER(name))(array);                 \
        cot_memory_taken_out(held, result == CUDA_SUCCESS);                       \
        return result;                                                            \
    }
ARRAY_DESTROY(cuArrayDestroy)
ARRAY_DESTROY(cuMipmappedArrayDestroy)

/* ---- pinned host memory ---- */

static CUresult host_allocate(void **out, size_t bytes, CUresult (*call)(void **, size_t, unsigned), unsigned flags)
{
    uint64_t reservation;
    CUresult result = cot_memory_reserve(NULL, COTENANT_MEMORY_HOST, bytes, &reservation);
    if (result != CUDA_SUCCESS)
        return result;
    result = call(out, bytes, flags);
    cot_memory_commit(NULL, COTENANT_MEMORY_HOST, reservation, result == CUDA_SUCCESS ? bytes : 0);
    if (result == CUDA_SUCCESS)
        cot_memory_remember((uint64_t)(uintptr_t)*out, bytes, NULL, COTENANT_MEMORY_HOST);
    return result;
}

#define HOST_ALLOC_2(name)                                                                           \
    DECLARE_REAL(name);                                                                              \
    EXPORT CUresult name(void **out, size_t bytes)                                                   \
    {                                                                                                \
        return host_allocate(out, bytes, (CUresult(*)(void **, size_t, unsigned))REAL_POINTER(name), 0);     \
    }
HOST_ALLOC_2(cuMemAllocHost)
HOST_ALLOC_2(cuMemAllocHost_v2)

EXPORT CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    return host_allocate(out, bytes, REAL(cuMemHostAlloc), flags);
}

#define HOST_REGISTER(name)                                                                          \
    DECLARE_REAL(name);                                                                              \
    EXPORT CUresult name(void *address, size_t bytes, unsigned flags)                                \
    {                                                                                                \
        uint64_t reservation;                                                                        \
        CUresult result = cot_memory_reserve(NULL, COTENANT_MEMORY_HOST, bytes, &reservation);       \
        if (result != CUDA_SUCCESS)                                                                  \
            return result;                                                                           \
        result = ((CUresult(*)(void *, size_t, unsigned))REAL_POINTER(name))(address, bytes, flags);         \
        cot_memory_commit(NULL, COTENANT_MEMORY_HOST, reservation, result == CUDA_SUCCESS ? bytes : 0); \
        if (result == CUDA_SUCCESS)                                                                  \
            cot_memory_remember((uint64_t)(uintptr_t)address, bytes, NULL, COTENANT_MEMORY_HOST);    \
        return result;                                                                               \
    }
HOST_REGISTER(cuMemHostRegister)
HOST_REGISTER(cuMemHostRegister_v2)

#define HOST_FREE(name)                                                                                 \
    DECLARE_REAL(name);                                                                                 \
    EXPORT CUresult name(void *address)                                                                 \
    {                                                                                                   \
        struct holding *held = cot_memory_take_out((uint64_t)(uintptr_t)address, COTENANT_MEMORY_HOST); \
        CUresult result = ((CUresult(*)(void *))REAL_POINTER(name))(address);                                   \
        cot_memory_taken_out(held, result == CUDA_SUCCESS);                                             \
        return result;                                                                                  \
    }
HOST_FREE(cuMemFreeHost)
HOST_FREE(cuMemHostUnregister)

/* ---- queries of memory sizes ---- */

#define MEM_GET_INFO(name, type)                                                                      \
    DECLARE_REAL(name);                                                                               \
    EXPORT CUresult name(type *free_bytes, type *total_bytes)                                         \
    {                                                                                                 \
        CUresult result = ((CUresult(*)(type *, type *))REAL_POINTER(name))(free_bytes, total_bytes);         \
        struct gpu *gpu = result == CUDA_SUCCESS ? cot_thread_gpu() : NULL;                           \
        uint64_t limit, used, kept = cot_memory_kept(gpu);                                            \
        if (free_bytes && kept)                                                                       \
            *free_bytes = *free_bytes > kept ? (type)(*free_bytes - kept) : 0;                        \
        if (!cot_memory_view(gpu, &limit, &used))                                                     \
            return result;                                                                            \
        uint64_t left = used < limit ? limit - used : 0;                                              \
        /* if the tenant oversubscribes, other tenants' memory is evicted for it, so the driver's number is too low */ \
        if (free_bytes && (*free_bytes > left || moves_memory()))                                     \
            *free_bytes = (type)left;                                                                 \
        if (total_bytes && *total_bytes > limit)                                                      \
            *total_bytes = (type)limit;                                                               \
        return result;                                                                                \
    }
MEM_GET_INFO(cuMemGetInfo, unsigned)
MEM_GET_INFO(cuMemGetInfo_v2, size_t)

/* The limit is known once the process is connected to the agent, which is after cuInit. */
#define TOTAL_MEM(name, type)                                                            \
    DECLARE_REAL(name);                                                                  \
    EXPORT CUresult name(type *bytes, CUdevice device)                                   \
    {                                                                                    \
        CUresult result = ((CUresult(*)(type *, CUdevice))REAL_POINTER(name))(bytes, device);    \
        uint64_t limit, used;                                                            \
        if (result == CUDA_SUCCESS && bytes && cot_agent_is_connected() &&               \
            cot_memory_view(cot_gpu_of_device(device, true), &limit, &used) && *bytes > limit) \
            *bytes = (type)limit;                                                        \
        return result;                                                                   \
    }
TOTAL_MEM(cuDeviceTotalMem, unsigned)
TOTAL_MEM(cuDeviceTotalMem_v2, size_t)
