/* Finds out when launch batches of best-effort work end, and corrects the estimated costs of launches by measured
 * times (floor/pieces.h). The *origin* is the latest batch whose event has completed; times are measured from it.
 * The caller of each function holds floor->lock. */
#define _GNU_SOURCE
#include "floor/pieces.h"

#define CHAIN 8              /* at most this many batches of launches lie between two events */
/* If a measured time differs from its estimate by more than the fraction WRONG of the estimate, every batch gets an
 * event until DOUBT measured times in a row have differed by less. */
#define DOUBT 4
#define WRONG 0.1
/* If a measured time differs from its estimate by less than the fraction NOISE of the estimate, the estimate is
 * corrected by only NOISE_GAIN of the difference. */
#define NOISE 0.05
#define NOISE_GAIN 0.25
/* If this many successive measured times are too long, waits for LS work are not the cause, since LS work does not
 * overlap all of them. */
#define SURELY_SLOW 16
#define DRIFT 1e-4           /* largest drift of the GPU's clock against the host's clock */


/* Number of the measurement that last scaled a cost, so that one measurement does not scale a cost twice. Protected
 * by cot_capture_lock. */
static uint32_t scaled_in[(1 << COST_BITS) + COST_BESIDE];
static uint32_t chain_number;

/* Called when the program launches in another context than before. The work in flight of the previous context is
 * assumed to end first. */
void cot_pieces_switch(struct floor *floor, CUcontext context)
{
    if (cot_piece(floor, floor->newest)->count > 0)
        cot_piece_close(floor, 0);
    floor->doubt = DOUBT;
    floor->context = context;
}

/* Called when a context was destroyed together with its events. The work in flight of the other contexts is
 * forgotten, too; that loses little, since contexts are rarely destroyed. */
void cot_pieces_forget(struct floor *floor, CUcontext gone)
{
    pthread_mutex_lock(&cot_capture_lock);
    for (uint32_t i = 0; i < PIECES; i++) {
        if (floor->pieces[i].event && floor->pieces[i].context != gone)
            REAL(cuEventDestroy_v2)(floor->pieces[i].event);
        floor->pieces[i] = (struct piece){0};
    }
    pthread_mutex_unlock(&cot_capture_lock);
    floor->oldest = floor->newest = floor->unchecked = 0;
    floor->unchecked_ns = 0;
    floor->doubt = DOUBT;
    floor->have_origin = floor->open_solo = floor->stalled = floor->ahead.on = false;
    floor->slow = 0;
    floor->ahead.context = NULL;
    if (floor->ahead.pinned_in == gone)
        floor->ahead.pinned_in = NULL;
    floor->context = NULL;
    floor->state = (struct floor_state){0};
}

bool cot_pieces_full(const struct floor *floor)
{
    /* ended batches between the origin and the oldest unfinished one still occupy entries of the ring */
    return floor->newest - floor->oldest >= PIECES - 2 - CHAIN;
}

/* Returns whether the work itself was slower than estimated. A measured time may include waits of the stream for LS
 * work, so a single one that is too long proves nothing; if many in a row are too long, the work is slower. */
static bool is_slow(struct floor *floor, double *ratio)
{
    floor->least_slow = floor->slow == 0 || *ratio < floor->least_slow ? *ratio : floor->least_slow;
    if (++floor->slow < SURELY_SLOW)
        return false;
    *ratio = floor->least_slow;
    floor->slow = 0;
    return true;
}

