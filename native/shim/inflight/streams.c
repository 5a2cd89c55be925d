/* The streams into which the process has launched. When none of them has pending work, the GPU has drained: it has
 * finished all work of the process.
 *
 * Launches into a stream that is being captured are not executed. So they do not wait at the gates and are not
 * counted as work, and the shim must not record anything in such a stream. cot_capture_lock is held while the shim uses
 * streams or events, and while a capture begins or ends, so the two never happen at the same time. */
#define _GNU_SOURCE
#include <string.h>

#include "shim.h"
#include "swap/swap.h"

#define STREAMS 1024
#define CAPTURES 256

struct stream cot_no_stream = {.handle = COT_NO_STREAM};
_Atomic uint32_t cot_captures;
pthread_mutex_t cot_capture_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
/* a free record has the handle COT_NO_STREAM; records are never moved, so pointers to them stay valid */
static struct stream streams[STREAMS];
static uint32_t stream_count, next_victim;
static CUstream capturing[CAPTURES]; /* protected by cot_capture_lock */


struct stream *cot_stream_find(CUstream handle, CUcontext context, struct gpu *gpu)
{
    struct stream *free_record = NULL;
    pthread_mutex_lock(&list_lock);
    for (uint32_t i = 0; i < stream_count; i++) {
        if (streams[i].handle == handle && streams[i].context == context) {
            pthread_mutex_unlock(&list_lock);
            return &streams[i];
        }
        if (!free_record && streams[i].handle == COT_NO_STREAM)
            free_record = &streams[i];
    }
    if (!free_record && stream_count < STREAMS)
        free_record = &streams[stream_count++];
    if (!free_record) { /* there are more streams than records, so the shim no longer knows one of the streams */
        free_record = &streams[next_victim++ % STREAMS];
        cot_calls_forget_stream(free_record->handle);
    }
    free_record->context = context;
    free_record->gpu = gpu;
    free_record->drain_event = NULL;
    free_record->marked_at = 0;
    free_record->handle = handle;
    pthread_mutex_unlock(&list_lock);
    return free_record;
}

static void end_capture_locked(CUstream handle)
{
    for (uint32_t i = 0; i < CAPTURES; i++)
        if (capturing[i] == handle) {
            capturing[i] = NULL;
            atomic_fetch_sub(&cot_captures, 1);
            return;
        }
}

void cot_stream_gone(CUstream handle)
{
    pthread_mutex_lock(&cot_capture_lock);
    end_capture_locked(handle);
    pthread_mutex_lock(&list_lock);
    for (uint32_t i = 0; i < stream_count; i++)
        if (streams[i].handle == handle)
            streams[i].handle = COT_NO_STREAM;
    cot_calls_forget_stream(handle);
    pthread_mutex_unlock(&list_lock);
    pthread_mutex_unlock(&cot_capture_lock);
}

void cot_streams_context_gone(CUcontext context)
{
    pthread_mutex_lock(&cot_capture_lock);
    pthread_mutex_lock(&list_lock);
    for (uint32_t i = 0; i < stream_count; i++)
        if (streams[i].context == context && streams[i].handle != COT_NO_STREAM) {
            end_capture_locked(streams[i].handle);
            streams[i].handle = COT_NO_STREAM;
        }
    cot_calls_forget_stream(COT_NO_STREAM);
    pthread_mutex_unlock(&list_lock);
    pthread_mutex_unlock(&cot_capture_lock);
}

/* Returns whether a stream is being captured into a graph. Also returns true if the driver refuses to answer, which it
 * does for the legacy stream while another stream is being captured. */
bool cot_stream_is_capturing(CUstream handle)
{
    int status = CU_CAPTURE_NONE;
    CUresult result = REAL(cuStreamIsCapturing)(handle, &status);
    return result != CUDA_SUCCESS || status != CU_CAPTURE_NONE;
}

/* ---- captures ---- */

/* The lock is held until cot_capture_after_begin. Otherwise a thread of the shim could find that the stream is not being
 * captured, and query it after the driver has begun the capture, which would invalidate it. */
void cot_capture_before_begin(void)
{
    pthread_mutex_lock(&cot_capture_lock);
    atomic_fetch_add(&cot_captures, 1);
}

