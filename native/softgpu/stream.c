/* Streams and captures. A call that a capture forbids returns the driver's error and invalidates the capture. */
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"

#define MAX_CAPTURES 64

static __thread int thread_mode = CU_CAPTURE_MODE_GLOBAL;
static __thread struct soft_stream *per_thread;
static struct soft_stream *captures[MAX_CAPTURES]; /* protected by soft_lock */
static _Atomic int capture_count;

static uint64_t this_thread(void)
{
    return (uint64_t)pthread_self();
}

struct soft_stream *soft_stream_new(struct soft_context *context, bool blocking, int priority)
{
    struct soft_stream *stream = calloc(1, sizeof *stream);
    stream->kind = SOFT_STREAM;
    stream->context = context;
    stream->blocking = blocking;
    stream->priority = priority;
    return stream;
}

struct soft_stream *soft_stream_of(CUstream handle, bool use_per_thread)
{
    struct soft_context *context = soft_current();
    uintptr_t value = (uintptr_t)handle;
    if (value > CU_STREAM_PER_THREAD_VALUE) {
        struct soft_stream *stream = (struct soft_stream *)handle;
        return stream->kind == SOFT_STREAM ? stream : NULL;
    }
    if (!context || context->kind != SOFT_CONTEXT)
        return NULL;
    if (value == CU_STREAM_PER_THREAD_VALUE || (value == 0 && use_per_thread)) {
        if (!per_thread || per_thread->context != context)
            per_thread = soft_stream_new(context, true, 0);
        return per_thread;
    }
    return context->legacy;
}

uint64_t soft_context_tail(struct soft_context *context)
{
    pthread_mutex_lock(&soft_lock);
    uint64_t tail = context->legacy->tail_ns > context->per_thread_tail_ns ? context->legacy->tail_ns
                                                                           : context->per_thread_tail_ns;
    for (struct soft_stream *stream = context->streams; stream; stream = stream->next)
        tail = stream->tail_ns > tail ? stream->tail_ns : tail;
    pthread_mutex_unlock(&soft_lock);
    return tail;
}

/* ---- rules about calls during a capture ---- */

/* invalidates one capture, or all if `graph` is NULL; the caller holds soft_lock */
void soft_invalidate(struct soft_graph *graph)
{
    for (int i = 0; i < MAX_CAPTURES; i++)
        if (captures[i] && (!graph || captures[i]->capture_graph == graph))
            captures[i]->capture = CU_CAPTURE_INVALIDATED;
}

