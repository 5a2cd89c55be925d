/* Best-effort work that is launched before its time, and waits for the floor on the device.
 *
 * Training launches long kernels in one part of a step and short ones in another, which its host is too slow for: it keeps the
 * GPU busy by running ahead by some ms.  A bound of 100 us on what is launched takes that from it, a quarter of its time on a card
 * (docs/benchmarks/colocation.md).  So here it runs ahead, and its stream waits, before each interval_ns of work, until nobody
 * holds the floor: what LS work finds in flight is the rest of such a part, whatever is queued behind.
 *
 * A stream waits for `raised` itself, so nothing of ours is needed to stop it or to let it go on.  Who holds the floor and is not
 * believed any more (hold_limit_ns) is lowered by the waiting process, since a stream asks no clock: cot_ahead_watch. */
#define _GNU_SOURCE
#include <time.h>

#include "floor_pieces.h"
#include "words.h"

#define PIECE_NS 500000      /* between two events, by which the host knows how far ahead it is */
#define NAP_NS 200000
#define STALL_NS UINT64_C(100000000)
#define WATCH_NS UINT64_C(100000000)
#define HOLDERS_A_WORD 4

DECLARE_REAL(cuMemHostRegister_v2);
DECLARE_REAL(cuMemHostGetDevicePointer_v2);
DECLARE_REAL(cuStreamBatchMemOp_v2);

/* Whether launches may be held on the device.  Turns end when all that is launched has ended, so what takes turns is not. */
bool cot_ahead_may(const struct floor *floor, const struct gpu *gpu, const struct floor_rule *rule)
{
    return floor->page->ahead_us > 0 && rule->scheme == COTENANT_SCHEME_TIDAL && rule->beside_permille == 0 && !floor_paced(rule) &&
           floor->ahead.shared && !floor->ahead.refused && !gpu->stale && gpu->page_slot->flags & COTENANT_SLOT_UNGATED;
}

/* Whether a launch of the open piece needs nothing but to be counted. */
bool cot_ahead_goes_on(const struct floor *floor, const struct floor_rule *rule, const struct piece *open, int64_t ns)
{
    return ns != COST_UNKNOWN_NS && open->predicted_ns < PIECE_NS && open->count < PIECE_LOG &&
           floor->ahead.since_ns + ns <= rule->interval_ns &&
           floor->state.outstanding_ns + ns <= (int64_t)floor->page->ahead_us * 1000;
}

void cot_ahead_count(struct floor *floor, int64_t ns, int64_t now_ns)
{
    struct floor_state *state = &floor->state;
    state->busy_until_ns = floor_most(state->busy_until_ns, now_ns) + ns;
    state->outstanding_ns += ns;
    state->open_at_ns = 0; /* how dry the GPU is says nothing of a program that runs ahead */
    floor->ahead.since_ns += ns;
}

/* ---- the words ---- */

static CUdeviceptr words(struct floor *floor, CUcontext context) /* with cot_capture_lock, while nothing is captured */
{
    struct floor_ahead *ahead = &floor->ahead;
    if (ahead->context == context)
        return ahead->words;
    void *page = (void *)ahead->shared;
    CUdeviceptr address = 0;
    CUresult (*where)(CUdeviceptr *, void *, unsigned) = (CUresult(*)(CUdeviceptr *, void *, unsigned))REAL(cuMemHostGetDevicePointer_v2);
    if (where(&address, page, 0) != CUDA_SUCCESS &&
        (((CUresult(*)(void *, size_t, unsigned))REAL(cuMemHostRegister_v2))(page, COTENANT_FLOOR_BYTES,
                                                                            HOST_REGISTER_PORTABLE_DEVICEMAP) != CUDA_SUCCESS ||
         where(&address, page, 0) != CUDA_SUCCESS))
        return 0;
    ahead->context = context;
    return ahead->words = address + offsetof(struct cotenant_floor, raised);
}

/* As many as have holders: one that joins later than this is waited for from the next part on. */
static uint32_t words_in_use(const struct cotenant_floor *page)
{
    uint32_t last = 0;
    for (uint32_t i = 0; i < COTENANT_FLOOR_HOLDERS; i++)
        if (__atomic_load_n(&page->pid[i], __ATOMIC_RELAXED) || __atomic_load_n(&page->raised[i], __ATOMIC_RELAXED))
            last = i;
    return last / HOLDERS_A_WORD + 1;
}

