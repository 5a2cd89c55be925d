/* The gate for latency-sensitive (LS) work, on the host: every launch of a best-effort (BE) process reads the gate page
 * (abi/floor.h) and asks the rule of the scheme (floor/floor_rule.h) whether it may go.
 *
 * The launches of a process are grouped into batches, by which the work in flight is tracked (floor/pieces.h). The
 * newest batch is *open*: launches are added to it until it is closed.
 *
 * One lock per GPU serialises the launches of several threads. A thread that holds cot_lock or cot_capture_lock does
 * not take it; a thread that holds it may take cot_capture_lock. */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

#include "floor/pieces.h"

#define LEAST_PIECE_NS 25000
#define SPIN_NS 60000                 /* after this time a waiting thread yields the processor to other threads */
#define UP_SPIN_NS 10000000           /* LS work comes in short bursts: poll this long for the end of one */
#define YIELD_FADES_NS 50000000       /* time in which the remembered longest duration of a yield halves */
#define YIELD_SPACE 10                /* time between two yields, as a multiple of the duration of the last yield */
#define LONGEST_SPIN_NS INT64_C(1000000)
/* a thread sleeps if its wait is longer than this plus the usual delay of a sleep's end, and polls for the rest */
#define SLEEP_OVER_NS 200000
#define WAKE_EARLY_NS 60000
#define LONGEST_SLEEP_NS 10000000
#define GONE_TRIES 1000
#define LONG_KERNEL_NS 500000         /* a shorter kernel ends in less time than preempting it would take */

/* ---- the clock ---- */

#ifndef FLOOR_TICKS
#define FLOOR_TICKS() __builtin_ia32_rdtsc()
#endif
#define SAME_MOMENT_TICKS 5000        /* a thread may have been preempted between two readings that differ by more */
#define LONGEST_TICKS (UINT64_C(1) << 22)

/* Reads the time together with the processor's cycle counter. */
static int64_t look_at_clock(struct floor *floor)
{
    struct floor_ticks *ticks = &floor->ticks;
    uint64_t before = FLOOR_TICKS();
    int64_t now_ns = (int64_t)cot_now_ns();
    uint64_t at = FLOOR_TICKS();
    if (at - before > SAME_MOMENT_TICKS)
        return now_ns;
    int64_t passed_ns = now_ns - ticks->first_ns;
    if (passed_ns > 2000000) {
        ticks->ns_per_2_20 = passed_ns < 1000000000 && at > ticks->first ? (uint64_t)(passed_ns << 20) / (at - ticks->first) : 0;
        ticks->first = at;
        ticks->first_ns = now_ns;
    }
    ticks->last = at;
    ticks->last_ns = now_ns;
    return now_ns;
}

/* Computes the time from the cycle counter, which is fast, or reads the clock if that was not done recently. */
static int64_t glance_at_clock(struct floor *floor)
{
    const struct floor_ticks *ticks = &floor->ticks;
    uint64_t passed = FLOOR_TICKS() - ticks->last;
    if (passed > LONGEST_TICKS || ticks->ns_per_2_20 == 0)
        return look_at_clock(floor);
    return ticks->last_ns + (int64_t)(passed * ticks->ns_per_2_20 >> 20);
}

/* ---- LS activity, and the rule that applies now ---- */

static bool floor_any_raised(const struct cotenant_floor *page)
{
    uint64_t any = 0;
    for (uint32_t i = 0; i < COTENANT_FLOOR_HOLDERS / 8; i++)
        any |= __atomic_load_n((const uint64_t *)page->raised + i, __ATOMIC_RELAXED);
    return any != 0;
}

/* Returns the work class of an LS process that is active and has a fresh heartbeat; 0 if none is active. If several
 * are, work_class (that of the BE work) is preferred, because work of the same class is disturbed most. */
