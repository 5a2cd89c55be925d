/* Calls that copy several ranges at once.  The software GPU copies the ranges one after the other. */
#include "softgpu.h"

#define NO_ENTRY SIZE_MAX

CUresult cuMemcpyAsync(word to, word from, size_t bytes, CUstream stream);
CUresult cuMemcpyAsync_ptsz(word to, word from, size_t bytes, CUstream stream);

typedef CUresult (*one_fn)(word to, word from, size_t bytes, CUstream stream);

static CUresult batch(const word *to, const word *from, const size_t *sizes, size_t count, const size_t *first, size_t kinds,
                      size_t *failed, CUstream stream, one_fn one)
{
    if (failed)
        *failed = NO_ENTRY;
    if (!to || !from || !sizes || count == 0 || kinds == 0 || kinds > count || !first || first[0] != 0 || !stream)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        CUresult result = one(to[i], from[i], sizes[i], stream);
        if (result != CUDA_SUCCESS) {
            if (failed)
                *failed = i;
            return result;
        }
    }
    return CUDA_SUCCESS;
}

#define BATCH(name, one)                                                                                              \
    EXPORT CUresult name(const word *to, const word *from, const size_t *sizes, size_t count, const void *attributes, \
                         const size_t *first, size_t kinds, size_t *failed, CUstream stream)                          \
    {                                                                                                                 \
        (void)attributes;                                                                                             \
        return batch(to, from, sizes, count, first, kinds, failed, stream, one);                                      \
    }
#define BATCH_V2(name, one)                                                                                           \
    EXPORT CUresult name(const word *to, const word *from, const size_t *sizes, size_t count, const void *attributes, \
                         const size_t *first, size_t kinds, CUstream stream)                                          \
    {                                                                                                                 \
        (void)attributes;                                                                                             \
        return batch(to, from, sizes, count, first, kinds, NULL, stream, one);                                        \
    }
BATCH(cuMemcpyBatchAsync, cuMemcpyAsync)
BATCH(cuMemcpyBatchAsync_ptsz, cuMemcpyAsync_ptsz)
BATCH_V2(cuMemcpyBatchAsync_v2, cuMemcpyAsync)
BATCH_V2(cuMemcpyBatchAsync_v2_ptsz, cuMemcpyAsync_ptsz)

EXPORT CUresult cuMemcpyWithAttributesAsync(word to, word from, size_t bytes, const void *attributes, CUstream stream)
{
    (void)attributes;
    return cuMemcpyAsync(to, from, bytes, stream);
}

EXPORT CUresult cuMemcpyWithAttributesAsync_ptsz(word to, word from, size_t bytes, const void *attributes, CUstream stream)
{
    (void)attributes;
    return cuMemcpyAsync_ptsz(to, from, bytes, stream);
}