/* Corrects the estimated costs by elapsed_ns, the time between the events of the batches `origin` and `last`. */
static void learn(struct floor *floor, uint32_t last, double elapsed_ns)
{
    int64_t thought_ns = 0;
    bool exact = true, held = false;
    for (uint32_t at = floor->origin + 1; at != last + 1; at++) {
        struct piece *piece = cot_piece(floor, at);
        exact = exact && piece->exact;
        held = held || piece->held;
        for (uint32_t i = 0; i < piece->count; i++)
            /* the current estimates are added up instead of predicted_ns, since an earlier measurement may have
             * corrected some of them */
            thought_ns += piece->log[i]->ns;
    }
    double ratio = thought_ns > 0 ? elapsed_ns / (double)thought_ns : 1;
    /* the measured time may include idle time of the GPU, so it is only an upper bound of the work's time */
    bool idle = !exact && ratio >= 1;
    if (exact && held && ratio > 1 + WRONG)
        idle = !is_slow(floor, &ratio);
    else if (exact && held)
        floor->slow = 0;
    if (!idle && (ratio < 1 - WRONG || ratio > 1 + WRONG))
        floor->doubt = DOUBT;
    else if (floor->doubt > 0)
        floor->doubt--;
    if (idle)
        return;
    if (ratio > 1 - NOISE && ratio < 1 + NOISE)
        ratio = 1 + (ratio - 1) * NOISE_GAIN;
    uint32_t number = ++chain_number;
    for (uint32_t at = floor->origin + 1; at != last + 1; at++) {
        struct piece *piece = cot_piece(floor, at);
        for (uint32_t i = 0; i < piece->count; i++) {
            struct cost *cost = piece->log[i];
            if (scaled_in[cost - cot_costs] == number)
                continue;
            scaled_in[cost - cot_costs] = number;
            int64_t ns = (int64_t)((double)cost->ns * ratio);
            cost->ns = ns > COST_FLOOR_NS ? ns : COST_FLOOR_NS;
        }
    }
}

/* Predicts the end of all remaining work, if the work before it ended at ended_ns. A batch begins at the end of the
 * previous one or at its own first launch, whichever is later. */
static int64_t rest_ends_ns(struct floor *floor, int64_t ended_ns)
{
    for (uint32_t at = floor->oldest; at != floor->newest + 1; at++) {
        const struct piece *piece = cot_piece(floor, at);
        if (piece->predicted_ns > 0)
            ended_ns = floor_most(ended_ns, piece->began_ns) + piece->predicted_ns;
    }
    return ended_ns;
}

/* Counts a batch as ended. The host notices a completed event some time after it occurred; the event's time stamp
 * tells how much later. */
static void ended(struct floor *floor, struct piece *piece, int64_t now_ns)
{
    int64_t thought_ns = floor->state.busy_until_ns - (floor->state.outstanding_ns - piece->predicted_ns);
    int64_t busy_ns = floor->state.busy_until_ns;
    int64_t ended_ns = piece->end == PIECE_BY_CLOCK ? thought_ns : floor_least(now_ns, floor->origin_ns);
    floor_ended(&floor->state, piece->predicted_ns, ended_ns);
    floor->oldest++;
    floor->stalled = false;
    if (floor->state.outstanding_ns > 0 && piece->end != PIECE_BY_CLOCK)
        floor->state.busy_until_ns = floor_most(rest_ends_ns(floor, ended_ns), busy_ns - floor_most(0, thought_ns - ended_ns));
}

/* Returns whether the oldest batch has ended. */
static bool has_ended(struct floor *floor, struct piece *piece, bool may_query, int64_t now_ns)
{
    if (piece->end != PIECE_BY_EVENT || !may_query) {
        bool over = floor->state.busy_until_ns - (floor->state.outstanding_ns - piece->predicted_ns) <= now_ns;
        if (over && piece->end != PIECE_BY_CLOCK) {
            floor->have_origin = false;
            floor->origin_ns = now_ns;
        }
        return over;
    }
    CUresult state = REAL(cuEventQuery)(piece->event);
    if (state == CUDA_ERROR_NOT_READY) {
        floor->not_ready_ns = now_ns;
        return false;
    }
    float elapsed_ms = 0;
    int64_t came_ns = now_ns;
    if (state == CUDA_SUCCESS && floor->have_origin && piece->count > 0 &&
        REAL(cuEventElapsedTime)(
            &elapsed_ms, cot_piece(floor, floor->origin)->event, piece->event) == CUDA_SUCCESS && elapsed_ms > 0) {
        learn(floor, floor->oldest, (double)elapsed_ms * 1e6);
        came_ns = floor_least(now_ns, floor->origin_ns + (int64_t)((double)elapsed_ms * 1e6 * (1 + DRIFT)));
    }
    floor->origin_ns = floor_most(came_ns, floor->not_ready_ns);
    floor->have_origin = state == CUDA_SUCCESS;
    floor->origin = floor->oldest;
    return true;
}