CUresult soft_unsafe_call(void)
{
    if (atomic_load(&capture_count) == 0 || thread_mode == CU_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&soft_lock);
    for (int i = 0; i < MAX_CAPTURES; i++)
        if (captures[i] && captures[i]->capture == CU_CAPTURE_ACTIVE &&
            ((captures[i]->capture_mode == CU_CAPTURE_MODE_GLOBAL && thread_mode == CU_CAPTURE_MODE_GLOBAL) ||
             (captures[i]->capture_mode != CU_CAPTURE_MODE_RELAXED && captures[i]->capture_thread == this_thread()))) {
            soft_invalidate(captures[i]->capture_graph);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    pthread_mutex_unlock(&soft_lock);
    return result;
}

static CUresult forbidden_on(struct soft_stream *stream)
{
    if (stream->capture == CU_CAPTURE_NONE)
        return soft_unsafe_call();
    pthread_mutex_lock(&soft_lock);
    soft_invalidate(stream->capture_graph);
    pthread_mutex_unlock(&soft_lock);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* A call on the legacy stream synchronises it with all blocking streams, which is forbidden while one of them is being
 * captured: then returns an error. */
static CUresult beside_capture(struct soft_stream *stream, bool invalidate)
{
    if (atomic_load(&capture_count) == 0 || stream != stream->context->legacy)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&soft_lock);
    for (int i = 0; i < MAX_CAPTURES; i++)
        if (captures[i] && captures[i]->blocking && captures[i]->context == stream->context) {
            if (invalidate)
                soft_invalidate(captures[i]->capture_graph);
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    pthread_mutex_unlock(&soft_lock);
    return result;
}

/* Checks a driver call on a stream. If the call is forbidden, invalidates the capture. */
CUresult soft_legacy_beside_capture(struct soft_stream *stream)
{
    return beside_capture(stream, true);
}

CUresult soft_join_capture(struct soft_stream *stream, struct soft_graph *graph, int mode, bool origin)
{
    int place = 0;
    while (place < MAX_CAPTURES && captures[place])
        place++;
    if (place == MAX_CAPTURES)
        return CUDA_ERROR_OUT_OF_MEMORY;
    captures[place] = stream;
    atomic_fetch_add(&capture_count, 1);
    stream->capture = CU_CAPTURE_ACTIVE;
    stream->capture_mode = mode;
    stream->capture_thread = this_thread();
    stream->capture_graph = graph;
    stream->capture_origin = origin;
    return CUDA_SUCCESS;
}

static CUresult begin_capture(struct soft_stream *stream, int mode)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    soft_take_time();
    if (stream == stream->context->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture != CU_CAPTURE_NONE)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct soft_graph *graph = calloc(1, sizeof *graph);
    graph->kind = SOFT_GRAPH;
    pthread_mutex_lock(&soft_lock);
    CUresult result = soft_join_capture(stream, graph, mode, true);
    pthread_mutex_unlock(&soft_lock);
    return result;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int mode)
{
    return begin_capture(soft_stream_of(handle, false), mode);
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream handle, int mode)
{
    return begin_capture(soft_stream_of(handle, true), mode);
}

static CUresult end_capture(struct soft_stream *stream, struct soft_graph **out)
{
    if (!stream || stream->capture == CU_CAPTURE_NONE || !stream->capture_origin)
        return CUDA_ERROR_ILLEGAL_STATE;
    pthread_mutex_lock(&soft_lock);
    struct soft_graph *graph = stream->capture_graph;
    bool good = true;
    for (int i = 0; i < MAX_CAPTURES; i++)
        if (captures[i] && captures[i]->capture_graph == graph) {
            good = good && captures[i]->capture == CU_CAPTURE_ACTIVE;
            captures[i]->capture = CU_CAPTURE_NONE;
            captures[i]->capture_graph = NULL;
            captures[i] = NULL;
            atomic_fetch_sub(&capture_count, 1);
        }
    pthread_mutex_unlock(&soft_lock);
    *out = good ? graph : NULL;
    return good ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, struct soft_graph **out)
{
    return end_capture(soft_stream_of(handle, false), out);
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream handle, struct soft_graph **out)
{
    return end_capture(soft_stream_of(handle, true), out);
}

static CUresult is_capturing(struct soft_stream *stream, int *status)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    *status = stream->capture;
    return beside_capture(stream, false);
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, int *status)
{
    return is_capturing(soft_stream_of(handle, false), status);
}

EXPORT CUresult cuStreamIsCapturing_ptsz(CUstream handle, int *status)
{
    return is_capturing(soft_stream_of(handle, true), status);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- work ---- */

static CUresult may_work(struct soft_stream *stream)
{
    soft_pass();
    CUresult implicit = soft_legacy_beside_capture(stream);
    if (implicit != CUDA_SUCCESS)
        return implicit;
    uint64_t oldest = stream->ends[stream->queued % SOFT_QUEUE_DEPTH];
    if (oldest > soft_clock(stream->context))
        soft_wait(stream->context, oldest);
    return CUDA_SUCCESS;
}

static void queued(struct soft_stream *stream, uint64_t end, bool waits)
{
    stream->tail_ns = end;
    stream->ends[stream->queued++ % SOFT_QUEUE_DEPTH] = end;
    if (stream == per_thread && end > stream->context->per_thread_tail_ns)
        stream->context->per_thread_tail_ns = end;
    if (waits)
        soft_wait(stream->context, end);
}

static void deferred(struct soft_stream *stream, bool waits)
{
    if (!waits)
        return;
    soft_settle(stream);
    soft_wait(stream->context, stream->tail_ns);
}

/* Appends a unit of work to a stream, together with its copies and memsets on the device. If `waits` is set, the
 * host waits for its end. */
CUresult soft_enqueue_filling(struct soft_stream *stream, struct soft_unit unit, struct soft_op contents, bool waits)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != CU_CAPTURE_NONE)
        return stream->capture == CU_CAPTURE_ACTIVE
                   ? soft_add_node(stream, (struct soft_node){.length_ns = unit.length_ns, .sms = unit.sms, .contents = contents})
                   : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    CUresult result = may_work(stream);
    if (result != CUDA_SUCCESS)
        return result;
    contents.kind = SOFT_OP_WORK;
    contents.unit = unit;
    if (soft_defer(stream, contents)) {
        deferred(stream, waits);
        return CUDA_SUCCESS;
    }
    soft_make_contents(&contents);
    queued(stream, soft_schedule_work(stream->context, stream->tail_ns, unit), waits);
    return CUDA_SUCCESS;
}

