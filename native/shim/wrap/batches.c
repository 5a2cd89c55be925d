/* Copies between host and device, except those of a single range or of rows (2D copies): batches of ranges, boxes (3D
 * copies), and copies to and from arrays. If the GPU's copies are scheduled, batches and boxes are scheduled, too: a
 * batch is split between its ranges and inside them, a box between its layers. Copies to and from arrays are neither
 * split nor delayed; their bytes only count as copied by the tenant, so that its later copies wait longer
 * (copies/copy_rule.h).
 *
 * The first range of a batch decides the direction of the whole batch, which is split only if all its ranges have
 * the same attributes. */
#include <stdlib.h>
#include <string.h>

#include "copies/host_copy.h"

enum { TO_DEVICE, TO_HOST }; /* cotenant_copy_direction */
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_ARRAY = 3, MEMORY_UNIFIED = 4 };

static CUresult finish(struct calls *gate, CUresult result)
{
    cot_gate_exit(gate);
    cot_count_copy(gate);
    return result;
}

/* ---- batches of ranges ---- */

typedef CUresult (*batch_fn)(word *to, word *from, size_t *sizes, size_t count, void *attributes, size_t *first, size_t kinds,
                             size_t *failed, CUstream stream);
typedef CUresult (*batch_v2_fn)(word *to, word *from, size_t *sizes, size_t count, void *attributes, size_t *first, size_t kinds,
                                CUstream stream);

struct batch {
    word *to, *from;
    size_t *sizes, count;
    void *attributes;
    size_t *first, kinds, *failed;
    batch_fn old; /* `old` or `new` is the entry point that the program called; the other is NULL */
    batch_v2_fn new;
    uint64_t bytes;
    word *part_to, *part_from; /* the arrays that describe the next part of the batch for the driver */
    size_t *part_sizes;
    size_t entry;       /* index of the copy in the batch at which the next part begins */
    uint64_t in_entry;
};

static CUresult call_batch(const struct batch *batch, word *to, word *from, size_t *sizes, size_t count, CUstream stream)
{
    return batch->old ? batch->old(to, from, sizes, count, batch->attributes, batch->first, batch->kinds, batch->failed, stream)
                      : batch->new(to, from, sizes, count, batch->attributes, batch->first, batch->kinds, stream);
}

static CUresult issue_batch(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous)
{
    (void)asynchronous;
    /* the cast removes `const`, because the batch stores where its next part begins */
    struct batch *batch = (struct batch *)(uintptr_t)copy->call;
    if (bytes == batch->bytes)
        return call_batch(batch, batch->to, batch->from, batch->sizes, batch->count, stream);
    if (from == 0)
        batch->entry = batch->in_entry = 0;
    size_t began = batch->entry, count = 0;
    for (uint64_t left = bytes; left > 0 && batch->entry < batch->count;) {
        uint64_t rest = batch->sizes[batch->entry] - batch->in_entry, length = rest < left ? rest : left;
        batch->part_to[count] = batch->to[batch->entry] + batch->in_entry;
        batch->part_from[count] = batch->from[batch->entry] + batch->in_entry;
        batch->part_sizes[count++] = length;
        left -= length;
        batch->in_entry += length;
        if (batch->in_entry == batch->sizes[batch->entry]) {
            batch->entry++;
            batch->in_entry = 0;
        }
    }
    CUresult result = call_batch(batch, batch->part_to, batch->part_from, batch->part_sizes, count, stream);
    if (result != CUDA_SUCCESS && batch->failed && *batch->failed != SIZE_MAX)
        *batch->failed += began;
    return result;
}

static bool measure(struct batch *batch) /* returns false if the driver must execute the batch as a whole */
{
    batch->bytes = 0;
    if (!batch->to || !batch->from || !batch->sizes || batch->count == 0 || batch->kinds > 1)
        return false;
    for (size_t i = 0; i < batch->count; i++)
        batch->bytes += batch->sizes[i];
    return batch->bytes > 0;
}

static CUresult copy_batch(struct batch *batch, CUstream stream, const void *kind)
{
    if (cot_copies_perhaps_on() && measure(batch)) {
        bool to = cot_is_on_device(batch->to[0]), from = cot_is_on_device(batch->from[0]);
        word *room = to != from ? malloc(3 * batch->count * sizeof *room) : NULL;
        if (room) {
            batch->part_to = room;
            batch->part_from = room + batch->count;
            batch->part_sizes = (size_t *)(room + 2 * batch->count);
            struct host_copy copy = {
                .direction = to ? TO_DEVICE : TO_HOST,
                .bytes = batch->bytes,
                .unit = 1,
                .host = (const void *)(to ? batch->from[0] : batch->to[0]),
                .issue = issue_batch,
                .call = batch,
                .stream = stream,
                .key = cot_copy_key(kind, batch->bytes),
            };
            CUresult result = cot_copy_over_link(&copy);
            free(room);
            return result;
        }
    }
    struct calls *gate = cot_gate_enter(cot_copy_key(kind, batch->count), stream);
    return finish(gate, call_batch(batch, batch->to, batch->from, batch->sizes, batch->count, stream));
}

