/* Device-gated run-ahead: a best-effort program launches work early, and the work waits on the device until no
 * latency-sensitive (LS) work is active.
 *
 * A training step launches long kernels in one part and short ones in another. For the short ones the host is too
 * slow: it keeps the GPU busy only by launching some ms ahead. An in-flight budget of 100 us would prevent that and
 * cost a quarter of the program's time on a card (docs/benchmarks/colocation.md). So in this mode the host may launch
 * ahead, and the shim inserts a wait into the stream before each budget_ns of work. LS work that arrives then finds
 * little more than one such part of the work in flight, however much is queued behind it.
 *
 * The stream waits for the flags that LS processes write to the wait-flag page (struct cotenant_floor_words), so it
 * stops and resumes without the shim. A wait in a stream has no time limit, so a thread of the shim clears flags whose
 * heartbeat has expired. The thread takes no lock and calls no driver function, since either could wait for a stream;
 * it continues to run while the program's exit handlers run. */
#define _GNU_SOURCE
#include <time.h>
#include <unistd.h>

#include "floor/pieces.h"
#include "words.h"

#define WATCH_NS 100000000
#define HOLDERS_A_WORD 4
#define LATELY_NS 10000000
#define WINDOW_NS 10000000
/* after this time the shim measures again how long the program's launches wait on the host */
#define STAY_NS INT64_C(2000000000)


/* Returns whether launches may wait on the device. Tenants that use turns may not: a turn ends only when all
 * launched work has ended. */
bool cot_ahead_may(const struct floor *floor, const struct gpu *gpu, const struct floor_rule *rule)
{
    int64_t now_ns = (int64_t)cot_now_ns();
    if (now_ns >= floor->ahead.until_ns && floor->page->run_ahead != COTENANT_RUN_AHEAD_ALWAYS)
        return false;
    return floor->page->run_ahead != COTENANT_RUN_AHEAD_NEVER && rule->scheme == COTENANT_SCHEME_TIDAL && rule->overlap_permille == 0 && !floor_paced(rule) &&
           floor->ahead.shown && floor->page->present_words == floor->page->present &&
           !floor->ahead.refused && now_ns >= floor->ahead.crowded_until_ns && !gpu->stale &&
           gpu->page_slot->flags & COTENANT_SLOT_UNGATED;
}

/* Chooses whether the next launches wait on the host or on the device, after a launch that waited on the host for
 * waited_ns. If launches wait on the host for much of the time (COTENANT_RUN_AHEAD_BELOW_PERMILLE or more), the program
 * launches faster than its GPU works, and keeps the GPU busy within the budget. Then launches continue to wait on the
 * host, because waits on the device leave more work in flight when LS work arrives: the GPU checks the flags as soon as
 * it reaches the wait in the stream's queue, which may be while the kernel in front of the wait still runs. Otherwise
 * the program may launch ahead for STAY_NS. Waits while LS work is active do not count. */
void cot_ahead_consider(struct floor *floor, int64_t waited_ns, bool up, int64_t now_ns)
{
    struct floor_ahead *ahead = &floor->ahead;
    if (ahead->window_at_ns == 0) {
        ahead->window_at_ns = now_ns;
        ahead->waited_ns = 0;
    } else if (up)
        ahead->window_at_ns += waited_ns;
    else
        ahead->waited_ns += waited_ns;
    int64_t passed_ns = floor_least(now_ns - ahead->window_at_ns, FLOOR_LONGEST_NS);
    if (passed_ns < WINDOW_NS)
        return;
    if (ahead->waited_ns * 1000 < passed_ns * COTENANT_RUN_AHEAD_BELOW_PERMILLE)
        ahead->until_ns = now_ns + STAY_NS;
    ahead->window_at_ns = 0;
}

/* Records that work is launched into a stream. In each stream, work that has passed its wait runs to its end, so the
 * budget is divided among the streams that were used recently. */
