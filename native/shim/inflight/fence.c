/* Limits the work in flight, and learns the *cost* of launches, which is their GPU time.
 *
 * The launches of one thread are grouped into *intervals* of about one predicted millisecond. A *fence*, a CUDA
 * event, ends each interval. Launches with the same *key* have the same predicted cost; the key is kernel and grid, or
 * graph, or kind and size of a copy. When a fence completes, the GPU time since the previous fence is compared with the
 * prediction, and the cost of every key in the interval is multiplied by the ratio. A long kernel fills an interval
 * alone, so its cost is exact after one run; short kernels share the correction.
 *
 * The agent gives a turn (a tenant's time slice on the GPU) no deadline while no other tenant waits. Then intervals
 * are longer and more work may be queued. While the estimates are accurate, only one interval in 16 is *sampled*: its
 * launches are logged and its time is compared. The fences of the other intervals are queried only when half of the
 * allowed work is queued.
 *
 * Nothing here runs while a stream of the process is being captured, because an event query from another thread
 * would invalidate a capture in global mode. */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "shim.h"

#define SPIN_NS 20000
#define COST_CEILING_NS INT64_C(60000000000)
#define TOLERANCE 0.1 /* predictions with a smaller relative error are not corrected */


/* for each cost, the number of the last interval whose measured time corrected it */
static uint32_t corrected_in[(1 << COST_BITS) + COST_BESIDE];
static _Atomic uint32_t interval_number;

static struct fence *at(struct ring *ring, uint32_t index)
{
    return &ring->fences[index % FENCES];
}

struct cost *cot_cost_of(uintptr_t key, bool *fresh)
{
    *fresh = false;
    struct cost *home = cot_cost(key), *empty = NULL;
    for (struct cost *cost = home; cost < home + COST_BESIDE; cost++) {
        if (cost->key == key)
            return cost;
        if (!cost->key && !empty)
            empty = cost;
    }
    /* If no entry is empty, the first one is replaced. The replaced cost must be learned again if a launch with its key
     * is made again. */
    struct cost *cost = empty ? empty : home;
    cost->ns = COST_UNKNOWN_NS;
    /* the key is stored last, so that a thread that finds the key also finds its cost */
    __atomic_store_n(&cost->key, key, __ATOMIC_RELEASE);
    *fresh = true;
    return cost;
}

static CUresult query(const struct fence *fence)
{
    return REAL(cuEventQuery)(fence->event);
}

static bool record(struct fence *fence, CUstream stream)
{
    if (!fence->event && REAL(cuEventCreate)(&fence->event, 0) != CUDA_SUCCESS)
        return false;
    return REAL(cuEventRecord)(fence->event, stream) == CUDA_SUCCESS;
}

void cot_interval_begin(struct thread *t)
{
    struct ring *ring = t->ring;
    bool alone = cot_is_alone(t->gpu);
    bool noted = (!alone || ring->unnoted_left == 0) && !(t->gpu->page_slot->flags & COTENANT_SLOT_UNFENCED);
    t->log = t->calls->log_next = noted ? at(ring, ring->newest)->log : &t->calls->unnoted;
    t->calls->log_step = noted;
    t->calls->budget_ns = t->budget_begin_ns = alone && !ring->doubt ? INTERVAL_ALONE_NS : INTERVAL_NS;
    if (t->gpu->floor)
        /* no budget is left for the hot path, so that every launch takes the slow path and asks the LS gate
         * (floor/floor.c) */
        t->calls->budget_ns = t->budget_begin_ns = -1;
    ring->began_ns = cot_now_ns();
}

bool cot_interval_is_empty(const struct thread *t)
{
    /* the cost of every launch is above 0, so an unchanged budget means that there was no launch */
    return t->calls->budget_ns == t->budget_begin_ns;
}

/* Called at the end of an interval that was not sampled. If its launch calls took much longer than the estimated GPU
 * time, there are two possible reasons: the host was slow, or the driver's own queue was full. In the second case
 * the GPU has not reached the interval yet, so the estimates are too low. */
void cot_interval_look(struct thread *t)
{
    struct ring *ring = t->ring;
    int64_t thought_ns = t->budget_begin_ns - t->calls->budget_ns;
    if (t->calls->log_step || ring->newest == ring->oldest || (int64_t)(cot_now_ns() - ring->began_ns) < 2 * thought_ns)
        return;
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0)
        ring->doubt |= query(at(ring, ring->newest - 1)) == CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&cot_capture_lock);
}

void cot_interval_note(struct thread *t)
{
    t->ring->unnoted_left = 0;
    if (t->calls->log_step == 0)
        cot_fence_close(t, false);
    else if (cot_interval_is_empty(t))
        /* no launch is in the interval yet, so it is begun again: with the length that applies now, which may be
         * shorter */
        cot_interval_begin(t);
}

/* Forgets all fences. The caller holds cot_capture_lock. `destroy`: the context still exists, so the events must be
 * destroyed; otherwise they were destroyed together with the context. */
