/* Stream operations that wait for a word in memory, or write one.
 *
 * The schedule of a device can contain only work whose end can be computed when the work is enqueued. A wait for a
 * word ends when some processor stores a value, which cannot be computed. So from such a wait on, the stream is
 * *held*: its later operations are kept in a list. One thread of the process, the pump thread, moves them to the
 * schedule in order, each at its time. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "softgpu.h"

#define LOOK_NS 20000
#define MOST_LATE_NS 50000000 /* work is scheduled as if the pump thread were never later than this */

/* protects the lists of all streams, the list of held streams, and the pump thread */
static pthread_mutex_t ops_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ops_there = PTHREAD_COND_INITIALIZER;
static struct soft_stream *held;
static bool pump_runs;

/* ---- one operation: the function returns true when it is finished; otherwise it sets *look_ns to the time of the
 * next check ---- */

static bool has_come(const struct soft_op *op)
{
    int32_t ahead = (int32_t)(__atomic_load_n(op->word, __ATOMIC_ACQUIRE) - op->value);
    return op->compare == 0 ? ahead >= 0 : op->compare == 1 ? ahead == 0 : (*op->word & op->value) != 0;
}

/* Carries out the copies and memsets of a unit of work. */
void soft_make_contents(const struct soft_op *op)
{
    if (op->to && op->from)
        memmove(op->to, op->from, op->bytes);
    else if (op->to && op->element_bytes)
        for (uint64_t at = 0; at < op->bytes; at += op->element_bytes)
            memcpy((char *)op->to + at, &op->element, op->element_bytes);
    for (uint32_t i = 0; i < op->part_count; i++)
        soft_make_contents(&op->parts[i]);
}

static void work(struct soft_stream *stream, const struct soft_op *op, uint64_t now)
{
    /* Time spans in the past can be reserved. So the work begins when the earlier work in its stream ended, even if
     * the pump thread is late. */
    uint64_t begin = op->over_link || stream->tail_ns > op->queued_ns ? stream->tail_ns : op->queued_ns;
    struct soft_unit unit = op->unit;
    unit.overdue = begin < now;
    if (begin + MOST_LATE_NS < now)
        begin = now - MOST_LATE_NS;
    uint64_t delay = op->over_link ? soft_delay(stream->context) : 0;
    stream->tail_ns =
        op->over_link ? soft_reserve_link(stream->context->device, op->direction, begin + delay, op->bytes) - delay
                      : soft_schedule_work(stream->context, begin, unit);
    soft_make_contents(op);
}

static bool carry_out(struct soft_stream *stream, struct soft_op *op, uint64_t now, uint64_t *look_ns)
{
    uint64_t tail = stream->tail_ns;
    bool in_time = op->kind == SOFT_OP_WRITE || op->kind == SOFT_OP_WAIT;
    if (in_time && tail > now) {
        uint64_t expected = soft_expect(stream->context, tail);
        *look_ns = expected < *look_ns ? expected : *look_ns;
        return false;
    }
    uint64_t soon = soft_now_ns() + LOOK_NS;
    switch (op->kind) {
    case SOFT_OP_WRITE:
        __atomic_store_n(op->word, op->value, __ATOMIC_RELEASE);
        return true;
    case SOFT_OP_WAIT:
        if (has_come(op)) {
            /* an earlier check did not find the value, so the value has been written since then and the stream
             * continues now */
            if (op->looked)
                stream->tail_ns = now;
            return true;
        }
        op->looked = true;
        break;
    case SOFT_OP_RECORD:
        if (op->event->generation == op->generation)
            op->event->when_ns = tail > op->queued_ns ? tail : op->queued_ns;
        return true;
    case SOFT_OP_WAIT_EVENT:
        if (op->event->generation != op->generation)
            return true;
        if (op->event->when_ns == SOFT_UNKNOWN_NS)
            break;
        if (soft_event_for(op->event, stream->context) > tail)
            stream->tail_ns = soft_event_for(op->event, stream->context);
        return true;
    case SOFT_OP_WORK:
        work(stream, op, now);
        return true;
    }
    *look_ns = soon < *look_ns ? soon : *look_ns;
    return false;
}

/* Destroys an event. As in CUDA, streams that wait for the event or will record it are not affected: it is freed after
 * the last operation that names it. */
void soft_event_destroy(struct soft_event *event)
{
    pthread_mutex_lock(&ops_lock);
    event->kind = 0;
    bool unused = event->uses == 0;
    pthread_mutex_unlock(&ops_lock);
    if (unused)
        free(event);
}

/* the caller holds ops_lock, which protects the lists */
static void finish(struct soft_op *op)
{
    if (op->event && --op->event->uses == 0 && op->event->kind != SOFT_EVENT)
        free(op->event);
    free(op);
}

static void *pump(void *unused)
{
    (void)unused;
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    pthread_mutex_lock(&ops_lock);
    for (;;) {
        uint64_t look_ns = SOFT_UNKNOWN_NS;
        for (struct soft_stream **link = &held; *link;) {
            struct soft_stream *stream = *link;
            while (stream->first_op && carry_out(stream, stream->first_op, soft_clock(stream->context), &look_ns)) {
                struct soft_op *done = stream->first_op;
                stream->first_op = done->next;
                finish(done);
            }
            if (!stream->first_op)
                *link = stream->next_held;
            else
                link = &stream->next_held;
        }
        if (!held) {
            pthread_cond_wait(&ops_there, &ops_lock);
            continue;
        }
        pthread_mutex_unlock(&ops_lock);
        soft_sleep_until(look_ns);
        pthread_mutex_lock(&ops_lock);
    }
    return NULL;
}