static uint32_t active_class(const struct cotenant_floor *page, uint32_t work_class, int64_t now_ns)
{
    uint32_t found = 0;
    if (!floor_any_raised(page))
        return 0;
    int64_t limit_ns = (int64_t)page->heartbeat_timeout_ms * 1000000;
    for (uint32_t i = 0; i < COTENANT_FLOOR_HOLDERS; i++) {
        int64_t age_ns = now_ns - (int64_t)__atomic_load_n(&page->raised_ns[i], __ATOMIC_RELAXED);
        uint8_t raised = __atomic_load_n(&page->raised[i], __ATOMIC_RELAXED);
        if (raised && age_ns < limit_ns && age_ns > -limit_ns) /* a time in the future is no heartbeat */
            found = !found || raised == work_class ? raised : found;
    }
    return found;
}

bool cot_floor_is_up(const struct cotenant_floor *page, int64_t now_ns)
{
    return active_class(page, COTENANT_WORK_UNKNOWN, now_ns) != 0;
}

static struct floor_rule current_rule(const struct floor *floor, const struct gpu *gpu, struct work work)
{
    const struct cotenant_floor *page = floor->page;
    uint64_t parts = gpu->stale ? 0 : gpu->page_slot->floor_parts; /* out of date while no agent runs to update it */
    uint64_t in_flight_us = floor->in_flight_us ? floor->in_flight_us : page->in_flight_us;
    return (struct floor_rule){.scheme = page->scheme,
                               .overlap_permille = page->overlap_permille,
                               .sm_threshold = page->sm_threshold ? page->sm_threshold : gpu->sm_count,
                               .work_class = work.work_class,
                               .work_sms = work.sms,
                               .budget_ns = floor_share(in_flight_us * 1000, parts ? parts : page->tenants),
                               .lead_ns = COTENANT_LEAD_NS,
                               .stretch_permille = floor->in_flight_us ? 1000 : COTENANT_STRETCH_PERMILLE,
                               .duty_cycle_permille = page->duty_cycle_permille};
}

/* Returns how much work may lie between two events; 0: every batch gets an event. Only the scheme tidal may rely on
 * predicted times, since the other schemes must know whether all work has ended. If the GPU is often idle (`starved`),
 * tidal also gives every batch an event: there is idle time for it, and idle times make predictions less accurate. */
static int64_t event_interval_ns(const struct floor *floor)
{
    return floor->page->scheme == COTENANT_SCHEME_TIDAL && !floor->state.starved ? COTENANT_EVENT_INTERVAL_NS : 0;
}

/* Sleeps for most of the remaining time. It measures how late sleeps end on this machine, and sleeps that much less. */
static void sleep_for(struct floor *floor, int64_t left_ns)
{
    int64_t began = (int64_t)cot_now_ns();
    int64_t ns = (left_ns > LONGEST_SLEEP_NS ? LONGEST_SLEEP_NS : left_ns) - WAKE_EARLY_NS - floor->late_ns;
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    int64_t late = (int64_t)cot_now_ns() - began - ns;
    floor->late_ns = late > floor->late_ns ? late : floor->late_ns - floor->late_ns / 64;
}

/* Yields the processor to other threads. The longer a yield takes, the later the next one may be. */
static void yield(struct floor *floor)
{
    int64_t began = (int64_t)cot_now_ns();
    sched_yield();
    int64_t now = (int64_t)cot_now_ns();
    floor->yield_ns = floor_most(floor->yield_ns, now - began);
    floor->yield_at_ns = now + floor_least(YIELD_SPACE * (now - began), LONGEST_SPIN_NS);
}

static void pause_a_little(struct floor *floor, bool up, int64_t waited_ns, int64_t left_ns, int64_t now_ns)
{
    bool soon = !up && left_ns >= 0 && left_ns < 2 * floor->yield_ns; /* a yield could take longer than the wait */
    if (now_ns >= floor->yield_fades_ns) {
        floor->yield_ns /= 2;
        floor->yield_fades_ns = now_ns + YIELD_FADES_NS;
    }
    if (!up && left_ns > SLEEP_OVER_NS + floor->late_ns)
        sleep_for(floor, left_ns);
    else if (up && waited_ns > UP_SPIN_NS)
        cot_nap();
    else if (waited_ns > SPIN_NS && !soon && now_ns >= floor->yield_at_ns)
        yield(floor);
    else
        for (int i = 0; i < 16; i++)
            __builtin_ia32_pause();
}

