/* The states of a turn, a time slice on a GPU that the agent grants to a tenant. The helper thread takes a turn
 * through them: it is open; it closes; the calls that passed the gate return; the GPU finishes their work (drains);
 * the agent gets the release. The number of a turn is its *epoch*. */
#define _GNU_SOURCE
#include <string.h>

#include "shim.h"
#include "swap/swap.h"

#define CLOSE_POLL_NS 20000
#define DRAIN_POLL_NS 30000
#define HUNG_POLL_NS 2000000
#define PUBLISH_NS 200000000
/* shortest time between two checks whether the GPU has drained, while other tenants wait for this turn */
#define IDLE_LOOK_NS 100000
#define LOOK_AGAIN_NS UINT64_C(1000000000) /* longest time between two checks of one turn */
/* longest time between two checks if no turn needs one. Checks go on even then, because a program may close the shim's
 * files, and afterwards no message of the agent arrives. */
#define FAR_NS UINT64_C(2000000000)
#define NO_LAUNCH_CHECK_NS UINT64_C(1000000000)
#define FLOOR_CHECK_NS UINT64_C(500000000)

static uint64_t last_check_ns;
static bool warned_no_launch;


/* the caller holds cot_lock, which protects the state of turns */
void cot_gate_grant(struct gpu *gpu, uint64_t epoch, uint64_t deadline_ns)
{
    if ((gpu->state == GATE_CLOSING || gpu->state == GATE_DRAINING) && epoch == gpu->turn_epoch)
        /* The turn is already ending, so this late change of its deadline has no effect. The agent will receive the
         * release; if the tenant needs turns on several GPUs at once, the agent then grants them again. */
        return;
    if (epoch <= gpu->released_epoch && !(gpu->page_slot->flags & COTENANT_SLOT_UNGATED))
        return; /* the agent changed the deadline of a turn while the release of that turn was already on its way */
    if (gpu->state != GATE_OPEN || gpu->turn_epoch != epoch) {
        gpu->grant_ns = cot_now_ns();
        struct call_counts counts = cot_calls_sum(gpu);
        gpu->started_at_grant = counts.started;
        gpu->copies_at_grant = counts.copies;
        gpu->first_submit_ns = 0;
        gpu->reported_hung = false;
        gpu->activity_seen = gpu->started_at_grant;
        gpu->activity_ns = gpu->grant_ns;
        gpu->empty_ns = 0;
        gpu->turns++;
        if (gpu->idle_since_ns)
            gpu->gap_ns = gpu->grant_ns - gpu->idle_since_ns;
    }
    gpu->turn_epoch = epoch;
    gpu->deadline_ns = deadline_ns;
    gpu->state = GATE_OPEN;
    if (cot_swap_is_away(gpu)) {
        /* memory that the process allocated while the grant was on its way has no place on the GPU yet, so the turn is
         * returned, and the agent can restore that memory */
        cot_gate_begin_close(gpu, COTENANT_RELEASE_REVOKED);
        return;
    }
    gpu->page_slot->epoch_seen = epoch;
    __atomic_store_n(&gpu->epoch, epoch, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&cot_changed);
}

/* the caller holds cot_lock, which protects the state of turns */
void cot_gate_begin_close(struct gpu *gpu, uint32_t reason)
{
    __atomic_store_n(&gpu->epoch, EPOCH_CLOSED, __ATOMIC_SEQ_CST);
    cot_calls_close(gpu);
    gpu->state = GATE_CLOSING;
    gpu->close_reason = reason;
    gpu->close_began_ns = cot_now_ns();
}

