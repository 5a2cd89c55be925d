/* Copies. Each device has one copy engine for each direction of the link, which all processes share. A copy begins when
 * the work before it in its stream has ended and the engine is free. */
#include <string.h>

#include "softgpu.h"

/* Reserves the next free time span of a copy engine, from not_before_ns on, and returns the end of that span. The end
 * may lie in the past if the process enqueued the copy late. While copies run in both directions of the link, each
 * direction is slower. */
uint64_t soft_reserve_link(int number, int direction, uint64_t not_before_ns, uint64_t bytes)
{
    struct soft_state *state = soft_state();
    struct soft_device *device = &state->devices[number];
    uint64_t rate = state->link_bytes_per_us[direction];
    uint64_t length_ns = bytes * 1000 / rate + SOFT_COPY_START_NS;
    if (atomic_load(&device->engine_until_ns[1 - direction]) > not_before_ns)
        length_ns = length_ns * 1000 / SOFT_BOTH_WAYS_PERMILLE;
    uint64_t until = atomic_load(&device->engine_until_ns[direction]), end;
    do {
        end = (until > not_before_ns ? until : not_before_ns) + length_ns;
    } while (!atomic_compare_exchange_weak(&device->engine_until_ns[direction], &until, end));
    soft_note_engine(number, direction, end);
    return end;
}

enum direction { TO_DEVICE = SOFT_TO_DEVICE, TO_HOST, ON_DEVICE };

static CUresult copy(word to, word from, size_t bytes, enum direction direction, struct soft_stream *stream, bool waits)
{
    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (direction != ON_DEVICE && !soft_is_within_its_span(direction == TO_DEVICE ? from : to, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (direction == ON_DEVICE || stream->capture != CU_CAPTURE_NONE) {
        struct soft_op contents = {.to = (void *)to, .from = (const void *)from, .bytes = bytes};
        return soft_enqueue_filling(stream, soft_on_device(bytes), contents, waits);
    }
    return soft_enqueue_copy(stream, direction, (void *)to, (const void *)from, bytes, waits);
}

#define COPY(name, direction, per_thread)                                         \
    EXPORT CUresult name(word to, word from, size_t bytes)                        \
    {                                                                             \
        return copy(to, from, bytes, direction, soft_stream_of(NULL, per_thread), true); \
    }
#define COPY_ASYNC(name, direction, per_thread)                                   \
    EXPORT CUresult name(word to, word from, size_t bytes, CUstream stream)       \
    {                                                                             \
        return copy(to, from, bytes, direction, soft_stream_of(stream, per_thread), false); \
    }
COPY(cuMemcpyHtoD_v2, TO_DEVICE, false)
COPY(cuMemcpyHtoD_v2_ptds, TO_DEVICE, true)
COPY(cuMemcpyDtoH_v2, TO_HOST, false)
COPY(cuMemcpyDtoH_v2_ptds, TO_HOST, true)
COPY(cuMemcpyDtoD_v2, ON_DEVICE, false)
COPY_ASYNC(cuMemcpyHtoDAsync_v2, TO_DEVICE, false)
COPY_ASYNC(cuMemcpyHtoDAsync_v2_ptsz, TO_DEVICE, true)
COPY_ASYNC(cuMemcpyDtoHAsync_v2, TO_HOST, false)
COPY_ASYNC(cuMemcpyDtoHAsync_v2_ptsz, TO_HOST, true)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, ON_DEVICE, false)
COPY_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, ON_DEVICE, true)

static enum direction direction_of(word to, word from)
{
    return !soft_is_device_memory(to) ? TO_HOST : soft_is_device_memory(from) ? ON_DEVICE : TO_DEVICE;
}

#define COPY_ANY(name, per_thread)                                                \
    EXPORT CUresult name(word to, word from, size_t bytes)                        \
    {                                                                             \
        return copy(to, from, bytes, direction_of(to, from), soft_stream_of(NULL, per_thread), true); \
    }
#define COPY_ANY_ASYNC(name, per_thread)                                          \
    EXPORT CUresult name(word to, word from, size_t bytes, CUstream stream)       \
    {                                                                             \
        return copy(to, from, bytes, direction_of(to, from), soft_stream_of(stream, per_thread), false); \
    }
COPY_ANY(cuMemcpy, false)
COPY_ANY_ASYNC(cuMemcpyAsync, false)
COPY_ANY_ASYNC(cuMemcpyAsync_ptsz, true)

/* ---- copies of rows ---- */

static CUresult rows(const struct cu_copy_2d *c, struct soft_stream *stream, bool waits)
{
    if (!c || c->from_type == 3 || c->to_type == 3)
        return CUDA_ERROR_INVALID_VALUE; /* arrays have no contents on the software GPU */
    word from = c->from_type == 1 ? (word)c->from_host : (word)c->from_device;
    word to = c->to_type == 1 ? (word)c->to_host : (word)c->to_device;
    enum direction direction = !soft_is_device_memory(from) ? TO_DEVICE : soft_is_device_memory(to) ? ON_DEVICE : TO_HOST;
    CUresult result = CUDA_SUCCESS;
    for (size_t y = 0; y < c->height && result == CUDA_SUCCESS; y++)
        result = copy(to + (c->to_y + y) * c->to_pitch + c->to_x, from + (c->from_y + y) * c->from_pitch + c->from_x,
                      c->width, direction, stream, waits && y + 1 == c->height);
    return result;
}

EXPORT CUresult cuMemcpy2D_v2(const struct cu_copy_2d *c)
{
    return rows(c, soft_stream_of(NULL, false), true);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const struct cu_copy_2d *c)
{
    return cuMemcpy2D_v2(c);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const struct cu_copy_2d *c, CUstream stream)
{
    return rows(c, soft_stream_of(stream, false), false);
}