/* Removes ended batches from the ring of batches. */
void cot_pieces_resolve(struct floor *floor, int64_t now_ns)
{
    if (floor->oldest == floor->newest)
        return;
    pthread_mutex_lock(&cot_capture_lock);
    bool may_query = atomic_load(&cot_captures) == 0;
    while (floor->oldest != floor->newest) {
        struct piece *piece = cot_piece(floor, floor->oldest);
        if (!has_ended(floor, piece, may_query, now_ns))
            break;
        ended(floor, piece, now_ns);
    }
    pthread_mutex_unlock(&cot_capture_lock);
}

/* Records the event of a batch. The caller holds cot_capture_lock, and floor->context is the current context. An
 * event belongs to one context, whereas all contexts use the same entries of the ring, so an event of another
 * context is replaced. */
static bool record_here(struct floor *floor, struct piece *piece)
{
    if (piece->event && piece->context != floor->context) {
        REAL(cuEventDestroy_v2)(piece->event);
        piece->event = NULL;
    }
    piece->context = floor->context;
    return (piece->event ||
            REAL(cuEventCreate)(&piece->event, 0) == CUDA_SUCCESS) &&
           REAL(cuEventRecord)(piece->event, floor->handle) == CUDA_SUCCESS;
}

static bool record(struct floor *floor, struct piece *piece)
{
    pthread_mutex_lock(&cot_capture_lock);
    bool done = atomic_load(&cot_captures) == 0 && floor->stream->handle == floor->handle &&
                (floor->handle != (CUstream)(uintptr_t)CU_STREAM_PER_THREAD_VALUE || floor->thread == cot_thread);
    if (done && floor->context == cot_thread->context)
        done = record_here(floor, piece);
    else if (done && (done = REAL(cuCtxPushCurrent_v2)(floor->context) == CUDA_SUCCESS)) {
        CUcontext popped;
        done = record_here(floor, piece);
        REAL(cuCtxPopCurrent_v2)(&popped);
    }
    pthread_mutex_unlock(&cot_capture_lock);
    return done;
}

/* Closes the open batch. If the batch is empty, this only records an event, from which times are measured.
 * event_interval_ns: how much work lies between two events; 0: every batch gets an event. */
void cot_piece_close(struct floor *floor, int64_t event_interval_ns)
{
    struct piece *piece = cot_piece(floor, floor->newest);
    if (cot_pieces_full(floor))
        return;
    floor->unchecked_ns += piece->predicted_ns;
    floor->unchecked++;
    if (floor->doubt == 0 && floor->unchecked < CHAIN && floor->unchecked_ns < event_interval_ns && piece->count > 0 &&
        !floor->open_solo && floor->have_origin)
        piece->end = PIECE_BY_CLOCK;
    else {
        piece->end = record(floor, piece) ? PIECE_BY_EVENT : PIECE_UNSEEN;
        floor->unchecked_ns = 0;
        floor->unchecked = 0;
    }
    piece->exact = floor->newest != floor->oldest || (floor->open_solo && piece->count == 1);
    floor->open_solo = false;
    floor->newest++;
    floor->state.unfinished++;
    cot_piece(floor, floor->newest)->count = 0;
    cot_piece(floor, floor->newest)->predicted_ns = 0;
    cot_piece(floor, floor->newest)->held = false;
}
