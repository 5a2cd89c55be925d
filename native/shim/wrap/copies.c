/* Wrappers of copies between host and device, which may be scheduled on the link, and of copies within the device,
 * which are split for best-effort tenants. If copies are not scheduled, these calls only pass the turn gate, like
 * all other copies. */
#include <string.h>

#include "copies/host_copy.h"

enum { TO_DEVICE, TO_HOST }; /* cotenant_copy_direction */
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_ARRAY = 3, MEMORY_UNIFIED = 4 };

typedef CUresult (*sync_fn)(word to, word from, word bytes);
typedef CUresult (*async_fn)(word to, word from, word bytes, CUstream stream);

/* ---- one range of bytes ---- */

struct stretch {
    word to, from;
    sync_fn plain; /* the synchronous driver function that the program called; NULL: it called an asynchronous one */
    async_fn in_stream;
};

static CUresult issue_stretch(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous)
{
    const struct stretch *call = copy->call;
    return asynchronous || !call->plain ? call->in_stream(call->to + from, call->from + from, bytes, stream)
                                        : call->plain(call->to + from, call->from + from, bytes);
}

static __attribute__((noinline)) CUresult over_link(struct stretch call, word bytes, uint32_t direction, CUstream stream, uintptr_t key)
{
    struct host_copy copy = {
        .direction = direction,
        .bytes = bytes,
        .unit = 1,
        .host = (const void *)(direction == TO_DEVICE ? call.from : call.to),
        .issue = issue_stretch,
        .call = &call,
        .stream = stream,
        .host_waits = call.plain != NULL,
        .key = key,
    };
    return cot_copy_over_link(&copy);
}

static CUresult once(struct stretch call, word bytes, CUstream stream, uintptr_t key)
{
    struct calls *gate = cot_gate_enter(key, stream);
    CUresult result = call.plain ? call.plain(call.to, call.from, bytes) : call.in_stream(call.to, call.from, bytes, stream);
    cot_gate_exit(gate);
    cot_count_copy(gate);
    return result;
}

#define LINK_SYNC(name, in_stream, direction, effective)                                                  \
    DECLARE_REAL(name);                                                                                   \
    DECLARE_REAL(in_stream);                                                                              \
    EXPORT CUresult name(word to, word from, word bytes)                                                  \
    {                                                                                                     \
        struct stretch call = {to, from, (sync_fn)REAL_POINTER(name), (async_fn)REAL_POINTER(in_stream)};                 \
        uintptr_t key = cot_copy_key((void *)name, bytes);                                                    \
        return cot_copies_perhaps_on() ? over_link(call, bytes, direction, effective, key) : once(call, bytes, effective, key); \
    }
#define LINK_ASYNC(name, direction, effective)                                                            \
    DECLARE_REAL(name);                                                                                   \
    EXPORT CUresult name(word to, word from, word bytes, CUstream stream)                                 \
    {                                                                                                     \
        struct stretch call = {to, from, NULL, (async_fn)REAL_POINTER(name)};                                     \
        uintptr_t key = cot_copy_key((void *)name, bytes);                                                    \
        return cot_copies_perhaps_on() ? over_link(call, bytes, direction, effective, key) : once(call, bytes, effective, key); \
    }
LINK_SYNC(cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2, TO_DEVICE, NULL)
LINK_SYNC(cuMemcpyHtoD_v2_ptds, cuMemcpyHtoDAsync_v2, TO_DEVICE, PER_THREAD)
LINK_SYNC(cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2, TO_HOST, NULL)
LINK_SYNC(cuMemcpyDtoH_v2_ptds, cuMemcpyDtoHAsync_v2, TO_HOST, PER_THREAD)
LINK_ASYNC(cuMemcpyHtoDAsync_v2, TO_DEVICE, stream)
LINK_ASYNC(cuMemcpyHtoDAsync_v2_ptsz, TO_DEVICE, PTSZ(stream))
LINK_ASYNC(cuMemcpyDtoHAsync_v2, TO_HOST, stream)
LINK_ASYNC(cuMemcpyDtoHAsync_v2_ptsz, TO_HOST, PTSZ(stream))

/* ---- copies within the device ---- */