void cot_ring_forget(struct ring *ring, bool destroy)
{
    for (uint32_t i = 0; i < FENCES; i++) {
        if (ring->fences[i].event && destroy)
            REAL(cuEventDestroy_v2)(ring->fences[i].event);
        ring->fences[i].event = NULL;
    }
    ring->oldest = ring->newest = ring->noted = ring->unnoted_left = 0;
    ring->outstanding_ns = ring->more_ns = 0;
    ring->stalls = 0;
    ring->have_origin = ring->probe = ring->doubt = false;
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
    /* the measured time may include idle time of the GPU, so it is only an upper bound of the launches' time */
    bool bound_only = !fence->exact && !fence->before_sync;
    if (bound_only && ratio > 2.0)
        ring->probe = true;
    bool good = ratio > 1 - TOLERANCE && ratio < 1 + TOLERANCE;
    bool at_floor = ratio < 1 && fence->predicted_ns <= (int64_t)fence->count * (COST_FLOOR_NS + COST_FLOOR_NS / 8);
    ring->unnoted_left = 0;
    ring->doubt = false;
    if (good || at_floor || (bound_only && ratio >= 1.0)) {
        if (!ring->probe)
            ring->unnoted_left = UNNOTED_ALONE;
        return;
    }
    /* the current estimates are added up instead of fence->predicted_ns, since an earlier fence may have corrected
     * the same keys */
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

/* Removes completed fences from the ring. The caller holds cot_capture_lock, and no stream is captured. */
static void resolve_locked(struct ring *ring)
{
    while (ring->oldest != ring->newest) {
        struct fence *fence = at(ring, ring->oldest);
        CUresult state = query(fence);
        if (state == CUDA_ERROR_NOT_READY)
            return;
        float elapsed_ms = 0;
        if (state == CUDA_SUCCESS && ring->have_origin && fence->count > 0 &&
            REAL(cuEventElapsedTime)(
                &elapsed_ms, at(ring, ring->oldest - 1)->event, fence->event) == CUDA_SUCCESS &&
            elapsed_ms > 0)
            learn(ring, fence, (double)elapsed_ms * 1e6);
        ring->have_origin = state == CUDA_SUCCESS;
        ring->noted -= fence->count > 0;
        ring->outstanding_ns -= fence->predicted_ns;
        ring->oldest++;
        ring->more_ns = ring->stalls = 0;
        /* the context has failed; the program learns of that from its own calls of the driver */
        if (state != CUDA_SUCCESS) {
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

static bool has_no_room(const struct ring *ring)
{
    return ring->newest - ring->oldest >= FENCES - 2;
}

/* Ends the current interval with an event in the stream that was used last. If the interval is empty, its fence only
 * serves as a reference time. At the start of a turn, for example, it prevents the wait for the turn from counting
 * as work. */
void cot_fence_close(struct thread *t, bool before_sync)
{
    struct ring *ring = t->ring;
    struct fence *fence = at(ring, ring->newest);
    fence->count = t->calls->log_step ? (uint32_t)(t->calls->log_next - t->log) : 0;
    fence->before_sync = before_sync;
    fence->predicted_ns = t->budget_begin_ns - t->calls->budget_ns;
    atomic_fetch_add_explicit(&t->gpu->predicted_busy_ns, (uint64_t)fence->predicted_ns, memory_order_relaxed);
    if (ring->unnoted_left > 0 && cot_is_alone(t->gpu))
        ring->unnoted_left--;
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0 && t->stream->handle != COT_NO_STREAM) {
        if (has_no_room(ring))
            resolve_locked(ring);
        bool room = !has_no_room(ring);
        if (room && fence->count > 0)
            fence->exact = ring->newest != ring->oldest && query(at(ring, ring->newest - 1)) == CUDA_ERROR_NOT_READY;
        if (room && record(fence, t->stream->handle)) {
            ring->newest++;
            ring->noted += fence->count > 0;
            ring->outstanding_ns += fence->predicted_ns;
            atomic_fetch_add_explicit(&t->gpu->fences, 1, memory_order_relaxed);
        }
    }
    pthread_mutex_unlock(&cot_capture_lock);
    cot_interval_begin(t);
}

bool cot_ring_is_long(const struct ring *ring, int64_t allowed_ns)
{
    return has_no_room(ring) ||
           (ring->newest - ring->oldest >= 2 && ring->outstanding_ns >= allowed_ns + ring->more_ns);
}

/* Called when the oldest fence did not complete in time. Its work may wait for a later launch, so the program must
 * be allowed to launch more. But the work may also just take longer than estimated, so the program may launch only a
 * little more at first, and twice as much at each further call. */
void cot_ring_let_more(struct ring *ring, int64_t allowed_ns)
{
    ring->more_ns = ring->outstanding_ns - allowed_ns + (INTERVAL_NS << (ring->stalls < 6 ? ring->stalls : 6));
    ring->stalls++;
}

/* Waits at most patience_ns for the oldest fence. Returns false if the fence did not complete, or if a capture
 * prevents queries. If the wait is much longer than estimated, the estimates are marked as doubtful. */
bool cot_fence_wait_oldest(struct thread *t, uint64_t patience_ns)
{
    struct ring *ring = t->ring;
    uint32_t oldest = ring->oldest;
    int64_t enough_ns = at(ring, oldest)->predicted_ns * 2;
    uint64_t began = cot_now_ns(), now = began;
    while (now - began < patience_ns) {
        if (atomic_load(&cot_captures) > 0)
            return false;
        cot_fence_resolve(t);
        if (ring->oldest != oldest || ring->oldest == ring->newest)
            return true;
        now = cot_now_ns();
        ring->doubt |= (int64_t)(now - began) > enough_ns;
        if (now - began > SPIN_NS)
            cot_nap();
    }
    return false;
}