static void in_child(void)
{
    static const pthread_mutex_t fresh_lock = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&ops_lock, &fresh_lock, sizeof fresh_lock);
    held = NULL;
    pump_runs = false;
}

/* the caller holds ops_lock, which protects the lists of held streams */
static void append(struct soft_stream *stream, struct soft_op op)
{
    struct soft_op *kept = malloc(sizeof *kept);
    *kept = op;
    kept->next = NULL;
    kept->queued_ns = soft_clock(stream->context);
    if (kept->event)
        kept->event->uses++;
    bool first = !stream->first_op;
    if (first)
        stream->first_op = kept;
    else
        stream->last_op->next = kept;
    stream->last_op = kept;
    if (!first)
        return;
    if (stream->tail_ns < kept->queued_ns)
        stream->tail_ns = kept->queued_ns;
    stream->next_held = held;
    held = stream;
    pthread_t thread;
    if (!pump_runs && pthread_create(&thread, NULL, pump, NULL) == 0) {
        static bool told;
        if (!told)
            told = pthread_atfork(NULL, NULL, in_child) == 0;
        pump_runs = true;
        pthread_detach(thread);
    }
    pthread_cond_signal(&ops_there);
}

/* If the stream is held, appends the operation to the stream's list; otherwise returns false. */
bool soft_defer(struct soft_stream *stream, struct soft_op op)
{
    if (!soft_is_held(stream))
        return false;
    pthread_mutex_lock(&ops_lock);
    bool kept = stream->first_op != NULL;
    if (kept)
        append(stream, op);
    pthread_mutex_unlock(&ops_lock);
    return kept;
}

bool soft_is_held(struct soft_stream *stream)
{
    return __atomic_load_n(&stream->first_op, __ATOMIC_ACQUIRE) != NULL;
}

/* Waits until a stream is no longer held; if `stream` is NULL, until no stream of the process is held. */
void soft_settle(struct soft_stream *stream)
{
    while (stream ? soft_is_held(stream) : __atomic_load_n(&held, __ATOMIC_ACQUIRE) != NULL)
        soft_sleep_until(soft_now_ns() + LOOK_NS);
}

/* Appends an operation to the stream's list; from then on the stream is held. */
CUresult soft_hold(struct soft_stream *stream, struct soft_op op)
{
    pthread_mutex_lock(&ops_lock);
    append(stream, op);
    pthread_mutex_unlock(&ops_lock);
    return CUDA_SUCCESS;
}

/* ---- entry points ---- */

static CUresult word_operation(struct soft_stream *stream, struct soft_op op)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != CU_CAPTURE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult implicit = soft_legacy_beside_capture(stream);
    if (implicit != CUDA_SUCCESS)
        return implicit;
    return soft_hold(stream, op);
}

#define WORD(name, op_kind, per_thread)                                                                     \
    EXPORT CUresult name(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)              \
    {                                                                                                       \
        return word_operation(soft_stream_of(stream, per_thread),                                           \
                              (struct soft_op){.kind = op_kind, .word = (uint32_t *)(uintptr_t)address,     \
                                               .value = value, .compare = flags & 3});                      \
    }
WORD(cuStreamWaitValue32_v2, SOFT_OP_WAIT, false)
WORD(cuStreamWaitValue32_v2_ptsz, SOFT_OP_WAIT, true)
WORD(cuStreamWriteValue32_v2, SOFT_OP_WRITE, false)
WORD(cuStreamWriteValue32_v2_ptsz, SOFT_OP_WRITE, true)

struct word_operation { /* CUstreamBatchMemOpParams */
    uint32_t kind, unused_0;
    CUdeviceptr address;
    uint64_t value;
    uint32_t flags, unused_1;
    uint64_t unused_2[2];
};
enum { BATCH_WAIT_32 = 1, BATCH_WRITE_32 = 2 };

static CUresult batch(struct soft_stream *stream, unsigned count, const struct word_operation *operations)
{
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
        if (operations[i].kind != BATCH_WAIT_32 && operations[i].kind != BATCH_WRITE_32)
            return CUDA_ERROR_NOT_SUPPORTED;
        struct soft_op op = {.kind = operations[i].kind == BATCH_WAIT_32 ? SOFT_OP_WAIT : SOFT_OP_WRITE,
                             .word = (uint32_t *)(uintptr_t)operations[i].address,
                             .value = (uint32_t)operations[i].value,
                             .compare = operations[i].flags & 3};
        result = word_operation(stream, op);
    }
    return result;
}

EXPORT CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, const struct word_operation *operations, unsigned flags)
{
    (void)flags;
    return batch(soft_stream_of(stream, false), count, operations);
}

EXPORT CUresult cuStreamBatchMemOp_v2_ptsz(CUstream stream, unsigned count, const struct word_operation *operations, unsigned flags)
{
    (void)flags;
    return batch(soft_stream_of(stream, true), count, operations);
}