/* The state in which a launch was allowed: the time, the rule, and the work class of the active LS work. */
struct leave {
    struct floor_rule rule;
    uint32_t ls_class;
    int64_t now_ns;
};

static bool may_go(struct floor *floor, struct gpu *gpu, struct work work, int64_t next_ns, struct leave *leave)
{
    leave->now_ns = look_at_clock(floor);
    gpu->page_slot->floor_ns = (uint64_t)leave->now_ns; /* tells the agent that the process launches work */
    leave->rule = current_rule(floor, gpu, work);
    leave->ls_class = active_class(floor->page, work.work_class, leave->now_ns);
    return floor_may_go(&leave->rule, &floor->state, leave->ls_class, next_ns, leave->now_ns);
}

/* Returns the predicted end of the oldest batch in flight. At that time the next batch begins. */
static int64_t oldest_ends_ns(struct floor *floor)
{
    if (floor->oldest == floor->newest)
        return floor->state.busy_until_ns;
    return floor->state.busy_until_ns - (floor->state.outstanding_ns - cot_piece(floor, floor->oldest)->predicted_ns);
}

static struct leave wait_for_floor(struct floor *floor, struct gpu *gpu, struct work work, int64_t next_ns)
{
    struct leave leave;
    int64_t began = 0, progress = 0;
    bool up = false;
    uint32_t oldest = floor->oldest;
    /* decide by the known state first, since asking the driver for ended work takes longer */
    while (!may_go(floor, gpu, work, next_ns, &leave)) {
        cot_pieces_resolve(floor, leave.now_ns);
        if (may_go(floor, gpu, work, next_ns, &leave) || cot_exiting())
            break;
        if (!began)
            began = progress = leave.now_ns;
        if (floor->oldest != oldest || leave.ls_class) {
            oldest = floor->oldest;
            progress = leave.now_ns;
        }
        if (floor->oldest != floor->newest && leave.now_ns - progress > COT_STALL_NS)
            floor->stalled = true;
        if (floor->stalled && !leave.ls_class)
            break;
        if (cot_piece(floor, floor->newest)->count > 0)
            cot_piece_close(floor, event_interval_ns(floor));
        bool shut = leave.ls_class && !leave.rule.overlap_permille;
        up = up || leave.ls_class;
        int64_t left_ns = leave.ls_class ? 0 : oldest_ends_ns(floor) - leave.now_ns;
        pause_a_little(floor, shut, leave.now_ns - began, left_ns, leave.now_ns);
    }
    if (began)
        atomic_fetch_add(&gpu->waited_ns, (uint64_t)(leave.now_ns - began));
    cot_ahead_consider(floor, began ? leave.now_ns - began : 0, up, leave.now_ns);
    return leave;
}

/* Returns whether the open batch is complete: it has half of the budget, or its log is full. A program that launches
 * slowly has a larger budget. So its batches are longer and need fewer events, which slow such a program down most. */
static bool has_enough(const struct piece *open, int64_t allowed_ns)
{
    return open->predicted_ns >= floor_most(allowed_ns / 2, LEAST_PIECE_NS) || open->count >= PIECE_LOG;
}

/* Returns whether the launch stays within the budget, judged without a call of the driver; if so, counts it. */
static bool is_in_bound(struct floor *floor, struct gpu *gpu, const struct piece *open, int64_t ns)
{
    struct floor_rule rule = current_rule(floor, gpu, floor->stated);
    int64_t allowed_ns = floor_allowed(&rule, &floor->state);
    if (floor->state.open_at_ns == 0 || has_enough(open, allowed_ns) || floor_paced(&rule) ||
        floor->state.outstanding_ns + ns > allowed_ns)
        return false;
    int64_t now_ns = glance_at_clock(floor);
    gpu->page_slot->floor_ns = (uint64_t)now_ns; /* tells the agent that the process launches work */
    floor_went(&rule, &floor->state, 0, ns, now_ns);
    return true;
}

/* The common case: no LS work is active, enough of the budget is left, and the launch belongs to the open batch. Then
 * the launch is counted without a call of the driver or the system. False: cot_floor_enter decides. */
