/* Best-effort tenants: every launch asks the floor (floor.h) and the rule (floor_rule.h), and what is in flight is told by events.
 *
 * A best-effort process takes this path for each launch; other tenants never come here.  Launches between two events
 * are a piece.  A piece is closed with an event when it is long enough to matter or when somebody has to wait for it, so
 * work that is bound by the host pays for few of them.  Pieces that ran back to back teach what launches cost.
 *
 * Two threads of a process may launch at once: one lock per GPU makes one sequence of them.  It is never taken inside
 * cot_lock, and cot_capture_lock only inside it. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "floor_rule.h"
#include "shim.h"

#define PIECES 32                     /* power of two */
#define PIECE_LOG 64
#define LEAST_PIECE_NS 25000          /* an event costs about 2 us of host and 1 us of GPU time */
#define SPIN_NS 60000                 /* then other threads may have the processor */
#define UP_SPIN_NS 10000000           /* LS bursts are short: be there when one ends */
#define NAP_NS 30000
#define SLEEP_OVER_NS 200000          /* a wait that is so much longer than sleeps run late is slept, but for the last part */
#define WAKE_EARLY_NS 60000
#define LONGEST_SLEEP_NS 10000000
#define STALL_NS INT64_C(100000000)   /* nothing ends: it may wait for a later launch */

struct piece {
    CUevent event;
    bool told;                        /* the event was recorded; else it ends by the clock */
    bool exact;                       /* no idle time between the event before and this one */
    int64_t predicted_ns;
    uint32_t count;
    struct cost *log[PIECE_LOG];
};

struct floor {
    const struct cotenant_floor *page;
    pthread_mutex_t lock;
    int fd;
    uint32_t work_class, work_sms;
    uint64_t interval_ns;             /* of this tenant; 0: the page's */
    struct floor_state state;
    CUcontext context;
    struct piece pieces[PIECES];
    uint32_t oldest, newest;          /* [oldest, newest) are closed, newest is open */
    bool have_origin;                 /* the piece before the oldest was told and ended: a time to measure from */
    bool open_solo;                   /* the open piece is one new kernel, and the event before it was recorded for it */
    int64_t late_ns;                  /* how late sleeps end */
    bool stalled;                     /* nothing ended for long: do not wait for that again */
    struct stream *stream;            /* of the open piece */
    CUstream handle;
    struct thread *thread;
};

bool cot_floor_solo;

DECLARE_REAL(cuEventCreate);
DECLARE_REAL(cuEventRecord);
DECLARE_REAL(cuEventQuery);
DECLARE_REAL(cuEventElapsedTime);

/* ---- joining ---- */

/* After the GPU was attached, to a first agent or to one that came back. */
void cot_floor_join(struct gpu *gpu)
{
    if (!(gpu->page_slot->flags & COTENANT_SLOT_BEST_EFFORT))
        return;
    struct cotenant_message message;
    struct cotenant_floor_reply reply;
    int fd;
    const struct cotenant_floor *page = cot_floor_page(gpu, COTENANT_FLOOR_BEST_EFFORT, &fd, &message);
    if (!page)
        return;
    memcpy(&reply, message.body.bytes, sizeof reply);
    struct floor *floor = gpu->floor;
    if (!floor) {
        if (!(floor = calloc(1, sizeof *floor))) {
            close(fd);
            return;
        }
        pthread_mutex_init(&floor->lock, NULL);
        floor->fd = -1;
    }
    if (floor->fd >= 0)
        close(floor->fd);
    floor->fd = fd; /* stays open: its end tells the agent that this process is gone */
    floor->work_class = reply.work_class;
    floor->work_sms = reply.work_sms;
    floor->interval_ns = reply.interval_ns;
    __atomic_store_n(&floor->page, page, __ATOMIC_RELEASE); /* an older page stays mapped */
    __atomic_store_n(&gpu->floor, floor, __ATOMIC_RELEASE);
}

