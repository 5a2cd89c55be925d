/* The turn gate decides whether a launch may go now. A turn is a time slice that the agent grants to a tenant on a
 * GPU.
 *
 * The hot path (cot_gate_try in shim.h) handles nearly all launches. The other cases come here: the tenant has no
 * turn, the turn has ended, the thread's interval is complete, or the stream or kernel is new. An *interval* is
 * about a millisecond of predicted work of one thread. It ends with a fence, an event that shows when the work has
 * ended (inflight/fence.c).
 *
 * A turn ends in three steps: the gate closes, the calls that had passed it return, and the GPU finishes the work
 * that they queued. Only then is the turn returned to the agent, so the reported time is GPU time, not host time. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

/* longest wait for a fence to complete, after which the thread may launch a little more */
#define STALL_PATIENCE_NS UINT64_C(100000000)

static struct cotenant_slot no_slot;
static struct gpu no_gpu = {.page_slot = &no_slot, .epoch = EPOCH_CLOSED, .slot = COTENANT_NO_SLOT};
static struct calls no_calls = {.gpu = &no_gpu, .handle = COT_NO_STREAM, .log_next = &no_calls.unnoted};
/* all threads that have no record of their own use this one; its counters are not read */
static struct thread no_thread = {.gpu = &no_gpu, .calls = &no_calls, .stream = &cot_no_stream, .log = &no_calls.unnoted};
__thread struct thread *cot_thread __attribute__((tls_model("initial-exec"))) = &no_thread;
__thread struct calls *cot_calls __attribute__((tls_model("initial-exec"))) = &no_calls;
struct cost cot_costs[(1 << COST_BITS) + COST_BESIDE];

static pthread_key_t thread_key;
static pthread_once_t thread_key_once = PTHREAD_ONCE_INIT;


static void thread_gone(void *value)
{
    struct thread *t = value;
    cot_thread = &no_thread;
    cot_calls = &no_calls;
    for (uint32_t i = 0; i < COTENANT_MAX_GPUS; i++)
        if (t->rings[i]) {
            pthread_mutex_lock(&cot_capture_lock);
            cot_ring_forget(t->rings[i], !cot_exiting());
            pthread_mutex_unlock(&cot_capture_lock);
            free(t->rings[i]);
        }
    cot_calls_retire(t);
    free(t);
}

static void make_thread_key(void)
{
    pthread_key_create(&thread_key, thread_gone);
}

struct thread *cot_thread_get(void)
{
    if (cot_thread != &no_thread)
        return cot_thread;
    pthread_once(&thread_key_once, make_thread_key);
    struct thread *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->gpu = &no_gpu;
    t->calls = &no_calls;
    t->stream = &cot_no_stream;
    t->log = &no_calls.unnoted;
    pthread_setspecific(thread_key, t);
    return cot_thread = t;
}

void cot_thread_context_changed(void)
{
    if (cot_thread == &no_thread)
        return;
    cot_thread->gpu = &no_gpu;
    cot_thread->calls = cot_calls = &no_calls;
    cot_thread->stream = &cot_no_stream;
    cot_thread->ring = NULL;
    cot_thread->log = &no_calls.unnoted;
    cot_thread->context = NULL;
}

/* Returns the GPU of the current context, attached to the agent, and stores it in the thread's record; NULL without
 * a context. */
struct gpu *cot_thread_gpu(void)
{
    struct thread *t = cot_thread_get();
    if (!t)
        return NULL;
    if (t->gpu != &no_gpu)
        return t->gpu;
    CUcontext context = NULL;
    CUdevice device;
    if (REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context ||
        REAL(cuCtxGetDevice)(&device) != CUDA_SUCCESS)
        return NULL;
    struct gpu *gpu = cot_gpu_of_device(device, true);
    if (!gpu || !gpu->attached)
        return NULL;
    struct ring **ring = &t->rings[gpu - cot_gpu_at(0)];
    if (!*ring && !(*ring = calloc(1, sizeof **ring)))
        return NULL;
    if ((*ring)->context != context) {
        pthread_mutex_lock(&cot_capture_lock);
        cot_ring_forget(*ring, false);
        pthread_mutex_unlock(&cot_capture_lock);
        (*ring)->context = context;
    }
    struct calls *calls = cot_calls_of(t, gpu);
    if (!calls)
        return NULL;
    t->gpu = gpu;
    t->calls = cot_calls = calls;
    atomic_store(&calls->handle, COT_NO_STREAM);
    t->context = context;
    t->ring = *ring;
    cot_interval_begin(t);
    return gpu;
}

