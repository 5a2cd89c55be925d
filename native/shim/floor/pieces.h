/* A best-effort process's work in flight on one GPU, as launch batches.
 *
 * A launch batch ends either by predicted time, computed from the costs of its launches, or by an event, which takes a
 * card about 3 us between two kernels: so there is only one per EVENT_INTERVAL_NS of work. The time between two events
 * without idle time in between corrects the estimated costs; after a wrong prediction there are more events for a while. */
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
    CUcontext context;                /* context of the event, which is destroyed with it */
    enum piece_end end;
    bool exact;                       /* no idle time between the previous batch and this one, as far as is known */
    bool held;                        /* its stream may have waited for LS work */
    int64_t predicted_ns;
    int64_t began_ns;                 /* time of its first launch */
    uint32_t count;
    struct cost *log[PIECE_LOG];
};

/* The processor's cycle counter relative to the clock. */
struct floor_ticks {
    uint64_t first, last;             /* readings of counter and clock, some ms apart; `last` is the latest */
    int64_t first_ns, last_ns;
    uint64_t ns_per_2_20;             /* ns per 2^20 cycles; 0: unknown */
};

/* Device-gated run-ahead (floor/ahead.c). */
struct floor_ahead {
    struct cotenant_floor_words *shown; /* the page of wait flags; NULL: unavailable */
    struct cotenant_floor_words *before; /* page of the previous agent, on which streams may still wait */
    CUcontext context;                /* the context in which `words` is the device address of the wait flags */
    CUdeviceptr words;
    CUcontext pinned_in;              /* the context in which the page is pinned */
    struct { CUstream handle; int64_t at_ns; } streams[AHEAD_STREAMS]; /* streams with recent launches */
    /* until this time launches are gated on the host, because more streams were in use than `streams` has entries */
    int64_t crowded_until_ns;
    int64_t part_ns;                  /* work between two waits of a stream */
    int64_t since_ns;                 /* predicted work since the last wait of the current stream */
    /* window of host-gated launches: its start, and their total wait; 0: starts at the next launch */
    int64_t window_at_ns, waited_ns;
    int64_t until_ns;                 /* until this time launches may be gated on the device */
    bool on;                          /* current launches are gated on the device */
    bool behind;                      /* LS work is active, and current launches wait for its end */
    bool refused;                     /* this driver does not support waits on memory in streams */
};

struct floor {
    const struct cotenant_floor *page;
    struct floor_ahead ahead;
    pthread_mutex_t lock;
    int fd;
    struct work stated;               /* kernel class stated by the tenant */
    uint32_t in_flight_us;            /* in-flight budget of this tenant; 0: that of the page applies */
    struct floor_state state;
    CUcontext context;
    struct piece pieces[PIECES];
    uint32_t oldest, newest;          /* [oldest, newest) are closed, newest is open */
    bool have_origin;                 /* batch `origin` ended with an event that was seen: a reference time */
    uint32_t origin;
    int64_t origin_ns;                /* latest possible time of its event by the host's clock */
    int64_t not_ready_ns;             /* last time at which a query found the batch's event still pending */
    int64_t unchecked_ns;             /* work closed by prediction since the last event */
    uint32_t unchecked;               /* number of batches closed by prediction */
    uint32_t slow;                    /* number of successive timing windows that were slower than estimated, or had waits */
    double least_slow;                /* the smallest ratio of measured to estimated time of these windows */
    uint32_t doubt;                   /* number of next batches that end with an event regardless of event_interval_ns */
    bool open_solo;                   /* the open batch is one new kernel, preceded by an event recorded for it */
    int64_t late_ns;                  /* time by which sleeps usually end late */
    int64_t yield_ns;                 /* longest recent duration of a yield on this machine, decaying */
    int64_t yield_fades_ns;
    int64_t yield_at_ns;              /* earliest time of the next yield */
    bool stalled;                     /* no batch ended for long: do not wait for one again */
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
#define AHEAD_PIECE_NS 500000 /* work between two events, by which the host tracks how far ahead it is */

/* Whether the open batch accepts no more launches. */
static inline bool cot_ahead_is_full(const struct piece *open)
{
    return open->predicted_ns >= AHEAD_PIECE_NS || open->count >= PIECE_LOG;
}

/* Whether a launch of the open batch only needs to be counted.  Changed settings take effect with the next part. */
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
    state->open_at_ns = 0; /* idle time of the GPU is meaningless for a program that runs ahead */
    floor->ahead.since_ns += ns;
}

HIDDEN bool cot_ahead_may(const struct floor *floor, const struct gpu *gpu, const struct floor_rule *rule);
HIDDEN bool cot_ahead_hold(struct floor *floor, struct thread *t, const struct floor_rule *rule);
HIDDEN void cot_ahead_consider(struct floor *floor, int64_t waited_ns, bool up, int64_t now_ns);
HIDDEN void cot_ahead_wait(struct floor *floor, struct gpu *gpu, int64_t ns);
HIDDEN void cot_ahead_move(struct floor *floor, struct cotenant_floor_words *shown);

#endif