/* Copies within the device. A running copy cannot be interrupted, so it is split into pieces. Each piece passes the
 * turn gate, so other tenants can run between two pieces. */
static __attribute__((noinline)) CUresult on_device(struct stretch call, word bytes, CUstream stream, const void *kind)
{
    uint64_t piece = atomic_load(&cot_captures) > 0 ? 0 : cot_copy_slice_bytes();
    if (piece == 0 || bytes <= piece || (call.to < call.from + bytes && call.from < call.to + bytes))
        return once(call, bytes, stream, cot_copy_key(kind, bytes));
    CUresult result = CUDA_SUCCESS;
    for (word at = 0; at < bytes && result == CUDA_SUCCESS; at += piece) {
        struct stretch part = {call.to + at, call.from + at, call.plain, call.in_stream};
        word length = bytes - at < piece ? bytes - at : piece;
        result = once(part, length, stream, cot_copy_key(kind, length));
    }
    return result;
}

#define DEVICE_SYNC(name, in_stream, effective)                                                             \
    DECLARE_REAL(name);                                                                                     \
    DECLARE_REAL(in_stream);                                                                                \
    EXPORT CUresult name(word to, word from, word bytes)                                                    \
    {                                                                                                       \
        struct stretch call = {to, from, (sync_fn)REAL_POINTER(name), (async_fn)REAL_POINTER(in_stream)};                   \
        return cot_copies_perhaps_on() ? on_device(call, bytes, effective, (void *)name)                               \
                            : once(call, bytes, effective, cot_copy_key((void *)name, bytes));                  \
    }
#define DEVICE_ASYNC(name, effective)                                                                       \
    DECLARE_REAL(name);                                                                                     \
    EXPORT CUresult name(word to, word from, word bytes, CUstream stream)                                   \
    {                                                                                                       \
        struct stretch call = {to, from, NULL, (async_fn)REAL_POINTER(name)};                                       \
        return cot_copies_perhaps_on() ? on_device(call, bytes, effective, (void *)name)                               \
                            : once(call, bytes, effective, cot_copy_key((void *)name, bytes));                  \
    }
DEVICE_SYNC(cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2, NULL)
DEVICE_SYNC(cuMemcpyDtoD_v2_ptds, cuMemcpyDtoDAsync_v2, PER_THREAD)
DEVICE_ASYNC(cuMemcpyDtoDAsync_v2, stream)
DEVICE_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, PTSZ(stream))

/* ---- copies between addresses of any kind ---- */

static __attribute__((noinline)) CUresult anywhere(struct stretch call, word bytes, CUstream stream, const void *kind)
{
    bool to = cot_is_on_device(call.to), from = cot_is_on_device(call.from);
    if (to && from)
        return on_device(call, bytes, stream, kind);
    if (!to && !from)
        return once(call, bytes, stream, cot_copy_key(kind, bytes));
    return over_link(call, bytes, to ? TO_DEVICE : TO_HOST, stream, cot_copy_key(kind, bytes));
}

#define ANY_SYNC(name, in_stream, effective)                                                                \
    DECLARE_REAL(name);                                                                                     \
    DECLARE_REAL(in_stream);                                                                                \
    EXPORT CUresult name(word to, word from, word bytes)                                                    \
    {                                                                                                       \
        struct stretch call = {to, from, (sync_fn)REAL_POINTER(name), (async_fn)REAL_POINTER(in_stream)};                   \
        return cot_copies_perhaps_on() ? anywhere(call, bytes, effective, (void *)name)                                \
                            : once(call, bytes, effective, cot_copy_key((void *)name, bytes));                  \
    }
#define ANY_ASYNC(name, effective)                                                                          \
    DECLARE_REAL(name);                                                                                     \
    EXPORT CUresult name(word to, word from, word bytes, CUstream stream)                                   \
    {                                                                                                       \
        struct stretch call = {to, from, NULL, (async_fn)REAL_POINTER(name)};                                       \
        return cot_copies_perhaps_on() ? anywhere(call, bytes, effective, (void *)name)                                \
                            : once(call, bytes, effective, cot_copy_key((void *)name, bytes));                  \
    }