/* What the thread launches next waits until nobody holds the floor.  False: it cannot, now or ever. */
bool cot_ahead_hold(struct floor *floor, struct thread *t)
{
    struct word_operation operations[COTENANT_FLOOR_HOLDERS / HOLDERS_A_WORD];
    bool done = false;
    pthread_mutex_lock(&cot_capture_lock);
    if (atomic_load(&cot_captures) == 0) {
        CUdeviceptr at = words(floor, t->context);
        uint32_t count = words_in_use(floor->page);
        for (uint32_t i = 0; i < count; i++)
            operations[i] = (struct word_operation){.kind = WORD_WAIT, .address = at + i * HOLDERS_A_WORD, .flags = WORD_EQUAL};
        done = at && ((CUresult(*)(CUstream, unsigned, void *, unsigned))REAL(cuStreamBatchMemOp_v2))(
                         t->stream->handle, count, operations, 0) == CUDA_SUCCESS;
        floor->ahead.refused = !done;
    }
    pthread_mutex_unlock(&cot_capture_lock);
    floor->ahead.since_ns = 0;
    return done;
}

/* ---- not too far ---- */

/* Waits until ns more may be launched, for as long as anything ends. */
void cot_ahead_wait(struct floor *floor, struct gpu *gpu, int64_t ns)
{
    uint64_t began = cot_now_ns(), progress = began, now = began;
    uint32_t oldest = floor->oldest;
    while (floor->state.outstanding_ns > 0 && (floor->state.outstanding_ns + ns > (int64_t)floor->page->ahead_us * 1000 ||
                                               cot_pieces_full(floor))) {
        cot_pieces_resolve(floor, (int64_t)now);
        if (floor->oldest != oldest || cot_floor_is_up(floor->page, (int64_t)now)) {
            oldest = floor->oldest;
            progress = now;
        }
        if (floor->oldest == floor->newest || cot_exiting())
            break;
        if (floor->stalled || now - progress > STALL_NS) { /* what it waits for may be launched later */
            floor->stalled = true;
            break;
        }
        gpu->page_slot->floor_ns = now;
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        now = cot_now_ns();
    }
    if (now != began)
        atomic_fetch_add(&gpu->waited_ns, now - began);
}

/* ---- holders that are not believed ---- */

static void lower(struct cotenant_floor *page, uint32_t holder)
{
    __atomic_store_n(&page->raised[holder], 0, __ATOMIC_RELEASE);
}

/* Lowers them.  Called now and then by the helper thread; returns how long it may wait, UINT64_MAX if nothing is held. */
uint64_t cot_ahead_watch(uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    for (uint32_t g = 0; g < cot_gpu_count(); g++) {
        struct gpu *gpu = cot_gpu_at(g);
        struct floor *floor = __atomic_load_n(&gpu->floor, __ATOMIC_ACQUIRE);
        struct cotenant_floor *page = floor ? __atomic_load_n(&floor->ahead.shared, __ATOMIC_ACQUIRE) : NULL;
        if (!page || !floor->ahead.context)
            continue;
        next = WATCH_NS;
        for (uint32_t i = 0; i < COTENANT_FLOOR_HOLDERS; i++) {
            uint8_t raised = __atomic_load_n(&page->raised[i], __ATOMIC_ACQUIRE); /* LS stores its time before it */
            int64_t age_ns = (int64_t)now_ns - (int64_t)__atomic_load_n(&page->raised_ns[i], __ATOMIC_RELAXED);
            int64_t limit_ns = (int64_t)page->hold_limit_ns;
            if (raised && (age_ns > limit_ns || age_ns < -limit_ns))
                lower(page, i);
        }
    }
    return next;
}

/* Another page is in force: the one before tells streams that wait for it nothing any more. */
void cot_ahead_move(struct floor *floor, struct cotenant_floor *shared)
{
    struct cotenant_floor *before = floor->ahead.shared;
    for (uint32_t i = 0; before && i < COTENANT_FLOOR_HOLDERS; i++)
        lower(before, i);
    floor->ahead.context = NULL;
    floor->ahead.refused = floor->ahead.on = false;
    __atomic_store_n(&floor->ahead.shared, shared, __ATOMIC_RELEASE);
}