bool cot_floor_goes_on(struct thread *t, struct cost *cost)
{
    struct gpu *gpu = t->gpu;
    struct floor *floor = gpu->floor;
    bool ahead = floor->ahead.on, up = floor_any_raised(floor->page);
    if (floor->page->scheme != COTENANT_SCHEME_TIDAL || (up && !(ahead && floor->ahead.behind)) ||
        pthread_mutex_trylock(&floor->lock) != 0)
        return false;
    floor->ahead.behind = up;
    struct piece *open = cot_piece(floor, floor->newest);
    bool goes = floor->thread == t && floor->context == t->context && floor->stream == t->stream &&
                floor->handle == t->stream->handle && open->count > 0 && !floor->open_solo && ahead == floor->ahead.on &&
                (ahead ? cot_ahead_goes_on(floor, open, cost->ns) : is_in_bound(floor, gpu, open, cost->ns));
    if (goes) {
        if (ahead)
            cot_ahead_count(floor, cost->ns, glance_at_clock(floor));
        open->log[open->count++] = cost;
        open->predicted_ns += cost->ns;
        cot_count(&gpu->predicted_busy_ns, cost->ns);
    }
    pthread_mutex_unlock(&floor->lock);
    return goes;
}

/* Counts a launch of the common case as started if the turn gate is open, too. False: cot_gate_slow goes on. */
bool cot_floor_try(struct thread *t, uintptr_t key, CUstream stream)
{
    struct calls *calls = t->calls;
    struct cost *cost = cot_cost(key);
    const struct cotenant_floor *page = t->gpu->floor->page;
    if (cost->key != key || t->stream->handle != stream || atomic_load_explicit(&calls->handle, memory_order_relaxed) != stream ||
        atomic_load_explicit(&cot_captures, memory_order_relaxed) > 0 || cot_profiling)
        return false;
    cot_count(&calls->started, 1); /* the launch is counted before `open` is checked: cot_calls_close says why */
    if (atomic_load_explicit(&calls->open, memory_order_relaxed) &&
        (page->scheme == COTENANT_SCHEME_FREE || page->present == 0 || cot_floor_goes_on(t, cost)))
        return true;
    cot_count(&calls->started, -1);
    return false;
}

static void count_launch(struct floor *floor, struct thread *t, struct cost *cost, int64_t now_ns)
{
    struct piece *open = cot_piece(floor, floor->newest);
    if (open->count == 0)
        open->began_ns = now_ns;
    open->log[open->count++] = cost;
    open->predicted_ns += cost->ns;
    cot_count(&t->gpu->predicted_busy_ns, cost->ns); /* floor->lock protects this counter */
}

/* Lets a launch go now, with a wait in its stream for the end of LS work. False: it must wait on the host instead. */
static bool enter_ahead(struct floor *floor, struct thread *t, struct cost *cost, const struct floor_rule *rule)
{
    if (cost->ns == COST_UNKNOWN_NS || atomic_load(&cot_captures) > 0 || !cot_ahead_may(floor, t->gpu, rule)) {
        floor->ahead.on = false; /* a kernel without an estimate is timed alone */
        return false;
    }
    struct piece *open = cot_piece(floor, floor->newest);
    bool fresh = !floor->ahead.on || floor->stream != t->stream || floor->handle != t->stream->handle || floor->thread != t;
    if (open->count > 0 && (fresh || cot_ahead_is_full(open))) {
        cot_pieces_resolve(floor, (int64_t)cot_now_ns());
        cot_piece_close(floor, 0);
    }
    cot_ahead_wait(floor, t->gpu, cost->ns);
    open = cot_piece(floor, floor->newest);
    if (open->count >= PIECE_LOG)
        open->count = 0; /* the log of the batch is full; overwriting it loses only a timing sample */
    /* launches that have passed their wait are not stopped, so the first launch during LS work needs a new wait */
    bool up = floor_any_raised(floor->page);
    fresh = fresh || (up && !floor->ahead.behind);
    floor->ahead.behind = up;
    if ((fresh || floor->ahead.since_ns + cost->ns > floor->ahead.part_ns) && !cot_ahead_hold(floor, t, rule)) {
        floor->ahead.on = false;
        return false;
    }
    floor->ahead.on = open->held = true;
    floor->ahead.window_at_ns = 0;
    floor->stream = t->stream;
    floor->handle = t->stream->handle;
    floor->thread = t;
    int64_t now_ns = look_at_clock(floor);
    t->gpu->page_slot->floor_ns = (uint64_t)now_ns;
    cot_ahead_count(floor, cost->ns, now_ns);
    count_launch(floor, t, cost, now_ns);
    return true;
}

