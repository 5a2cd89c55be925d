/* Work in flight is fenced about once per predicted millisecond, and the fences teach what launches cost.
 *
 * A launch is predicted by its key (kernel and grid, graph, kind and size of copy).  An interval is the launches of one
 * thread between two fences; when a fence is done, the time between it and the fence before it, by the GPU's own
 * clock, is compared with what was predicted, and every key in the interval is corrected by the ratio.  A long kernel
 * fills an interval alone, so its cost is known exactly after one run; short ones share.
 *
 * Nothing here runs while a stream of the process captures: an event query from another thread would break a capture
 * in global mode. */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "shim.h"

#define SPIN_NS 20000
#define NAP_NS 40000
#define COST_CEILING_NS INT64_C(60000000000)
#define TOLERANCE 0.1 /* a prediction this good is left alone */

DECLARE_REAL(cuEventCreate);
DECLARE_REAL(cuEventDestroy_v2);
DECLARE_REAL(cuEventRecord);
DECLARE_REAL(cuEventQuery);
DECLARE_REAL(cuEventElapsedTime);

static uint32_t corrected_in[(1 << COST_BITS) + COST_BESIDE]; /* number of the last interval that corrected an entry */
static _Atomic uint32_t interval_number;

static struct fence *at(struct ring *ring, uint32_t index)
{
    return &ring->fences[index % FENCES];
}

static CUresult query(struct fence *fence)
{
    return ((CUresult(*)(CUevent))REAL(cuEventQuery))(fence->event);
}

struct cost *cot_cost_of(uintptr_t key)
{
    struct cost *home = cot_cost(key), *empty = NULL;
    for (struct cost *cost = home; cost < home + COST_BESIDE; cost++) {
        if (cost->key == key)
            return cost;
        if (!cost->key && !empty)
            empty = cost;
    }
    struct cost *cost = empty ? empty : home; /* nowhere free: the one that was here is learned again if it returns */
    cost->ns = COST_UNKNOWN_NS;
    cost->key = key;
    return cost;
}

void cot_interval_begin(struct thread *t)
{
    t->log = t->calls->log_next = at(t->ring, t->ring->newest)->log;
    t->calls->budget_ns = t->gpu->deadline_ns == COTENANT_NO_DEADLINE ? INTERVAL_ALONE_NS : INTERVAL_NS;
    t->budget_begin_ns = t->calls->budget_ns;
}

void cot_ring_forget(struct ring *ring, bool destroy_events)
{
    for (uint32_t i = 0; i < FENCES; i++) {
        if (ring->fences[i].event && destroy_events)
            ((CUresult(*)(CUevent))REAL(cuEventDestroy_v2))(ring->fences[i].event);
        ring->fences[i].event = NULL;
    }
    ring->oldest = ring->newest = 0;
    ring->outstanding_ns = 0;
    ring->have_origin = ring->probe = ring->stalled = false;
}

static void scale(struct cost *cost, double ratio)
{
    int64_t ns = (int64_t)((double)cost->ns * ratio);
    if (ns < COST_FLOOR_NS)
        ns = COST_FLOOR_NS;
    cost->ns = ns > COST_CEILING_NS ? COST_CEILING_NS : ns;
}

static int64_t predict(const struct fence *fence)
{
    int64_t ns = 0;
    for (uint32_t i = 0; i < fence->count; i++)
        ns += fence->log[i]->ns;
    return ns;
}

static void learn(struct ring *ring, const struct fence *fence, double elapsed_ns)
{
    double ratio = elapsed_ns / (double)fence->predicted_ns;
    bool bound_only = !fence->exact && !fence->before_sync; /* may hold idle time */
    if (bound_only && ratio > 2.0)
        ring->probe = true;
    bool good = ratio > 1 - TOLERANCE && ratio < 1 + TOLERANCE;
    bool at_floor = ratio < 1 && fence->predicted_ns <= (int64_t)fence->count * (COST_FLOOR_NS + COST_FLOOR_NS / 8);
    if (good || at_floor || (bound_only && ratio >= 1.0))
        return;
    /* By what is thought now, not when the fence was recorded: an older fence may have corrected the same keys. */
    ratio = elapsed_ns / (double)predict(fence);
    if (bound_only && ratio >= 1.0)
        return;
    uint32_t number = atomic_fetch_add(&interval_number, 1) + 1;
    for (uint32_t i = 0; i < fence->count; i++) {
        struct cost *cost = fence->log[i];
        if (corrected_in[cost - cot_costs] == number)
            continue;
        corrected_in[cost - cot_costs] = number;
        scale(cost, ratio);
    }
}