/* ---- waiting for a turn ---- */

static bool is_open(const struct gpu *gpu)
{
    return *(volatile uint64_t *)&gpu->page_slot->epoch == *(volatile uint64_t *)&gpu->epoch &&
           (gpu->deadline_ns == COTENANT_NO_DEADLINE || cot_now_ns() < gpu->deadline_ns);
}

static uint32_t gang_mask(void)
{
    uint32_t mask = 0;
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->attached && cot_gpu_at(i)->contexts > 0)
            mask |= 1u << cot_gpu_at(i)->slot;
    return mask;
}

static void request_turn(struct gpu *gpu) /* the caller holds cot_lock, which protects turns */
{
    struct cotenant_token_request request = {.burst_ns = gpu->burst_ns, .gap_ns = gpu->gap_ns,
                                             .waiting_since_ns = gpu->waiting_since_ns, .gang_mask = gang_mask(),
                                             .threads_waiting = gpu->waiting};
    if (cot_agent_send(COTENANT_TOKEN_REQUEST, gpu->slot, &request, sizeof request) == 0)
        gpu->state = GATE_REQUESTED;
}

static void wait_for_turn(struct gpu *gpu)
{
    uint64_t began = cot_now_ns();
    pthread_mutex_lock(&cot_lock);
    if (gpu->waiting++ == 0)
        gpu->waiting_since_ns = began;
    if (gpu->holder)
        /* raise this process's LS-activity flag, so that best-effort tenants stop launching, become idle and return
         * their turn */
        cot_holder_raise(gpu->holder);
    while (!cot_exiting() && !is_open(gpu)) {
        /* the turn has ended or was revoked; the helper thread returns it to the agent */
        if (gpu->state == GATE_OPEN) {
            bool revoked = gpu->page_slot->epoch != gpu->turn_epoch;
            if (revoked && gpu->page_slot->flags & COTENANT_SLOT_UNGATED) {
                cot_gate_grant(gpu, gpu->page_slot->epoch, COTENANT_NO_DEADLINE);
                continue;
            }
            cot_gate_begin_close(gpu, revoked ? COTENANT_RELEASE_REVOKED : COTENANT_RELEASE_DEADLINE);
            cot_agent_wake_helper();
        } else if (gpu->state == GATE_CLOSED && cot_agent_is_connected() && !gpu->stale) {
            if (gpu->page_slot->flags & COTENANT_SLOT_UNGATED) {
                cot_gate_grant(gpu, gpu->page_slot->epoch, COTENANT_NO_DEADLINE);
                continue;
            }
            request_turn(gpu);
        }
        /* this wait has a time limit, since the request may not have fit into the socket and is then sent again */
        cot_rpc_wait();
    }
    gpu->waiting--;
    pthread_mutex_unlock(&cot_lock);
    atomic_fetch_add(&gpu->waited_ns, cot_now_ns() - began);
}

/* ---- how much work is queued ---- */

/* Returns whether fences limit the work in flight. Otherwise the LS gate limits it (floor.c), or a kernel profile is
 * being measured (kernels.c), or it is not limited. */
static bool is_fenced(const struct gpu *gpu)
{
    return !gpu->floor && !gpu->holder && !cot_profiling && !(gpu->page_slot->flags & COTENANT_SLOT_UNFENCED);
}

/* Called at the end of an interval. It records the interval's fence, corrects the cost estimates by completed
 * fences, and waits while too much work is queued. It ends the turn if the next launch could not end before the turn's
 * deadline. Returns false if the turn was ended. */
