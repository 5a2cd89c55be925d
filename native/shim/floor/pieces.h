/* What a best-effort process has in flight on one GPU, in pieces.
 *
 * Launches between two ends are a piece.  A piece ends by the clock, when it should have ended by what its launches cost
 * before, or by an event, which a card takes about 3 us for between two kernels: so only every EVENT_INTERVAL_NS of work has one.
 * What ran between two events, back to back, teaches what launches cost; what was wrong is checked more often for a while. */
#ifndef COTENANT_FLOOR_PIECES_H
#define COTENANT_FLOOR_PIECES_H

#include "floor/floor_rule.h"
#include "shim.h"

#define PIECES 128 /* power of two */
#define PIECE_LOG 64
#define AHEAD_STREAMS 4

enum piece_end { PIECE_BY_CLOCK = 0, PIECE_BY_EVENT = 1, PIECE_UNSEEN = 2 /* it could have no event: nothing is learned across it */ };

struct piece {
    CUevent event;
    CUcontext context;                /* of the event, which dies with it */
    enum piece_end end;
    bool exact;                       /* no idle time between the piece before and this one, as far as is known */
    bool held;                        /* its stream may have waited for the floor */
    int64_t predicted_ns;
    int64_t began_ns;                 /* its first launch */
    uint32_t count;
    struct cost *log[PIECE_LOG];
};

/* The processor's counter against the clock. */
struct floor_ticks {
    uint64_t first, last;             /* looks at both: some ms apart, and the last one */
    int64_t first_ns, last_ns;
    uint64_t ns_per_2_20;             /* so many ns take 2^20 ticks; 0: not known */
};

/* Launches that are held on the device (floor/ahead.c). */
struct floor_ahead {
    struct cotenant_floor_words *shown; /* the second page; NULL: not to be had */
    struct cotenant_floor_words *before; /* that of the agent before, which streams may wait for still */
    CUcontext context;                /* in which `words` is where the device sees who holds the floor */
    CUdeviceptr words;
    CUcontext pinned_in;              /* the page, for as long as that context lives */
    struct { CUstream handle; int64_t at_ns; } streams[AHEAD_STREAMS]; /* streams with recent launches */
    int64_t crowded_until_ns;         /* there are more streams than that */
    int64_t part_ns;                  /* work between two waits of a stream */
    int64_t since_ns;                 /* predicted, since the last one of the stream at hand */
    int64_t window_at_ns, waited_ns;  /* of the host's way: since when, and how long launches waited; 0: from the next launch on */
    int64_t until_ns;                 /* it may run ahead */
    bool on;                          /* what is launched now is held there */
    bool behind;                      /* LS work is active, and what is launched now waits for its end */
    bool refused;                     /* by this driver */
};

struct floor {
    const struct cotenant_floor *page;
    struct floor_ahead ahead;
    pthread_mutex_t lock;
    int fd;
    struct work stated;               /* of its kernels, by the tenant */
    uint32_t in_flight_us;            /* of this tenant; 0: the page's */
    struct floor_state state;
    CUcontext context;
    struct piece pieces[PIECES];
    uint32_t oldest, newest;          /* [oldest, newest) are closed, newest is open */
    bool have_origin;                 /* piece `origin` ended with an event that was seen: a time to measure from */
    uint32_t origin;
    int64_t origin_ns;                /* when its event came, by the host's clock, as far as is known: not later */
    int64_t not_ready_ns;             /* an event was asked for and had not come */
    int64_t unchecked_ns;             /* closed by the clock since the last event */
    uint32_t unchecked;               /* in so many pieces */
    uint32_t slow;                    /* chains in a row that were slower than is known, or held; */
    double least_slow;                /* the least of them, over what is known */
    uint32_t doubt;                   /* so many of the next pieces end with an event, whatever event_interval_ns is */
    bool open_solo;                   /* the open piece is one new kernel, and the event before it was recorded for it */
    int64_t late_ns;                  /* how late sleeps end */
    int64_t yield_ns;                 /* how long giving up the processor takes here: the longest, fading */
    int64_t yield_fades_ns;
    int64_t yield_at_ns;              /* not before */
    bool stalled;                     /* nothing ended for long: do not wait for that again */
    struct stream *stream;            /* of the open piece */
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
#define AHEAD_PIECE_NS 500000 /* between two events, by which the host knows how far ahead it is */

/* Whether the open piece takes no more launches. */
static inline bool cot_ahead_is_full(const struct piece *open)
{
    return open->predicted_ns >= AHEAD_PIECE_NS || open->count >= PIECE_LOG;
}

/* Whether a launch of the open piece needs nothing but to be counted.  Settings that change meanwhile count from the next part on. */
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
    state->open_at_ns = 0; /* how dry the GPU is says nothing of a program that runs ahead */
    floor->ahead.since_ns += ns;
}

HIDDEN bool cot_ahead_may(const struct floor *floor, const struct gpu *gpu, const struct floor_rule *rule);
HIDDEN bool cot_ahead_hold(struct floor *floor, struct thread *t, const struct floor_rule *rule);
HIDDEN void cot_ahead_consider(struct floor *floor, int64_t waited_ns, bool up, int64_t now_ns);
HIDDEN void cot_ahead_wait(struct floor *floor, struct gpu *gpu, int64_t ns);
HIDDEN void cot_ahead_move(struct floor *floor, struct cotenant_floor_words *shown);

#endif