/* ---- the floor ---- */

/* The class of an LS holder that is active and believed; 0 if there is none. */
static uint32_t active_class(const struct cotenant_floor *page, int64_t now_ns)
{
    uint64_t words[COTENANT_FLOOR_HOLDERS / 8];
    uint64_t any = 0;
    for (uint32_t i = 0; i < COTENANT_FLOOR_HOLDERS / 8; i++) {
        words[i] = __atomic_load_n((const uint64_t *)page->raised + i, __ATOMIC_RELAXED);
        any |= words[i];
    }
    if (!any)
        return 0;
    const uint8_t *raised = (const uint8_t *)words;
    for (uint32_t i = 0; i < COTENANT_FLOOR_HOLDERS; i++)
        if (raised[i] && now_ns - (int64_t)__atomic_load_n(&page->raised_ns[i], __ATOMIC_RELAXED) <
                             (int64_t)page->hold_limit_ns)
            return raised[i];
    return 0;
}

static struct floor_rule current_rule(const struct floor *floor)
{
    const struct cotenant_floor *page = floor->page;
    uint32_t tenants = page->tenants ? page->tenants : 1;
    uint64_t interval_ns = floor->interval_ns ? floor->interval_ns : page->interval_ns;
    return (struct floor_rule){.scheme = page->scheme,
                               .beside_permille = page->beside_permille,
                               .sm_threshold = page->sm_threshold,
                               .work_class = floor->work_class,
                               .work_sms = floor->work_sms,
                               .interval_ns = (int64_t)(interval_ns / tenants),
                               .lead_ns = (int64_t)page->lead_ns};
}

/* ---- pieces of work in flight ---- */

static struct piece *at(struct floor *floor, uint32_t index)
{
    return &floor->pieces[index % PIECES];
}

static void forget(struct floor *floor, CUcontext context)
{
    for (uint32_t i = 0; i < PIECES; i++)
        floor->pieces[i] = (struct piece){0}; /* events of a context die with it */
    floor->oldest = floor->newest = 0;
    floor->have_origin = floor->open_solo = floor->stalled = false;
    floor->context = context;
    floor->state = (struct floor_state){0};
}

static void learn(struct piece *piece, double elapsed_ns)
{
    int64_t thought_ns = 0;
    for (uint32_t i = 0; i < piece->count; i++)
        thought_ns += piece->log[i]->ns;
    double ratio = thought_ns > 0 ? elapsed_ns / (double)thought_ns : 1;
    if (ratio > 0.95 && ratio < 1.05)
        return;
    if (!piece->exact && ratio >= 1) /* may hold idle time: only an upper bound */
        return;
    for (uint32_t i = 0; i < piece->count; i++) {
        bool before = false;
        for (uint32_t j = 0; j < i && !before; j++)
            before = piece->log[j] == piece->log[i];
        int64_t ns = (int64_t)((double)piece->log[i]->ns * ratio);
        if (!before)
            piece->log[i]->ns = ns > COST_FLOOR_NS ? ns : COST_FLOOR_NS;
    }
}

static void ended(struct floor *floor, struct piece *piece, int64_t now_ns)
{
    floor_ended(&floor->state, piece->predicted_ns, now_ns);
    floor->oldest++;
    floor->stalled = false;
}

