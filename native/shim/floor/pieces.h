/* The work in flight of a best-effort process on one GPU, as a ring of *launch batches* (groups of successive
 * launches; `piece` in the code).
 *
 * The shim learns the end of a batch in one of two ways: from the batch's predicted time, which is the sum of the
 * costs of its launches, or from an event recorded after it. An event between two kernels costs a card about 3 us,
 * so there is only one per EVENT_INTERVAL_NS of work. If the GPU was busy between two events, the time between them
 * corrects the estimated costs. After a wrong prediction, batches get events more often for a while. */
#ifndef COTENANT_FLOOR_PIECES_H
#define COTENANT_FLOOR_PIECES_H

#include "floor/floor_rule.h"
#include "shim.h"

#define PIECES 128 /* a power of two, so that indices stay consecutive when the 32-bit counters overflow */
#define PIECE_LOG 64
#define AHEAD_STREAMS 4

/* How the shim learns the end of a batch. PIECE_UNSEEN: no event could be recorded after the batch, so the batch
 * corrects no estimate. */
enum piece_end { PIECE_BY_CLOCK = 0, PIECE_BY_EVENT = 1, PIECE_UNSEEN = 2 };

struct piece {
    CUevent event;
    /* the CUDA context of the event; when it is destroyed, the event is destroyed, too */
    CUcontext context;
    enum piece_end end;
    /* as far as the shim knows, the GPU was busy between the previous batch and the present one */
    bool exact;
    bool held;                        /* the stream may have waited for the end of LS work during this batch */
    int64_t predicted_ns;
    int64_t began_ns;                 /* time of the first launch of the batch */
    uint32_t count;
    struct cost *log[PIECE_LOG];
};

/* Relates the processor's cycle counter to the clock. */
struct floor_ticks {
    /* two readings of the counter, some ms apart; first_ns and last_ns are the clock's times of these readings */
    uint64_t first, last;
    int64_t first_ns, last_ns;
    uint64_t ns_per_2_20;             /* ns per 2^20 cycles of the counter; 0: not known */
};

/* State of the launches that wait on the device instead of on the host (floor/ahead.c). */
struct floor_ahead {
    struct cotenant_floor_words *shown; /* the wait-flag page; NULL: the agent has none */
    /* the wait-flag page of the previous agent, on which streams may still wait */
    struct cotenant_floor_words *before;
    CUcontext context;                /* the context in which `words` is the device address of the wait-flag page */
    CUdeviceptr words;
    CUcontext pinned_in;              /* the context in which the wait-flag page is pinned as host memory */
    /* the streams into which work was launched recently */
    struct { CUstream handle; int64_t at_ns; } streams[AHEAD_STREAMS];
    /* The process used more streams than `streams` has entries; until this time its launches wait on the host. */
    int64_t crowded_until_ns;
    int64_t part_ns;                  /* how much work a stream may run between two waits */
    int64_t since_ns;                 /* predicted work launched into the current stream since its last wait */
    /* start of the period over which the waits on the host are added up, and their sum; if the start is 0, a new
     * period begins at the next launch */
    int64_t window_at_ns, waited_ns;
    int64_t until_ns;                 /* until this time launches may wait on the device instead of on the host */
    bool on;                          /* the launches of the open batch wait on the device */
    /* LS work was active when launches of the open batch were made, so these launches wait on the device for the end of
     * that work */
    bool behind;
    bool refused;                     /* this driver does not support waits on memory in streams */
};