ANY_SYNC(cuMemcpy, cuMemcpyAsync, NULL)
ANY_SYNC(cuMemcpy_ptds, cuMemcpyAsync, PER_THREAD)
ANY_ASYNC(cuMemcpyAsync, stream)
ANY_ASYNC(cuMemcpyAsync_ptsz, PTSZ(stream))

/* ---- copies of rows (2D copies) ---- */

typedef CUresult (*sync_2d_fn)(const struct cu_copy_2d *);
typedef CUresult (*async_2d_fn)(const struct cu_copy_2d *, CUstream);

struct rows {
    const struct cu_copy_2d *copy;
    sync_2d_fn plain;
    async_2d_fn in_stream;
};

static CUresult issue_rows(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous)
{
    const struct rows *call = copy->call;
    struct cu_copy_2d part = *call->copy;
    if (from || bytes != copy->bytes) {
        part.from_y += from / part.width;
        part.to_y += from / part.width;
        part.height = bytes / part.width;
    }
    return asynchronous || !call->plain ? call->in_stream(&part, stream) : call->plain(&part);
}

/* Returns the address of one side of a copy (its source or its destination) if that side is in host memory; NULL if it
 * is in device memory or an array. */
static const void *host_end(int type, const void *host, CUdeviceptr device)
{
    if (type == MEMORY_UNIFIED)
        return cot_is_on_device(device) ? NULL : (const void *)(uintptr_t)device;
    return type == MEMORY_HOST ? host : NULL;
}

static CUresult copy_rows(struct rows call, CUstream stream, const void *kind)
{
    const struct cu_copy_2d *wanted = call.copy;
    uint64_t bytes = wanted ? wanted->width * wanted->height : 0;
    uintptr_t key = cot_copy_key(kind, bytes);
    if (cot_copies_perhaps_on() && bytes) {
        const void *from = host_end(wanted->from_type, wanted->from_host, wanted->from_device);
        const void *to = host_end(wanted->to_type, wanted->to_host, wanted->to_device);
        struct host_copy copy = {
            .direction = from ? TO_DEVICE : TO_HOST,
            .bytes = bytes,
            .unit = wanted->width,
            .host = from ? from : to,
            .issue = issue_rows,
            .call = &call,
            .stream = stream,
            .host_waits = call.plain != NULL,
            .key = key,
        };
        if (!from != !to)
            return cot_copy_over_link(&copy);
    }
    struct calls *gate = cot_gate_enter(key, stream);
    CUresult result = call.plain ? call.plain(wanted) : call.in_stream(wanted, stream);
    cot_gate_exit(gate);
    cot_count_copy(gate);
    return result;
}

#define ROWS_SYNC(name, effective)                                                                          \
    DECLARE_REAL(name);                                                                                     \
    DECLARE_REAL(cuMemcpy2DAsync_v2);                                                                       \
    EXPORT CUresult name(const struct cu_copy_2d *copy)                                                     \
    {                                                                                                       \
        struct rows call = {copy, (sync_2d_fn)REAL_POINTER(name), (async_2d_fn)REAL_POINTER(cuMemcpy2DAsync_v2)};           \
        return copy_rows(call, effective, (void *)name);                                                    \
    }
#define ROWS_ASYNC(name, effective)                                                                         \
    DECLARE_REAL(name);                                                                                     \
    EXPORT CUresult name(const struct cu_copy_2d *copy, CUstream stream)                                    \
    {                                                                                                       \
        struct rows call = {copy, NULL, (async_2d_fn)REAL_POINTER(name)};                                           \
        return copy_rows(call, effective, (void *)name);                                                    \
    }
ROWS_SYNC(cuMemcpy2D_v2, NULL)
ROWS_SYNC(cuMemcpy2D_v2_ptds, PER_THREAD)
ROWS_SYNC(cuMemcpy2DUnaligned_v2, NULL)
ROWS_SYNC(cuMemcpy2DUnaligned_v2_ptds, PER_THREAD)
ROWS_ASYNC(cuMemcpy2DAsync_v2, stream)
ROWS_ASYNC(cuMemcpy2DAsync_v2_ptsz, PTSZ(stream))
