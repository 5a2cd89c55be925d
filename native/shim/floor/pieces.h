/* The work in flight of a best-effort process on one GPU, as a ring of *launch batches*.
 *
 * The shim knows the end of a batch either by its predicted time, the sum of the costs of its launches, or by an event
 * after it. An event takes a card about 3 us between two kernels, so there is only one per EVENT_INTERVAL_NS of work.
 * The time between two events corrects the estimated costs, if the GPU was busy in between. After a wrong prediction
 * there are more events for a while. */
#ifndef COTENANT_FLOOR_PIECES_H
#define COTENANT_FLOOR_PIECES_H

#include "floor/floor_rule.h"
#include "shim.h"

#define PIECES 128 /* power of two */
#define PIECE_LOG 64
#define AHEAD_STREAMS 4

enum piece_end { PIECE_BY_CLOCK = 0, PIECE_BY_EVENT = 1, PIECE_UNSEEN = 2 /* no event was possible: no estimate is corrected */ };

struct piece {
    CUevent event;
    CUcontext context;                /* the context of the event; destroying it destroys the event */
    enum piece_end end;
    /* as far as is known, the GPU was not idle between the previous batch and this one */
    bool exact;
    bool held;                        /* the stream may have waited for LS work in this batch */
    int64_t predicted_ns;
    int64_t began_ns;                 /* time of the first launch of the batch */
    uint32_t count;
    struct cost *log[PIECE_LOG];
};

/* The processor's cycle counter, in relation to the clock. */
struct floor_ticks {
    /* two readings of the counter, some ms apart; first_ns and last_ns are the readings of the clock */
    uint64_t first, last;
    int64_t first_ns, last_ns;
    uint64_t ns_per_2_20;             /* ns per 2^20 cycles of the counter; 0: not known */
};

/* State of launches that wait on the device (floor/ahead.c). */
struct floor_ahead {
    struct cotenant_floor_words *shown; /* the page of device wait flags; NULL: there is none */
    /* the page of device wait flags of the previous agent, on which streams may still wait */
    struct cotenant_floor_words *before;
    CUcontext context;                /* the context in which `words` is the device address of the wait flags */
    CUdeviceptr words;
    CUcontext pinned_in;              /* the context in which the page is pinned */
    struct { CUstream handle; int64_t at_ns; } streams[AHEAD_STREAMS]; /* the streams with recent launches */
    /* until this time launches wait on the host, because more streams were in use than `streams` has entries */
    int64_t crowded_until_ns;
    int64_t part_ns;                  /* how much work a stream runs between two waits */
    int64_t since_ns;                 /* predicted work since the last wait of the current stream */
    /* start of the time over which waits on the host are added up, and their sum; start 0: it begins at the next
     * launch */
    int64_t window_at_ns, waited_ns;
    int64_t until_ns;                 /* until this time launches may wait on the device instead of on the host */
    bool on;                          /* the launches of the open batch wait on the device */
    bool behind;                      /* LS work is active, and the launches of the open batch wait for its end */
    bool refused;                     /* this driver does not support waits on memory in streams */
};

struct floor {
    const struct cotenant_floor *page;
    struct floor_ahead ahead;
    pthread_mutex_t lock;
    int fd;
    struct work stated;               /* the tenant's statement of the class and SMs of its kernels */
    uint32_t in_flight_us;            /* in-flight budget of this tenant; 0: the budget on the page applies */
    struct floor_state state;
    CUcontext context;
    struct piece pieces[PIECES];
    uint32_t oldest, newest;          /* batches at [oldest, newest) are closed, the one at newest is open */
    bool have_origin;                 /* the event of batch `origin` was seen, so times can be measured from it */
    uint32_t origin;
    int64_t origin_ns;                /* latest possible time of the event of `origin`, by the host's clock */
    int64_t not_ready_ns;             /* last time at which a query found the oldest batch's event pending */
    int64_t unchecked_ns;             /* predicted time of the batches since the last event */
    uint32_t unchecked;               /* number of batches since the last event */
    /* number of measured times in a row that were longer than estimated, or included waits for LS work */
    uint32_t slow;
    double least_slow;                /* the smallest ratio of measured to estimated time among those */
    uint32_t doubt;                   /* for this many more batches, each gets an event */
    /* the open batch is the first launch of a kernel, and an event was recorded before it */
    bool open_solo;
    int64_t late_ns;                  /* how much later than requested sleeps usually end */
    int64_t yield_ns;                 /* longest recent duration of a yield on this machine; it decays */
    int64_t yield_fades_ns;
    int64_t yield_at_ns;              /* earliest time of the next yield */
    bool stalled;                     /* no batch has ended for long, so launches do not wait for one until one ends */
    struct stream *stream;            /* stream of the open batch */
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
#define AHEAD_PIECE_NS 500000 /* how much work lies between two events, by which the host tracks how far ahead it is */

/* Whether the open batch takes no more launches. */
static inline bool cot_ahead_is_full(const struct piece *open)
{
    return open->predicted_ns >= AHEAD_PIECE_NS || open->count >= PIECE_LOG;
}

/* Whether a launch into the open batch only needs to be counted. Changed settings take effect after the next wait of
 * the stream. */
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
    state->open_at_ns = 0; /* the GPU's idle time says nothing about a program that launches ahead */
    floor->ahead.since_ns += ns;
}

HIDDEN bool cot_ahead_may(const struct floor *floor, const struct gpu *gpu, const struct floor_rule *rule);
HIDDEN bool cot_ahead_hold(struct floor *floor, struct thread *t, const struct floor_rule *rule);
HIDDEN void cot_ahead_consider(struct floor *floor, int64_t waited_ns, bool up, int64_t now_ns);
HIDDEN void cot_ahead_wait(struct floor *floor, struct gpu *gpu, int64_t ns);
HIDDEN void cot_ahead_move(struct floor *floor, struct cotenant_floor_words *shown);

#endif