struct floor {
    const struct cotenant_floor *page;
    struct floor_ahead ahead;
    pthread_mutex_t lock;
    int fd;
    struct work stated;               /* work class and SMs of the tenant's kernels, as the tenant has stated them */
    uint32_t in_flight_us;            /* in-flight budget of this tenant; 0: the budget on the gate page applies */
    struct floor_state state;
    CUcontext context;
    struct piece pieces[PIECES];
    /* closed batches have the indices [oldest, newest); the batch at newest is open */
    uint32_t oldest, newest;
    /* the event of batch `origin` has completed, so times of later batches can be measured from it */
    bool have_origin;
    uint32_t origin;
    /* latest time, by the host's clock, at which the event of `origin` can have completed */
    int64_t origin_ns;
    /* last time at which a query found that the event of the oldest batch was still pending */
    int64_t not_ready_ns;
    int64_t unchecked_ns;             /* predicted time of the batches since the last event */
    uint32_t unchecked;               /* number of batches since the last event */
    /* number of successive measured times that were too long, among those that may include waits for LS work
     * (is_slow) */
    uint32_t slow;
    double least_slow;                /* smallest ratio of measured to estimated time in that succession */
    uint32_t doubt;                   /* each of this many further batches gets an event */
    /* the open batch is the first launch of a kernel, and an event was recorded before it, so that the kernel's time is
     * measured */
    bool open_solo;
    int64_t late_ns;                  /* how much later than requested a waiting thread's sleep usually ends */
    int64_t yield_ns;                 /* longest recent duration of a yield of the processor; it decays over time */
    int64_t yield_fades_ns;
    int64_t yield_at_ns;              /* time before which no waiting thread yields the processor again */
    /* no batch has ended for a long time, so launches no longer wait for one; reset when a batch ends */
    bool stalled;
    struct stream *stream;            /* the stream into which the launches of the open batch go */
    CUstream handle;
    struct thread *thread;
    struct floor_ticks ticks;
};

static inline struct piece *cot_piece(struct floor *floor, uint32_t index)
{
    return &floor->pieces[index % PIECES];
}

HIDDEN void cot_pieces_switch(struct floor *floor, CUcontext context);
HIDDEN void cot_pieces_forget(struct floor *floor, CUcontext gone);
HIDDEN void cot_pieces_resolve(struct floor *floor, int64_t now_ns);
HIDDEN void cot_piece_close(struct floor *floor, int64_t event_interval_ns);
HIDDEN bool cot_pieces_full(const struct floor *floor);

HIDDEN bool cot_floor_is_up(const struct cotenant_floor *page, int64_t now_ns);

/* ---- floor/ahead.c ---- */
/* how much work lies between two events while the program runs ahead; by these events the host knows how far ahead
 * it is */
#define AHEAD_PIECE_NS 500000

/* Returns whether no more launches can be added to the open batch. */
static inline bool cot_ahead_is_full(const struct piece *open)
{
    return open->predicted_ns >= AHEAD_PIECE_NS || open->count >= PIECE_LOG;
}

/* Returns whether the launch can be added to the open batch without a new wait in the stream. The in-flight budget is
 * read only when a wait is inserted, so a change of the budget takes effect at the stream's next wait. */
static inline bool cot_ahead_goes_on(const struct floor *floor, const struct piece *open, int64_t ns)
{
    return ns != COST_UNKNOWN_NS && !cot_ahead_is_full(open) && floor->ahead.since_ns + ns <= floor->ahead.part_ns &&
           floor->state.outstanding_ns + ns <= COTENANT_RUN_AHEAD_NS;
}

static inline void cot_ahead_count(struct floor *floor, int64_t ns, int64_t now_ns)
{
    struct floor_state *state = &floor->state;
    state->busy_until_ns = floor_most(state->busy_until_ns, now_ns) + ns;
    state->outstanding_ns += ns;
    /* for a program that launches ahead, idle time of the GPU is no reason to raise the budget, so it is not
     * measured */
    state->open_at_ns = 0;
    floor->ahead.since_ns += ns;
}

HIDDEN bool cot_ahead_may(const struct floor *floor, const struct gpu *gpu, const struct floor_rule *rule);
HIDDEN bool cot_ahead_hold(struct floor *floor, struct thread *t, const struct floor_rule *rule);
HIDDEN void cot_ahead_consider(struct floor *floor, int64_t waited_ns, bool up, int64_t now_ns);
HIDDEN void cot_ahead_wait(struct floor *floor, struct gpu *gpu, int64_t ns);
HIDDEN void cot_ahead_move(struct floor *floor, struct cotenant_floor_words *shown);

#endif