/* Waits until this launch of a best-effort process may go, and counts it. */
void cot_floor_enter(struct thread *t, struct cost *cost)
{
    struct floor *floor = t->gpu->floor;
    if (floor->page->scheme == COTENANT_SCHEME_FREE || floor->page->present == 0)
        return;
    struct work work = floor->stated;
    if (floor->page->scheme == COTENANT_SCHEME_ORION)
        work = cot_work_now(work);
    pthread_mutex_lock(&floor->lock);
    if (work.duration_ns)
        cost->ns = work.duration_ns; /* under the scheme orion, the kernel profile's duration replaces the estimate */
    if (floor->context != t->context)
        cot_pieces_switch(floor, t->context);
    struct floor_rule rule = current_rule(floor, t->gpu, work);
    if (cost->ns > LONG_KERNEL_NS)
        t->gpu->page_slot->long_kernel_ns = (uint64_t)look_at_clock(floor);
    if (enter_ahead(floor, t, cost, &rule)) {
        pthread_mutex_unlock(&floor->lock);
        return;
    }
    struct piece *open = cot_piece(floor, floor->newest);
    if (open->count > 0 && (has_enough(open, floor_allowed(&rule, &floor->state)) || floor->stream != t->stream ||
                            floor->handle != t->stream->handle)) {
        cot_pieces_resolve(floor, (int64_t)cot_now_ns());
        cot_piece_close(floor, event_interval_ns(floor));
    }
    struct leave leave = wait_for_floor(floor, t->gpu, work, cost->ns);
    open = cot_piece(floor, floor->newest);
    if (cot_pieces_full(floor) && open->count >= PIECE_LOG)
        open->count = 0; /* the log of the batch is full; overwriting it loses only a timing sample */
    floor->stream = t->stream;
    floor->handle = t->stream->handle;
    floor->thread = t;
    if (floor->state.outstanding_ns == 0 && cost->ns == COST_UNKNOWN_NS && open->count == 0) {
        cot_piece_close(floor, 0); /* the first launch of a kernel is timed from its start */
        open = cot_piece(floor, floor->newest);
        floor->open_solo = t->solo = true;
    }
    floor_went(&leave.rule, &floor->state, leave.ls_class, cost->ns, leave.now_ns);
    count_launch(floor, t, cost, leave.now_ns);
    pthread_mutex_unlock(&floor->lock);
}

/* Called after the first launch of a kernel, graph or copy. Closes the batch now: if that happened at the next launch,
 * and the program launches more slowly than its GPU works, the time until then would count as kernel time. */
void cot_floor_launched(struct thread *t)
{
    struct floor *floor = t->gpu->floor;
    t->solo = false;
    if (!floor)
        return;
    pthread_mutex_lock(&floor->lock);
    if (floor->open_solo && floor->thread == t && cot_piece(floor, floor->newest)->count == 1)
        cot_piece_close(floor, 0);
    pthread_mutex_unlock(&floor->lock);
}

/* Called when a context was destroyed. A thread that waits at the LS gate holds the lock during its whole wait, and
 * the program may be ending, so the number of attempts to take the lock is limited. */
void cot_floor_context_gone(struct gpu *gpu, CUcontext context)
{
    struct floor *floor = gpu->floor;
    for (int tries = 0; floor && tries < GONE_TRIES; tries++) {
        if (pthread_mutex_trylock(&floor->lock) == 0) {
            cot_pieces_forget(floor, context);
            pthread_mutex_unlock(&floor->lock);
            return;
        }
        cot_nap();
    }
}