/* Takes the finished fences off the ring; the caller holds cot_capture_lock and nothing captures. */
static void resolve_locked(struct ring *ring)
{
    while (ring->oldest != ring->newest) {
        struct fence *fence = at(ring, ring->oldest);
        CUresult state = query(fence);
        if (state == CUDA_ERROR_NOT_READY)
            return;
        float elapsed_ms = 0;
        if (state == CUDA_SUCCESS && ring->have_origin && fence->count > 0 &&
            ((CUresult(*)(float *, CUevent, CUevent))REAL(cuEventElapsedTime))(
                &elapsed_ms, at(ring, ring->oldest - 1)->event, fence->event) == CUDA_SUCCESS &&
            elapsed_ms > 0)
            learn(ring, fence, (double)elapsed_ms * 1e6);
        ring->have_origin = state == CUDA_SUCCESS;
        ring->outstanding_ns -= fence->predicted_ns;
        ring->oldest++;
        ring->stalled = false;
        if (state != CUDA_SUCCESS) { /* the context failed: the program learns it from its own calls */
            cot_ring_forget(ring, false);
            return;
        }
    }
}

void cot_fence_resolve(struct thread *t)
{
    if (t->ring->oldest == t->ring->newest)
        return;
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0)
        resolve_locked(t->ring);
    pthread_mutex_unlock(&cot_capture_lock);
}

/* Ends the open interval with an event in the stream that was used last.  An empty interval gives a point to measure
 * from: at the start of a turn, so that the wait for it is not taken for work. */
void cot_fence_close(struct thread *t, bool before_sync)
{
    struct ring *ring = t->ring;
    struct fence *fence = at(ring, ring->newest);
    fence->count = (uint32_t)(t->calls->log_next - t->log);
    fence->before_sync = before_sync;
    fence->predicted_ns = fence->count ? t->budget_begin_ns - t->calls->budget_ns : 0;
    atomic_fetch_add_explicit(&t->gpu->predicted_busy_ns, (uint64_t)fence->predicted_ns, memory_order_relaxed);
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0 && t->stream->handle != COT_NO_STREAM) {
        if (ring->newest - ring->oldest >= FENCES - 2)
            resolve_locked(ring);
        bool recorded = ring->newest - ring->oldest < FENCES - 2;
        if (recorded && !fence->event)
            recorded = ((CUresult(*)(CUevent *, unsigned))REAL(cuEventCreate))(&fence->event, 0) == CUDA_SUCCESS;
        if (recorded) {
            fence->exact = ring->newest != ring->oldest && query(at(ring, ring->newest - 1)) == CUDA_ERROR_NOT_READY;
            recorded =
                ((CUresult(*)(CUevent, CUstream))REAL(cuEventRecord))(fence->event, t->stream->handle) == CUDA_SUCCESS;
        }
        if (recorded) {
            ring->newest++;
            ring->outstanding_ns += fence->predicted_ns;
            atomic_fetch_add_explicit(&t->gpu->fences, 1, memory_order_relaxed);
        }
    }
    pthread_mutex_unlock(&cot_capture_lock);
    cot_interval_begin(t);
}

/* Waits until the oldest fence is done.  False: it is not done after patience_ns, or cannot be asked for. */
bool cot_fence_wait_oldest(struct thread *t, uint64_t patience_ns)
{
    struct ring *ring = t->ring;
    uint32_t oldest = ring->oldest;
    uint64_t began = cot_now_ns(), now = began;
    while (now - began < patience_ns) {
        if (atomic_load(&cot_captures) > 0)
            return false;
        cot_fence_resolve(t);
        if (ring->oldest != oldest || ring->oldest == ring->newest)
            return true;
        now = cot_now_ns();
        if (now - began > SPIN_NS)
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
    return false;
}