void cot_capture_after_begin(CUstream handle, CUresult result)
{
    uint32_t place = 0;
    while (place < CAPTURES && capturing[place])
        place++;
    if (result == CUDA_SUCCESS && place < CAPTURES)
        capturing[place] = handle;
    else
        atomic_fetch_sub(&cot_captures, 1);
    pthread_mutex_unlock(&cot_capture_lock);
    if (result == CUDA_SUCCESS && cot_thread_get()) { /* launches into the captured stream must take the slow path */
        cot_thread->stream = &cot_no_stream;
        atomic_store(&cot_calls->handle, COT_NO_STREAM);
    }
}

/* Called after the driver has ended a capture. cot_captures still counts the capture during the driver's call, so
 * that the helper thread queries no stream in that time. */
void cot_capture_after_end(CUstream handle)
{
    if (atomic_load(&cot_captures) == 0)
        return;
    pthread_mutex_lock(&cot_capture_lock);
    int status = CU_CAPTURE_ACTIVE;
    CUresult result = REAL(cuStreamIsCapturing)(handle, &status);
    if (result != CUDA_SUCCESS || status == CU_CAPTURE_NONE)
        end_capture_locked(handle);
    pthread_mutex_unlock(&cot_capture_lock);
}

/* ---- draining: has the GPU finished all work? ---- */

static bool marked_end_reached(struct stream *stream)
{
    uint64_t started = cot_calls_sum(stream->gpu).started;
    /* the event is recorded in the legacy stream, which waits for every thread's per-thread stream */
    if (!stream->drain_event || stream->marked_at != started) {
        if (!stream->drain_event && REAL(cuEventCreate)(&stream->drain_event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
            return true;
        stream->marked_at = started;
        if (REAL(cuEventRecord)(stream->drain_event, NULL) != CUDA_SUCCESS)
            return true;
    }
    return REAL(cuEventQuery)(stream->drain_event) != CUDA_ERROR_NOT_READY;
}

static bool is_drained(struct stream *stream)
{
    CUstream handle = stream->handle;
    bool shared = handle == NULL || (uintptr_t)handle <= CU_STREAM_PER_THREAD_VALUE;
    if (atomic_load(&cot_captures) > 0 && cot_stream_is_capturing(shared ? NULL : handle))
        /* A stream that is being captured cannot be queried, and the captured work does not run now. The legacy stream
         * cannot be queried while a stream that synchronises with it is being captured. It may have work, so memory must
         * not be moved before the capture ends. */
        return !shared || !cot_swap_any();
    if ((uintptr_t)handle == CU_STREAM_PER_THREAD_VALUE)
        return marked_end_reached(stream);
    return REAL(cuStreamQuery)(handle) != CUDA_ERROR_NOT_READY;
}

void cot_exchange_capture_mode(int *mode)
{
    REAL(cuThreadExchangeStreamCaptureMode)(mode);
}

/* Returns whether the process has no pending work on a GPU. It queries streams and records nothing in the program's
 * own streams. It runs on the shim's threads, and on threads of a latency-sensitive program after they waited for
 * the GPU. Meanwhile the thread's capture mode is relaxed, so that the queries do not invalidate a capture. */
bool cot_streams_drained(struct gpu *gpu)
{
    int mode = CU_CAPTURE_MODE_RELAXED;
    cot_exchange_capture_mode(&mode);
    bool drained = true;
    for (uint32_t i = 0; i < stream_count && drained; i++) {
        struct stream *stream = &streams[i];
        if (stream->gpu != gpu || stream->handle == COT_NO_STREAM)
            continue;
        pthread_mutex_lock(&cot_capture_lock);
        if (stream->handle != COT_NO_STREAM &&
            REAL(cuCtxPushCurrent_v2)(stream->context) == CUDA_SUCCESS) {
            CUcontext popped;
            drained = is_drained(stream);
            REAL(cuCtxPopCurrent_v2)(&popped);
        }
        pthread_mutex_unlock(&cot_capture_lock);
    }
    cot_exchange_capture_mode(&mode);
    return drained;
}

void cot_streams_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&list_lock, &fresh, sizeof fresh);
    memcpy(&cot_capture_lock, &fresh, sizeof fresh);
    for (uint32_t i = 0; i < STREAMS; i++)
        streams[i].handle = COT_NO_STREAM;
    memset(capturing, 0, sizeof capturing);
    atomic_store(&cot_captures, 0);
}
