/* Events: each stores the time at which the work before it in its stream ends. */
#include <stdlib.h>

#include "softgpu.h"

static struct soft_event *event_of(CUevent handle)
{
    struct soft_event *event = (struct soft_event *)handle;
    return event && event->kind == SOFT_EVENT ? event : NULL;
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CHECK_CONTEXT();
    (void)context;
    struct soft_event *event = calloc(1, sizeof *event);
    event->kind = SOFT_EVENT;
    event->flags = flags;
    *out = (CUevent)event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle)
{
    struct soft_event *event = event_of(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    soft_event_destroy(event);
    return CUDA_SUCCESS;
}

/* Returns the time of an event by the clock of `context`. Each context has a clock of its own (slices.c); when_ns is by
 * the clock of the event's context. */
uint64_t soft_event_for(const struct soft_event *event, const struct soft_context *context)
{
    if (event->context == context || event->when_ns == 0)
        return event->when_ns;
    uint64_t when = event->when_ns + soft_delay(event->context), delay = soft_delay(context);
    return when > delay ? when - delay : 0;
}

static CUresult record(CUevent handle, struct soft_stream *stream)
{
    struct soft_event *event = event_of(handle);
    if (!event || !stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != CU_CAPTURE_NONE) {
        event->captured_in = stream->capture_graph;
        return CUDA_SUCCESS;
    }
    CUresult implicit = soft_legacy_beside_capture(stream);
    if (implicit != CUDA_SUCCESS)
        return implicit;
    event->generation++;
    event->recorded = true;
    event->captured_in = NULL;
    event->context = stream->context;
    if (soft_is_held(stream)) {
        event->when_ns = SOFT_UNKNOWN_NS;
        if (soft_defer(stream, (struct soft_op){.kind = SOFT_OP_RECORD, .event = event, .generation = event->generation}))
            return CUDA_SUCCESS;
    }
    uint64_t now = soft_clock(stream->context);
    uint64_t tail = stream == stream->context->legacy ? soft_context_tail(stream->context) : stream->tail_ns;
    event->when_ns = tail > now ? tail : now;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream handle)
{
    return record(event, soft_stream_of(handle, false));
}

EXPORT CUresult cuEventRecord_ptsz(CUevent event, CUstream handle)
{
    return record(event, soft_stream_of(handle, true));
}

EXPORT CUresult cuEventQuery(CUevent handle)
{
    struct soft_event *event = event_of(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured_in) {
        pthread_mutex_lock(&soft_lock);
        soft_invalidate(event->captured_in);
        pthread_mutex_unlock(&soft_lock);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    CUresult forbidden = soft_unsafe_call();
    if (forbidden != CUDA_SUCCESS)
        return forbidden;
    return event->when_ns <= soft_clock(event->context) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent handle)
{
    CUresult state = cuEventQuery(handle);
    if (state == CUDA_ERROR_NOT_READY) {
        struct soft_event *event = event_of(handle);
        while (event->when_ns == SOFT_UNKNOWN_NS)
            soft_sleep_until(soft_now_ns() + 20000);
        soft_wait(event->context, event->when_ns);
        return CUDA_SUCCESS;
    }
    return state;
}

EXPORT CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
    struct soft_event *begin = event_of(from), *end = event_of(to);
    if (!begin || !end || !begin->recorded || !end->recorded || (begin->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (begin->when_ns > soft_clock(begin->context) || end->when_ns > soft_clock(end->context))
        return CUDA_ERROR_NOT_READY;
    *ms = (float)((double)(int64_t)(end->when_ns - begin->when_ns) / 1e6);
    return CUDA_SUCCESS;
}

static CUresult wait_event(struct soft_stream *stream, CUevent handle)
{
    struct soft_event *event = event_of(handle);
    if (!event || !stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured_in && stream->capture == CU_CAPTURE_NONE) {
        pthread_mutex_lock(&soft_lock);
        CUresult result = soft_join_capture(stream, event->captured_in, CU_CAPTURE_MODE_GLOBAL, false);
        pthread_mutex_unlock(&soft_lock);
        return result;
    }
    struct soft_op op = {.kind = SOFT_OP_WAIT_EVENT, .event = event, .generation = event->generation};
    if (stream->capture == CU_CAPTURE_NONE && (event->when_ns == SOFT_UNKNOWN_NS || soft_is_held(stream)))
        return soft_hold(stream, op);
    uint64_t when = soft_event_for(event, stream->context);
    if (stream->capture == CU_CAPTURE_NONE && when > stream->tail_ns)
        stream->tail_ns = when;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags)
{
    (void)flags;
    return wait_event(soft_stream_of(handle, false), event);
}

EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream handle, CUevent event, unsigned flags)
{
    (void)flags;
    return wait_event(soft_stream_of(handle, true), event);
}