/* Takes pieces that have ended off the ring. */
static void resolve(struct floor *floor, int64_t now_ns)
{
    if (floor->oldest == floor->newest)
        return;
    pthread_mutex_lock(&cot_capture_lock);
    bool may_query = atomic_load(&cot_captures) == 0;
    while (floor->oldest != floor->newest) {
        struct piece *piece = at(floor, floor->oldest);
        int64_t left_after = floor->state.outstanding_ns - piece->predicted_ns;
        if (!piece->told || !may_query) {
            if (floor->state.busy_until_ns - left_after > now_ns)
                break;
            floor->have_origin = false;
            ended(floor, piece, now_ns);
            continue;
        }
        CUresult state = ((CUresult(*)(CUevent))REAL(cuEventQuery))(piece->event);
        if (state == CUDA_ERROR_NOT_READY)
            break;
        float elapsed_ms = 0;
        if (state == CUDA_SUCCESS && floor->have_origin && piece->count > 0 &&
            ((CUresult(*)(float *, CUevent, CUevent))REAL(cuEventElapsedTime))(
                &elapsed_ms, at(floor, floor->oldest - 1)->event, piece->event) == CUDA_SUCCESS && elapsed_ms > 0)
            learn(piece, (double)elapsed_ms * 1e6);
        floor->have_origin = state == CUDA_SUCCESS;
        ended(floor, piece, now_ns);
    }
    pthread_mutex_unlock(&cot_capture_lock);
}

/* Ends the open piece with an event in its stream; an empty one gives a time to measure from. */
static void close_piece(struct floor *floor)
{
    struct piece *piece = at(floor, floor->newest);
    if (floor->newest - floor->oldest >= PIECES - 2)
        return;
    pthread_mutex_lock(&cot_capture_lock);
    piece->told = atomic_load(&cot_captures) == 0 && floor->stream->handle == floor->handle &&
                  (floor->handle != (CUstream)(uintptr_t)CU_STREAM_PER_THREAD_VALUE || floor->thread == cot_thread) &&
                  (piece->event ||
                   ((CUresult(*)(CUevent *, unsigned))REAL(cuEventCreate))(&piece->event, 0) == CUDA_SUCCESS) &&
                  ((CUresult(*)(CUevent, CUstream))REAL(cuEventRecord))(piece->event, floor->handle) == CUDA_SUCCESS;
    pthread_mutex_unlock(&cot_capture_lock);
    piece->exact = floor->newest != floor->oldest || (floor->open_solo && piece->count == 1);
    floor->open_solo = false;
    floor->newest++;
    floor->state.unfinished++;
    at(floor, floor->newest)->count = 0;
    at(floor, floor->newest)->predicted_ns = 0;
}

static void resolve_and_close(struct floor *floor)
{
    resolve(floor, (int64_t)cot_now_ns());
    close_piece(floor);
}

/* Sleeps for most of the time that is left; how late sleeps end on this machine is learned, worst first. */
static void sleep_for(struct floor *floor, int64_t left_ns)
{
    int64_t began = (int64_t)cot_now_ns();
    int64_t ns = (left_ns > LONGEST_SLEEP_NS ? LONGEST_SLEEP_NS : left_ns) - WAKE_EARLY_NS - floor->late_ns;
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    int64_t late = (int64_t)cot_now_ns() - began - ns;
    floor->late_ns = late > floor->late_ns ? late : floor->late_ns - floor->late_ns / 64;
}

static void pause_a_little(struct floor *floor, bool up, int64_t waited_ns, int64_t left_ns)
{
    if (!up && left_ns > SLEEP_OVER_NS + floor->late_ns)
        sleep_for(floor, left_ns);
    else if (up && waited_ns > UP_SPIN_NS)
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    else if (waited_ns > SPIN_NS)
        sched_yield();
    else
        for (int i = 0; i < 16; i++)
            __builtin_ia32_pause();
}

/* When a launch was let go, under which rule, beside LS work of which class. */
struct leave {
    struct floor_rule rule;
    uint32_t ls_class;
    int64_t now_ns;
};

static bool may_go(struct floor *floor, int64_t next_ns, struct leave *leave)
{
    leave->now_ns = (int64_t)cot_now_ns();
    leave->rule = current_rule(floor);
    leave->ls_class = active_class(floor->page, leave->now_ns);
    return floor_may_go(&leave->rule, &floor->state, leave->ls_class, next_ns, leave->now_ns);
}