#define BATCH(name, effective)                                                                                          \
    DECLARE_REAL(name);                                                                                                 \
    EXPORT CUresult name(word *to, word *from, size_t *sizes, size_t count, void *attributes, size_t *first, size_t kinds, \
                         size_t *failed, CUstream stream)                                                               \
    {                                                                                                                   \
        struct batch batch = {to, from, sizes, count, attributes, first, kinds, failed, (batch_fn)REAL_POINTER(name)};          \
        return copy_batch(&batch, effective, (void *)name);                                                             \
    }
#define BATCH_V2(name, effective)                                                                                       \
    DECLARE_REAL(name);                                                                                                 \
    EXPORT CUresult name(word *to, word *from, size_t *sizes, size_t count, void *attributes, size_t *first, size_t kinds, \
                         CUstream stream)                                                                               \
    {                                                                                                                   \
        struct batch batch = {to, from, sizes, count, attributes, first, kinds, NULL, NULL, (batch_v2_fn)REAL_POINTER(name)};   \
        return copy_batch(&batch, effective, (void *)name);                                                             \
    }
BATCH(cuMemcpyBatchAsync, stream)
BATCH(cuMemcpyBatchAsync_ptsz, PTSZ(stream))
BATCH_V2(cuMemcpyBatchAsync_v2, stream)
BATCH_V2(cuMemcpyBatchAsync_v2_ptsz, PTSZ(stream))

/* ---- one range with attributes ---- */

typedef CUresult (*attributes_fn)(word to, word from, size_t bytes, void *attributes, CUstream stream);

struct with_attributes {
    word to, from;
    void *attributes;
    attributes_fn real;
};

static CUresult issue_with_attributes(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous)
{
    (void)asynchronous;
    const struct with_attributes *call = copy->call;
    return call->real(call->to + from, call->from + from, bytes, call->attributes, stream);
}

static CUresult copy_with_attributes(const struct with_attributes *call, size_t bytes, CUstream stream, const void *kind)
{
    uintptr_t key = cot_copy_key(kind, bytes);
    if (cot_copies_perhaps_on() && bytes) {
        bool to = cot_is_on_device(call->to), from = cot_is_on_device(call->from);
        struct host_copy copy = {
            .direction = to ? TO_DEVICE : TO_HOST,
            .bytes = bytes,
            .unit = 1,
            .host = (const void *)(to ? call->from : call->to),
            .issue = issue_with_attributes,
            .call = call,
            .stream = stream,
            .key = key,
        };
        if (to != from)
            return cot_copy_over_link(&copy);
    }
    struct calls *gate = cot_gate_enter(key, stream);
    return finish(gate, call->real(call->to, call->from, bytes, call->attributes, stream));
}

#define WITH_ATTRIBUTES(name, effective)                                                                 \
    DECLARE_REAL(name);                                                                                  \
    EXPORT CUresult name(word to, word from, size_t bytes, void *attributes, CUstream stream)            \
    {                                                                                                    \
        struct with_attributes call = {to, from, attributes, (attributes_fn)REAL_POINTER(name)};                 \
        return copy_with_attributes(&call, bytes, effective, (void *)name);                              \
    }
WITH_ATTRIBUTES(cuMemcpyWithAttributesAsync, stream)
WITH_ATTRIBUTES(cuMemcpyWithAttributesAsync_ptsz, PTSZ(stream))

/* ---- boxes: 3D copies ---- */

struct end_3d {
    size_t x, y, z, level;
    int type;
    const void *host;
    CUdeviceptr device;
    word array, reserved;
    size_t pitch, height;
};

struct copy_3d {
    struct end_3d from, to;
    size_t width, height, depth;
};

typedef CUresult (*sync_3d_fn)(const struct copy_3d *);
typedef CUresult (*async_3d_fn)(const struct copy_3d *, CUstream);

struct box {
    const struct copy_3d *copy;
    sync_3d_fn plain; /* `plain` or `in_stream` is the entry point that the program called; the other is NULL */
    async_3d_fn in_stream;
};

static CUresult issue_box(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous)
{
    const struct box *call = copy->call;
    struct copy_3d part = *call->copy;
    if (from || bytes != copy->bytes) {
        part.from.z += from / copy->unit;
        part.to.z += from / copy->unit;
        part.depth = bytes / copy->unit;
    }
    return asynchronous || !call->plain ? call->in_stream(&part, stream) : call->plain(&part);
}