static void use_stream(struct floor_ahead *ahead, CUstream handle, int64_t budget_ns, int64_t now_ns)
{
    uint32_t place = 0, active = 0;
    for (uint32_t i = 0; i < AHEAD_STREAMS; i++)
        if (ahead->streams[i].handle == handle && ahead->streams[i].at_ns) {
            place = i;
            break;
        } else if (ahead->streams[i].at_ns < ahead->streams[place].at_ns)
            place = i;
    if (ahead->streams[place].at_ns && ahead->streams[place].handle != handle && now_ns - ahead->streams[place].at_ns < LATELY_NS)
        /* If a process uses too many streams, its launches wait on the host. There the budget limits the work of all
         * streams together, whereas on the device each stream may have a kernel that has passed its wait. */
        ahead->crowded_until_ns = now_ns + LATELY_NS;
    ahead->streams[place].handle = handle;
    ahead->streams[place].at_ns = now_ns;
    for (uint32_t i = 0; i < AHEAD_STREAMS; i++)
        active += ahead->streams[i].at_ns && now_ns - ahead->streams[i].at_ns < LATELY_NS;
    ahead->part_ns = budget_ns / active;
    ahead->since_ns = 0;
}

/* ---- LS processes whose heartbeat has expired ---- */

static bool is_shown(const struct cotenant_floor_words *shown, uint32_t holder)
{
    /* an LS process sets its flag on the gate page before the flag on the wait-flag page */
    return __atomic_load_n(&shown->raised[holder], __ATOMIC_ACQUIRE) != 0;
}

static bool is_believed(const struct cotenant_floor *page, uint32_t holder, int64_t now_ns)
{
    /* an LS process writes the time before it sets the flag */
    uint8_t raised = __atomic_load_n(&page->raised[holder], __ATOMIC_ACQUIRE);
    int64_t age_ns = now_ns - (int64_t)__atomic_load_n(&page->raised_ns[holder], __ATOMIC_RELAXED);
    int64_t limit_ns = (int64_t)page->heartbeat_timeout_ms * 1000000;
    return raised && age_ns < limit_ns && age_ns > -limit_ns;
}

static void lower(struct cotenant_floor_words *shown, uint32_t holder)
{
    __atomic_store_n(&shown->raised[holder], 0, __ATOMIC_SEQ_CST);
}

static void lower_all(struct cotenant_floor_words *shown)
{
    for (uint32_t i = 0; shown && i < COTENANT_FLOOR_HOLDERS; i++)
        lower(shown, i);
}

static void lower_silent(const struct cotenant_floor *page, struct cotenant_floor_words *shown)
{
    for (uint32_t i = 0; shown && i < COTENANT_FLOOR_HOLDERS; i++)
        if (is_shown(shown, i) && !is_believed(page, i, (int64_t)cot_now_ns())) {
            lower(shown, i);
            /* if the LS process has renewed its flag on the gate page in the meantime, the flag here is set again */
            if (is_believed(page, i, (int64_t)cot_now_ns()))
                __atomic_store_n(&shown->raised[i], 1, __ATOMIC_SEQ_CST);
        }
}

static void *watch(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "cotenant-ahead");
    for (;;) {
        for (uint32_t g = 0; g < cot_gpu_count(); g++) {
            struct floor *floor = __atomic_load_n(&cot_gpu_at(g)->floor, __ATOMIC_ACQUIRE);
            if (!floor)
                continue;
            /* an LS process may have set its flag on the previous agent's page after this process began to use the new
             * agent's page */
            lower_all(__atomic_load_n(&floor->ahead.before, __ATOMIC_ACQUIRE));
            lower_silent(floor->page, __atomic_load_n(&floor->ahead.shown, __ATOMIC_ACQUIRE));
        }
        nanosleep(&(struct timespec){.tv_nsec = WATCH_NS}, NULL);
    }
    return NULL;
}

static void start_watch(void) /* the caller holds cot_capture_lock, which protects runs_in */
{
    static pid_t runs_in;
    if (runs_in != getpid() && cot_start_thread(watch, NULL))
        runs_in = getpid();
}

/* ---- the wait in a stream ---- */

/* Returns the device address of the wait-flag page, on whose flags streams wait; 0: not available. The caller holds
 * cot_capture_lock, and no stream is being captured. */
static CUdeviceptr words(struct floor *floor, CUcontext context)
{
    struct floor_ahead *ahead = &floor->ahead;
    if (ahead->context == context)
        return ahead->words;
    /* The wait-flag page is pinned in one context only. If it were pinned in another context, too, and that context was
     * destroyed, the page would become invalid while streams wait on it. */
    if (ahead->pinned_in && ahead->pinned_in != context)
        return 0;
    void *page = ahead->shown;
    CUdeviceptr address = 0;
    CUresult (*where)(CUdeviceptr *, void *, unsigned) = REAL(cuMemHostGetDevicePointer_v2);
    if (where(&address, page, 0) != CUDA_SUCCESS) {
        if (REAL(cuMemHostRegister_v2)(page, COTENANT_FLOOR_BYTES,
                                                                               HOST_REGISTER_PORTABLE_DEVICEMAP) != CUDA_SUCCESS)
            return 0;
        ahead->pinned_in = context;
        if (where(&address, page, 0) != CUDA_SUCCESS)
            return 0;
    }
    ahead->context = context;
    start_watch();
    return ahead->words = address;
}