static struct leave wait_for_floor(struct floor *floor, struct gpu *gpu, int64_t next_ns)
{
    struct leave leave;
    int64_t began = 0, progress = 0;
    uint32_t oldest = floor->oldest;
    while (!may_go(floor, next_ns, &leave)) { /* by what is known; asking the driver costs more */
        resolve(floor, leave.now_ns);
        if (may_go(floor, next_ns, &leave) || cot_exiting())
            break;
        if (!began)
            began = progress = leave.now_ns;
        if (floor->oldest != oldest || leave.ls_class) {
            oldest = floor->oldest;
            progress = leave.now_ns;
        }
        if (floor->oldest != floor->newest && leave.now_ns - progress > STALL_NS)
            floor->stalled = true;
        if (floor->stalled && !leave.ls_class)
            break;
        if (at(floor, floor->newest)->count > 0)
            close_piece(floor);
        bool shut = leave.ls_class && !leave.rule.beside_permille;
        pause_a_little(floor, shut, leave.now_ns - began, leave.ls_class ? 0 : floor->state.busy_until_ns - leave.now_ns);
    }
    if (began)
        atomic_fetch_add(&gpu->waited_ns, (uint64_t)(leave.now_ns - began));
    return leave;
}

/* Waits until this launch of a best-effort process may go, and counts it. */
void cot_floor_enter(struct thread *t, struct cost *cost)
{
    struct floor *floor = t->gpu->floor;
    if (floor->page->scheme == COTENANT_SCHEME_FREE)
        return;
    pthread_mutex_lock(&floor->lock);
    if (floor->context != t->context)
        forget(floor, t->context);
    struct piece *open = at(floor, floor->newest);
    int64_t enough_ns = current_rule(floor).interval_ns / 2;
    if (open->count > 0 && (open->predicted_ns >= (enough_ns > LEAST_PIECE_NS ? enough_ns : LEAST_PIECE_NS) ||
                            open->count >= PIECE_LOG || floor->stream != t->stream || floor->handle != t->stream->handle))
        resolve_and_close(floor);
    struct leave leave = wait_for_floor(floor, t->gpu, cost->ns);
    open = at(floor, floor->newest);
    if (floor->newest - floor->oldest >= PIECES - 2 && open->count >= PIECE_LOG)
        open->count = 0; /* stalled for long: what is lost is only what it would have taught */
    floor->stream = t->stream;
    floor->handle = t->stream->handle;
    floor->thread = t;
    if (floor->state.outstanding_ns == 0 && cost->ns == COST_UNKNOWN_NS && open->count == 0) {
        close_piece(floor); /* new: time it from its start */
        open = at(floor, floor->newest);
        floor->open_solo = cot_floor_solo = true;
    }
    floor_went(&leave.rule, &floor->state, leave.ls_class, cost->ns, leave.now_ns);
    open->log[open->count++] = cost;
    open->predicted_ns += cost->ns;
    pthread_mutex_unlock(&floor->lock);
    atomic_fetch_add_explicit(&t->gpu->predicted_busy_ns, (uint64_t)cost->ns, memory_order_relaxed);
}

/* After the launch of a new kernel: to its end, not to the program's next launch.  What a program that is slower than its GPU
 * launches would else be thought to take as long as the program takes. */
void cot_floor_launched(struct thread *t)
{
    struct floor *floor = t->gpu->floor;
    if (!floor)
        return;
    pthread_mutex_lock(&floor->lock);
    if (floor->open_solo && floor->thread == t && at(floor, floor->newest)->count == 1)
        close_piece(floor);
    cot_floor_solo = false;
    pthread_mutex_unlock(&floor->lock);
}

/* A child has neither the lock's owner nor the connection. */
void cot_floor_after_fork(struct gpu *gpu)
{
    if (gpu->floor && gpu->floor->fd >= 0)
        close(gpu->floor->fd);
    gpu->floor = NULL;
}