CUresult soft_enqueue(struct soft_stream *stream, struct soft_unit unit, bool waits)
{
    return soft_enqueue_filling(stream, unit, (struct soft_op){0}, waits);
}

/* Appends to a stream a copy between host and device, which uses the link between them. */
CUresult soft_enqueue_copy(struct soft_stream *stream, int direction, void *to, const void *from, uint64_t bytes, bool waits)
{
    CUresult result = may_work(stream);
    if (result != CUDA_SUCCESS || bytes == 0)
        return result;
    bool pageable = soft_is_pageable((uintptr_t)(direction == SOFT_TO_DEVICE ? from : to));
    if (pageable) {
        /* when the call returns, the program may change or read the memory, so the copy must be done now */
        soft_settle(stream);
        waits |= direction != SOFT_TO_DEVICE;
    }
    struct soft_op op = {.kind = SOFT_OP_WORK, .over_link = true, .direction = direction, .to = to, .from = from, .bytes = bytes};
    if (soft_defer(stream, op)) {
        deferred(stream, waits);
        return CUDA_SUCCESS;
    }
    /* all contexts share the link, so times on the link are by the host's clock */
    uint64_t delay = soft_delay(stream->context), now = soft_now_ns();
    uint64_t begin = stream->tail_ns + delay > now ? stream->tail_ns + delay : now;
    uint64_t end = soft_reserve_link(stream->context->device, direction, begin, bytes);
    soft_make_contents(&op);
    queued(stream, end - delay, waits);
    if (pageable && bytes > SOFT_PAGEABLE_SMALL_BYTES)
        soft_sleep_until(begin + bytes * 1000 / soft_state()->link_bytes_per_us[direction] * 1000 / SOFT_PAGEABLE_PERMILLE);
    return CUDA_SUCCESS;
}

/* ---- streams ---- */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    CHECK_CONTEXT();
    struct soft_stream *stream = soft_stream_new(context, !(flags & 1), priority);
    pthread_mutex_lock(&soft_lock);
    stream->next = context->streams;
    context->streams = stream;
    pthread_mutex_unlock(&soft_lock);
    *out = (CUstream)stream;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    return cuStreamCreateWithPriority(out, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle)
{
    CHECK_READY();
    struct soft_stream *stream = (uintptr_t)handle > 2 ? (struct soft_stream *)handle : NULL;
    if (!stream || stream->kind != SOFT_STREAM)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&soft_lock);
    for (struct soft_stream **link = &stream->context->streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    stream->kind = 0;
    pthread_mutex_unlock(&soft_lock);
    return CUDA_SUCCESS;
}

static CUresult query_stream(struct soft_stream *stream)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    soft_take_time();
    CUresult forbidden = forbidden_on(stream);
    if (forbidden != CUDA_SUCCESS)
        return forbidden;
    CUresult implicit = soft_legacy_beside_capture(stream);
    if (implicit != CUDA_SUCCESS)
        return implicit;
    return !soft_is_held(stream) && stream->tail_ns <= soft_clock(stream->context) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult synchronize_stream(struct soft_stream *stream)
{
    CUresult state = query_stream(stream);
    if (state != CUDA_SUCCESS && state != CUDA_ERROR_NOT_READY)
        return state;
    soft_settle(stream);
    soft_wait(stream->context, stream->tail_ns);
    soft_pools_trim(stream->context->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamQuery(CUstream handle)
{
    return query_stream(soft_stream_of(handle, false));
}

EXPORT CUresult cuStreamQuery_ptsz(CUstream handle)
{
    return query_stream(soft_stream_of(handle, true));
}

EXPORT CUresult cuStreamSynchronize(CUstream handle)
{
    return synchronize_stream(soft_stream_of(handle, false));
}

EXPORT CUresult cuStreamSynchronize_ptsz(CUstream handle)
{
    return synchronize_stream(soft_stream_of(handle, true));
}

EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *out)
{
    struct soft_stream *stream = soft_stream_of(handle, false);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = (CUcontext)stream->context;
    return CUDA_SUCCESS;
}