/* Returns how many 4-byte words of the wait-flag page a stream must check: those with the flags of all LS processes,
 * and of the next one that joins, which gets the first free index. */
static uint32_t words_in_use(const struct cotenant_floor *page)
{
    uint32_t count = 1;
    for (uint32_t i = 0; i < COTENANT_FLOOR_HOLDERS; i++)
        if (__atomic_load_n(&page->pid[i], __ATOMIC_RELAXED) || __atomic_load_n(&page->raised[i], __ATOMIC_RELAXED))
            count = i + 2;
    return floor_least(count + HOLDERS_A_WORD - 1, COTENANT_FLOOR_HOLDERS) / HOLDERS_A_WORD;
}

/* Inserts a wait into the stream, so that the thread's next launches wait on the device until no LS work is active.
 * Returns false if the driver refused. */
bool cot_ahead_hold(struct floor *floor, struct thread *t, const struct floor_rule *rule)
{
    struct word_operation operations[COTENANT_FLOOR_HOLDERS / HOLDERS_A_WORD];
    bool done = false;
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0) {
        CUdeviceptr at = words(floor, t->context);
        uint32_t count = words_in_use(floor->page);
        for (uint32_t i = 0; i < count; i++)
            operations[i] = (struct word_operation){.kind = WORD_WAIT, .address = at + i * HOLDERS_A_WORD, .flags = WORD_EQUAL};
        done = at && REAL(cuStreamBatchMemOp_v2)(t->stream->handle, count, operations, 0) == CUDA_SUCCESS;
        floor->ahead.refused = !done;
    }
    pthread_mutex_unlock(&cot_capture_lock);
    /* The per-thread stream of every thread has the same handle value, so the address of the thread's record is used
     * instead. */
    bool own = t->stream->handle == (CUstream)(uintptr_t)CU_STREAM_PER_THREAD_VALUE;
    use_stream(&floor->ahead, own ? (CUstream)t : t->stream->handle, rule->budget_ns, (int64_t)cot_now_ns());
    return done;
}

/* ---- the limit of running ahead ---- */

/* Waits until work of the predicted length ns may be launched. Gives up if no launched work ends for COT_STALL_NS;
 * time in which LS work is active does not count. */
void cot_ahead_wait(struct floor *floor, struct gpu *gpu, int64_t ns)
{
    uint64_t began = cot_now_ns(), progress = began, now = began;
    uint32_t oldest = floor->oldest;
    while (floor->state.outstanding_ns > 0 && (floor->state.outstanding_ns + ns > COTENANT_RUN_AHEAD_NS ||
                                               cot_pieces_full(floor))) {
        cot_pieces_resolve(floor, (int64_t)now);
        if (floor->oldest != oldest || cot_floor_is_up(floor->page, (int64_t)now)) {
            oldest = floor->oldest;
            progress = now;
        }
        if (floor->oldest == floor->newest || cot_exiting())
            break;
        /* the work that was launched may wait for an event that the program records only after this launch */
        if (floor->stalled || now - progress > COT_STALL_NS) {
            floor->stalled = true;
            break;
        }
        gpu->page_slot->floor_ns = now;
        cot_nap();
        now = cot_now_ns();
    }
    if (now != began)
        atomic_fetch_add(&gpu->waited_ns, now - began);
}

/* Called when the pages of a new agent are in use: clears the flags of the old wait-flag page, so that streams that
 * wait on it continue. */
void cot_ahead_move(struct floor *floor, struct cotenant_floor_words *shown)
{
    lower_all(floor->ahead.shown);
    __atomic_store_n(&floor->ahead.before, floor->ahead.shown, __ATOMIC_RELEASE);
    floor->ahead.context = floor->ahead.pinned_in = NULL;
    floor->ahead.refused = floor->ahead.on = false;
    __atomic_store_n(&floor->ahead.shown, shown, __ATOMIC_RELEASE);
}