/* the caller holds cot_lock, which protects the state of turns */
static void report_release(struct gpu *gpu, bool drained, uint64_t now)
{
    struct call_counts counts = cot_calls_sum(gpu);
    uint64_t calls = counts.started - gpu->started_at_grant;
    uint64_t copies = counts.copies - gpu->copies_at_grant;
    uint64_t first = gpu->first_submit_ns ? gpu->first_submit_ns : calls ? gpu->grant_ns : 0;
    struct cotenant_token_release release = {
        .epoch = gpu->turn_epoch,
        .used_ns = first ? now - first : 0,
        .overuse_ns = gpu->deadline_ns < now ? now - gpu->deadline_ns : 0,
        .first_submit_ns = first,
        .drained_ns = now,
        .launches = calls > copies ? calls - copies : 0,
        .copies = copies,
        .reason = gpu->close_reason,
        .drained = drained,
        .wants_more = gpu->waiting > 0,
    };
    if (gpu->close_reason == COTENANT_RELEASE_IDLE)
        gpu->burst_ns = first ? gpu->activity_ns - first : 0;
    else if (gpu->waiting > 0 && release.used_ns * 2 > gpu->burst_ns)
        /* the turn ended while the process kept the GPU busy, so the real busy time is longer than the turn */
        gpu->burst_ns = release.used_ns * 2;
    gpu->idle_since_ns = now;
    release.burst_ns = gpu->burst_ns;
    release.gap_ns = gpu->gap_ns;
    cot_gpu_publish(gpu, now);
    cot_agent_send(COTENANT_TOKEN_RELEASE, gpu->slot, &release, sizeof release);
}

/* Ends a turn in steps: carries out those that are possible now. Returns the time in ns until the next check. */
static uint64_t advance_close(struct gpu *gpu, uint64_t now)
{
    if (gpu->state == GATE_CLOSING) {
        struct call_counts counts = cot_calls_sum(gpu);
        if (counts.finished != counts.started && !gpu->reported_hung) {
            if (now - gpu->close_began_ns <= gpu->page_slot->drain_timeout_ns)
                return now - gpu->close_began_ns < 2000000 ? CLOSE_POLL_NS : HUNG_POLL_NS / 8;
        } else if (counts.finished == counts.started)
            gpu->state = GATE_DRAINING;
    }
    bool drained = gpu->state == GATE_DRAINING && cot_streams_drained(gpu);
    now = cot_now_ns();
    if (!drained) {
        if (now - gpu->close_began_ns <= gpu->page_slot->drain_timeout_ns)
            return now - gpu->close_began_ns < HUNG_POLL_NS * 16 ? DRAIN_POLL_NS : HUNG_POLL_NS / 4;
        if (!gpu->reported_hung) {
            gpu->reported_hung = true;
            pthread_mutex_lock(&cot_lock);
            report_release(gpu, false, now);
            pthread_mutex_unlock(&cot_lock);
            cot_agent_warn(COTENANT_WARN_DRAIN_TIMEOUT, "GPU work of this process did not end within %.1f s after the end of its turn",
                           (double)gpu->page_slot->drain_timeout_ns / 1e9);
        }
        return HUNG_POLL_NS;
    }
    pthread_mutex_lock(&cot_lock);
    if (gpu->turn_epoch) /* otherwise a turn of a previous agent has ended, of which this one does not know */
        report_release(gpu, true, now);
    gpu->state = GATE_CLOSED;
    gpu->released_epoch = gpu->turn_epoch;
    gpu->page_slot->epoch_seen = 0;
    pthread_cond_broadcast(&cot_changed); /* wakes a waiting thread, which then requests the next turn */
    pthread_mutex_unlock(&cot_lock);
    return FAR_NS;
}

static uint64_t advance_open(struct gpu *gpu, uint64_t now)
{
    uint32_t flags = gpu->page_slot->flags;
    struct call_counts counts = cot_calls_sum(gpu);
    if (counts.started != gpu->activity_seen) {
        gpu->activity_seen = counts.started;
        gpu->activity_ns = now;
        gpu->empty_ns = 0;
    }
    uint64_t next = now - gpu->activity_ns < LOOK_AGAIN_NS ? PUBLISH_NS : LOOK_AGAIN_NS;
    /* `held` is false if the agent that granted the turn has ended, or if the tenant needs no turns */
    bool held = !gpu->stale && !(flags & COTENANT_SLOT_UNGATED);
    bool taken_back = held && gpu->page_slot->epoch != gpu->turn_epoch;
    bool over = gpu->deadline_ns <= now;
    /* Idle time begins only when the GPU has drained: a program that waits for its own long-running work is not
     * idle. */
    bool asked = held && flags & COTENANT_SLOT_CONTENDED && gpu->waiting == 0;
    if (!asked || counts.started != counts.finished)
        gpu->empty_ns = 0;
    else if (now - gpu->activity_ns >= IDLE_LOOK_NS && !gpu->empty_ns && cot_streams_drained(gpu))
        gpu->empty_ns = now;
    bool idle = gpu->empty_ns && now - gpu->empty_ns >= gpu->page_slot->idle_release_ns && cot_streams_drained(gpu);
    if (taken_back || over || idle) {
        pthread_mutex_lock(&cot_lock);
        if (gpu->state == GATE_OPEN && (taken_back || idle || gpu->deadline_ns <= now))
            cot_gate_begin_close(gpu, over        ? COTENANT_RELEASE_DEADLINE
                                      : taken_back ? COTENANT_RELEASE_REVOKED
                                                   : COTENANT_RELEASE_IDLE);
        pthread_mutex_unlock(&cot_lock);
        return advance_close(gpu, now);
    }
    if (flags & COTENANT_SLOT_CONTENDED) {
        uint64_t period = gpu->page_slot->idle_release_ns / 2;
        if (period < IDLE_LOOK_NS)
            period = IDLE_LOOK_NS;
        if (next > period)
            next = period;
    }
    if (gpu->deadline_ns != COTENANT_NO_DEADLINE && next > gpu->deadline_ns - now)
        next = gpu->deadline_ns - now;
    return next;
}