static bool begin_interval(struct thread *t, int64_t next_ns)
{
    struct gpu *gpu = t->gpu;
    uint32_t flags = gpu->page_slot->flags;
    if (flags & COTENANT_SLOT_UNFENCED) {
        cot_interval_begin(t);
        return true;
    }
    struct ring *ring = t->ring;
    bool alone = cot_is_alone(gpu);
    int64_t allowed = (int64_t)gpu->page_slot->inflight_allowed_ns * (alone ? INFLIGHT_ALONE : 1);
    cot_interval_look(t);
    if (!alone || ring->noted > 0 || (allowed && ring->outstanding_ns * 2 >= allowed))
        cot_fence_resolve(t);
    if (cot_interval_is_empty(t))
        cot_interval_begin(t);
    else
        cot_fence_close(t, false);
    while (allowed && cot_ring_is_long(ring, allowed) && atomic_load(&cot_captures) == 0)
        if (!cot_fence_wait_oldest(t, STALL_PATIENCE_NS)) {
            cot_ring_let_more(ring, allowed);
            break;
        }
    if (ring->doubt)
        cot_interval_note(t);
    if (cot_is_alone(gpu) || cot_calls_sum(gpu).started == gpu->started_at_grant)
        return true;
    uint64_t now = cot_now_ns();
    if (now + (uint64_t)ring->outstanding_ns + (uint64_t)next_ns <= gpu->deadline_ns)
        return true;
    pthread_mutex_lock(&cot_lock);
    if (gpu->state == GATE_OPEN) {
        cot_gate_begin_close(gpu, COTENANT_RELEASE_DEADLINE);
        cot_agent_wake_helper();
    }
    pthread_mutex_unlock(&cot_lock);
    return false;
}

static enum gate_answer pass_gate(uintptr_t key, CUstream stream)
{
    struct gpu *gpu = cot_thread_gpu();
    if (!gpu)
        return GATE_PASS; /* the thread has no context, so the driver returns its own error */
    struct thread *t = cot_thread;
    if (atomic_load(&cot_captures) > 0 && cot_stream_is_capturing(stream))
        return GATE_PASS;
    if (t->stream->handle != stream)
        t->stream = cot_stream_find(stream, t->context, gpu);
    atomic_store_explicit(&t->calls->handle, stream, memory_order_relaxed);
    bool fresh;
    struct cost *cost = cot_cost_of(key, &fresh);
    for (;;) {
        if (cot_exiting())
            return GATE_PASS;
        if (fresh && t->calls->log_step == 0 && is_fenced(gpu) && is_open(gpu))
            cot_interval_note(t);
        if (gpu->floor && is_open(gpu))
            cot_floor_enter(t, cost);
        else if (!gpu->holder && !cot_profiling && is_open(gpu) && t->calls->budget_ns < cost->ns && !begin_interval(t, cost->ns))
            continue;
        cot_count(&t->calls->started, 1);
        atomic_thread_fence(memory_order_seq_cst);
        if (is_open(gpu))
            break;
        cot_count(&t->calls->started, -1);
        wait_for_turn(gpu);
        cot_interval_begin(t); /* all work of the previous interval has ended while the thread waited */
        if (is_fenced(gpu))
            cot_fence_close(t, false);
    }
    if (gpu->first_submit_ns == 0)
        gpu->first_submit_ns = cot_now_ns();
    if (gpu->holder)
        cot_holder_raise(gpu->holder);
    if (gpu->floor || gpu->holder || cot_profiling) {
        t->calls->budget_ns = -1; /* no budget is left for the hot path, so every launch takes the slow path */
        if (gpu->floor && !atomic_load_explicit(&t->calls->open, memory_order_relaxed))
            /* cot_floor_try needs `open`, which is 0 at first and after each closing of the turn gate */
            cot_calls_open(t->calls);
        return GATE_GO;
    }
    struct calls *calls = t->calls;
    if (!atomic_load_explicit(&calls->open, memory_order_relaxed))
        cot_calls_open(calls);
    int64_t ns = cost->ns;
    if (ns > calls->budget_ns) { /* the launch is longer than an interval, so it gets one of its own */
        t->budget_begin_ns += ns - calls->budget_ns;
        calls->budget_ns = ns;
    }
    calls->budget_ns -= ns;
    *calls->log_next = cost;
    calls->log_next += calls->log_step;
    return GATE_GO;
}

/* Passes the turn gate on the slow path. The thread cannot be cancelled meanwhile, since a cancelled thread would never
 * release its lock. */
enum gate_answer cot_gate_slow(uintptr_t key, CUstream stream)
{
    int cancel;
    if (cot_thread->gpu->floor && cot_floor_try(cot_thread, key, stream))
        return GATE_GO;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    enum gate_answer answer = pass_gate(key, stream);
    pthread_setcancelstate(cancel, NULL);
    return answer;
}

void cot_sync_begin(void)
{
    struct thread *t = cot_thread;
    if (t->ring && t->ring->probe && t->calls->log_step && t->calls->log_next > t->log && atomic_load(&cot_captures) == 0) {
        cot_fence_close(t, true);
        t->ring->probe = false;
    }
}