/* returns the address in host memory; NULL if the address is in device memory */
static const void *host_of(const struct end_3d *end)
{
    if (end->type == MEMORY_UNIFIED)
        return cot_is_on_device(end->device) ? NULL : (const void *)(uintptr_t)end->device;
    return end->type == MEMORY_HOST ? end->host : NULL;
}

static CUresult copy_box(const struct box *call, CUstream stream, const void *kind, bool waits)
{
    const struct copy_3d *wanted = call->copy;
    uint64_t layer = wanted ? wanted->width * wanted->height : 0, bytes = layer * (wanted ? wanted->depth : 0);
    uintptr_t key = cot_copy_key(kind, bytes);
    if (cot_copies_perhaps_on() && bytes) {
        const void *from = host_of(&wanted->from), *to = host_of(&wanted->to);
        struct host_copy copy = {
            .direction = from ? TO_DEVICE : TO_HOST,
            .bytes = bytes,
            .unit = layer,
            .host = from ? from : to,
            .issue = issue_box,
            .call = call,
            .stream = stream,
            .host_waits = waits,
            .key = key,
        };
        if (!from != !to)
            return cot_copy_over_link(&copy);
    }
    struct calls *gate = cot_gate_enter(key, stream);
    return finish(gate, waits ? call->plain(wanted) : call->in_stream(wanted, stream));
}

#define BOX_SYNC(name, asynchronous, effective)                                                          \
    DECLARE_REAL(name);                                                                                  \
    DECLARE_REAL(asynchronous);                                                                          \
    EXPORT CUresult name(const struct copy_3d *copy)                                                     \
    {                                                                                                    \
        struct box call = {copy, (sync_3d_fn)REAL_POINTER(name), (async_3d_fn)REAL_POINTER(asynchronous)};               \
        return copy_box(&call, effective, (void *)name, true);                                           \
    }
#define BOX_ASYNC(name, effective)                                                                       \
    DECLARE_REAL(name);                                                                                  \
    EXPORT CUresult name(const struct copy_3d *copy, CUstream stream)                                    \
    {                                                                                                    \
        struct box call = {copy, NULL, (async_3d_fn)REAL_POINTER(name)};                                         \
        return copy_box(&call, effective, (void *)name, false);                                          \
    }
BOX_SYNC(cuMemcpy3D_v2, cuMemcpy3DAsync_v2, NULL)
BOX_SYNC(cuMemcpy3D_v2_ptds, cuMemcpy3DAsync_v2, PER_THREAD)
BOX_ASYNC(cuMemcpy3DAsync_v2, stream)
BOX_ASYNC(cuMemcpy3DAsync_v2_ptsz, PTSZ(stream))

/* ---- copies to and from arrays: not split, but counted as copied by the tenant ---- */

#define CHARGED(name, direction, effective, bytes, parameters, arguments, types)                         \
    DECLARE_REAL(name);                                                                                  \
    EXPORT CUresult name parameters                                                                      \
    {                                                                                                    \
        if (cot_copies_perhaps_on())                                                                     \
            cot_copy_charge_whole(direction, bytes);                                                     \
        struct calls *gate = cot_gate_enter(cot_copy_key((void *)name, bytes), effective);               \
        return finish(gate, ((CUresult(*) types)REAL_POINTER(name))arguments);                                   \
    }
#define ARRAY_SYNC(name, direction, effective) \
    CHARGED(name, direction, effective, a4, (word a1, word a2, word a3, word a4), (a1, a2, a3, a4), (word, word, word, word))
#define ARRAY_ASYNC(name, direction, effective)                                                          \
    CHARGED(name, direction, effective, a4, (word a1, word a2, word a3, word a4, CUstream stream),       \
            (a1, a2, a3, a4, stream), (word, word, word, word, CUstream))
ARRAY_SYNC(cuMemcpyHtoA_v2, TO_DEVICE, NULL)
ARRAY_SYNC(cuMemcpyHtoA_v2_ptds, TO_DEVICE, PER_THREAD)
ARRAY_SYNC(cuMemcpyAtoH_v2, TO_HOST, NULL)
ARRAY_SYNC(cuMemcpyAtoH_v2_ptds, TO_HOST, PER_THREAD)
ARRAY_ASYNC(cuMemcpyHtoAAsync_v2, TO_DEVICE, stream)
ARRAY_ASYNC(cuMemcpyHtoAAsync_v2_ptsz, TO_DEVICE, PTSZ(stream))
ARRAY_ASYNC(cuMemcpyAtoHAsync_v2, TO_HOST, stream)
ARRAY_ASYNC(cuMemcpyAtoHAsync_v2_ptsz, TO_HOST, PTSZ(stream))