/* Warns if the GPU works for this process although no launch has passed the turn gate. */
static void check_no_launch(struct gpu *gpu)
{
    CUcontext context = gpu->any_context;
    if (!context || REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return;
    bool busy = REAL(cuStreamQuery)(NULL) == CUDA_ERROR_NOT_READY;
    REAL(cuCtxPopCurrent_v2)(&context);
    if (!busy || warned_no_launch || cot_calls_sum(gpu).started > 0)
        return;
    warned_no_launch = true;
    cot_agent_warn(COTENANT_WARN_NO_LAUNCH_SEEN,
                   "this process uses the GPU, but no launch has passed the shim, so the tenant's share is not enforced");
}

uint64_t cot_gates_advance(uint64_t now)
{
    uint64_t next = FAR_NS;
    bool check = now - last_check_ns >= NO_LAUNCH_CHECK_NS;
    for (uint32_t i = 0; i < cot_gpu_count(); i++) {
        struct gpu *gpu = cot_gpu_at(i);
        if (!gpu->attached)
            continue;
        uint64_t mine = FAR_NS;
        if (gpu->state == GATE_OPEN)
            mine = advance_open(gpu, now);
        else if (gpu->state == GATE_CLOSING || gpu->state == GATE_DRAINING)
            mine = advance_close(gpu, now);
        if (gpu->state == GATE_OPEN)
            cot_gpu_publish(gpu, now);
        if (!warned_no_launch && gpu->contexts > 0 && cot_calls_sum(gpu).started == 0) {
            if (check)
                check_no_launch(gpu);
            if (mine > NO_LAUNCH_CHECK_NS)
                mine = NO_LAUNCH_CHECK_NS;
        }
        if (gpu->floor_again_ns && !gpu->stale) {
            if (gpu->floor_again_ns <= now)
                cot_gpus_join_again();
            if (mine > FLOOR_CHECK_NS)
                mine = FLOOR_CHECK_NS;
        }
        if (next > mine)
            next = mine;
    }
    if (check)
        last_check_ns = now;
    return next;
}

void cot_gates_exit(void)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->attached && cot_gpu_at(i)->contexts > 0 && cot_calls_sum(cot_gpu_at(i)).started == 0)
            check_no_launch(cot_gpu_at(i));
}

/* Called when the agent has ended or this process ends: turns can then be neither requested nor returned. The caller
 * holds cot_lock. */
void cot_gates_agent_lost(uint32_t fail_mode)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++) {
        struct gpu *gpu = cot_gpu_at(i);
        if (!gpu->attached)
            continue;
        bool go = fail_mode == COTENANT_FAIL_OPEN && (cot_exiting() || !cot_swap_is_away(gpu));
        gpu->stale = true;
        gpu->turn_epoch = gpu->page_slot->epoch; /* an agent that has ended does not change its page any more */
        gpu->deadline_ns = COTENANT_NO_DEADLINE;
        gpu->state = go ? GATE_OPEN : GATE_CLOSED;
        __atomic_store_n(&gpu->epoch, go ? gpu->turn_epoch : EPOCH_CLOSED, __ATOMIC_SEQ_CST);
        cot_calls_close(gpu);
    }
}
