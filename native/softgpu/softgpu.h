/* A stand-in for libcuda on machines without a GPU. Its kernels compute nothing: they only take time.
 *
 * No thread simulates the device. A launch reserves the next free time span of the device, and has completed when
 * that span is past. Processes that use the same state file share the device's schedule and memory, and compete for
 * both. The shared state is changed by atomic operations only, so a killed process leaves no lock behind. The next
 * process that accesses the state frees what a dead process held.
 *
 * A module is text: a first line, and then one line for each kernel. A kernel's line has its name, its duration in
 * nanoseconds (`param`: the first parameter of the launch, a uint64), the number of SMs that it fills (default: all),
 * and its work class, `memory` or `compute` (default: unknown). For example, with kernels that are named a, b and c:
 *
 *      cotenant-soft-module
 *      a 1600000             takes 1.6 ms
 *      b param               takes as long as its first parameter says
 *      c param 66 memory     as b, but fills 66 SMs and is memory-bound
 *
 * Environment variables: COTENANT_SOFTGPU_STATE (path of the state file), COTENANT_SOFTGPU_COUNT (number of devices,
 * default 1), COTENANT_SOFTGPU_MEMORY (bytes per device), COTENANT_SOFTGPU_LINK_MBPS (a slower link, which a small
 * machine can keep busy). The first process that uses a state file sets the last three for all.
 * COTENANT_SOFTGPU_CALL_NS: time in ns that queries of streams and beginnings of captures take, as if the driver were
 * busy; COTENANT_SOFTGPU_REFUSES: path of a file with the names of the controls that the driver refuses now (enable,
 * disable, slice). Each process has its own value of these two. */
#ifndef COTENANT_SOFTGPU_H
#define COTENANT_SOFTGPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shim/cuda_abi.h"
#include "abi/contention.h"

#define EXPORT __attribute__((visibility("default")))
#define SOFT_MAX_DEVICES 16
#define SOFT_MAX_PROCESSES 1024
#define SOFT_DRIVER_VERSION 13000

/* ---- state.c: what the processes share ---- */
struct soft_process {
    /* identifies the process: pid << 32 | low half of its start time; 0: the entry is free */
    _Atomic uint64_t owner;
    _Atomic uint64_t tail_ns[SOFT_MAX_DEVICES]; /* end of the last time span that the process reserved on each device */
    /* describes the process's last kernel: duration in ns << 16 | permille of SMs << 2 | work class; for share.c */
    _Atomic uint64_t shape[SOFT_MAX_DEVICES];
    _Atomic uint64_t bytes[SOFT_MAX_DEVICES];
    /* end of the process's last copy, for each device and direction of the link */
    _Atomic uint64_t engine_tail_ns[SOFT_MAX_DEVICES][2];
    _Atomic uint32_t checkpoint;   /* state of this process's checkpoint, see checkpoint.c */
    _Atomic uint32_t managed;      /* the process has allocated managed memory at some time */
    /* memory that the process had on each device when its checkpoint was made; 0 without a checkpoint */
    _Atomic uint64_t saved_bytes[SOFT_MAX_DEVICES];
    /* place[d] says where the memory is that the process allocated on device d. 0: on d; otherwise on the device with
     * the number place[d] - 1, to which a restore from a checkpoint has moved it */
    _Atomic uint32_t place[SOFT_MAX_DEVICES];
};

/* slices.c: contexts as channel groups, and the schedule of their time slices */
#define SOFT_MAX_GROUPS 64
#define SOFT_GROUP_SWITCH_NS 220000 /* duration of a context switch, measured on an H100 */
#define SOFT_LONGEST_SLICE_NS UINT64_C(50000000)
#define SOFT_CHANNELS 2
#define SOFT_ALL_CHANNELS ((1u << SOFT_CHANNELS) - 1)
struct soft_group {
    uint64_t until_ns;             /* end of the group's queued work, by the group's clock */
    uint64_t delay_ns;             /* how far the group's clock is behind the host's clock */
    /* sums since the group was created; yields: number of runs that ended because the group had no more work */
    uint64_t busy_ns, runs, yields;
    /* slice_us: the time slice as it was set. slice_ns: the time slice in use, at most SOFT_LONGEST_SLICE_NS */
    uint64_t slice_ns, slice_us;
    /* off: one bit for each disabled channel; the group does not run while all its channels are disabled */
    uint32_t present, off;
    /* how many more times each channel was disabled than enabled; the driver counts this, too */
    uint32_t disabled[SOFT_CHANNELS];
};

struct soft_schedule {
    uint64_t at_ns, slice_end_ns, switched_ns, reaped_ns;
    uint32_t current, unused;      /* current: number + 1 of the group that ran last, 0: none has run */
    struct soft_group groups[SOFT_MAX_GROUPS];
};

struct soft_device {
    _Atomic uint64_t schedule_lock; /* soft_process.owner of the process that changes the schedule; 0: none does */
    _Atomic uint32_t schedule_live, sliced;
    /* the process whose contexts use the group, as in soft_process.owner; 0: the group is free */
    _Atomic uint64_t group_owner[SOFT_MAX_GROUPS];
    struct soft_schedule schedules[2];
    _Atomic uint64_t busy_until_ns;
    _Atomic uint64_t last_process; /* index + 1 of the process that made the last reservation */
    _Atomic uint64_t busy_ns;      /* total time for which processes reserved the GPU */
    /* end of the last reserved span of each copy engine: to the device, to the host */
    _Atomic uint64_t engine_until_ns[2];
};

struct soft_state {
    _Atomic uint64_t magic;
    uint32_t device_count;
    uint64_t memory_bytes;
    uint64_t link_bytes_per_us[2];
    struct soft_device devices[SOFT_MAX_DEVICES];
    struct soft_process processes[SOFT_MAX_PROCESSES];
};

uint64_t soft_now_ns(void);
int soft_map(void);    /* maps the state file; returns 0 or a CUresult */
int soft_attach(void); /* calls soft_map, and claims an entry in the table of processes */
void soft_uuid(int device, uint8_t uuid[16]);
struct soft_state *soft_state(void);
enum { SOFT_TO_DEVICE, SOFT_TO_HOST }; /* directions of a copy over the link */
/* reserves the next free time span of a copy engine; returns the end of that span */
uint64_t soft_reserve_link(int device, int direction, uint64_t not_before_ns, uint64_t bytes);
void soft_note_engine(int device, int direction, uint64_t end_ns);
/* A unit of work: a kernel, or the kernels of a graph. */
struct soft_unit {
    uint64_t length_ns;
    uint32_t kernels; /* number of kernels in the unit; 0 means one */
    uint32_t sms;     /* number of SMs that each kernel could use; 0: all */
    uint32_t work;    /* work class: 1 unknown, 2 memory-bound, 3 compute-bound */
    /* the work may begin in the past: it waited in the list of a held stream (deferred.c), and the thread that empties
     * these lists reached it only after the time at which it should have begun */
    bool overdue;
};
/* reserves the next free time span of a device; returns the end of that span */
uint64_t soft_reserve(int device, uint64_t not_before_ns, struct soft_unit unit);
bool soft_runs_together(void);
uint64_t soft_share(int device, struct soft_process *self, uint64_t not_before_ns, struct soft_unit unit);
/* mps.c */
int soft_mps_join(void); /* connects to the MPS server if MPS is simulated; returns a CUresult */
void soft_mps_tell(int device);
/* returns CUDA_SUCCESS until the MPS server ends this client or dies; from then on, the error that every call must
 * return */
int soft_mps_lost(void);
unsigned soft_mps_sms(void);
uint64_t soft_mps_limit(void);
int soft_mps_client(void);
uint64_t soft_mps_left(int device); /* state.c */
bool soft_take_memory(int device, uint64_t bytes);
void soft_give_memory(int device, uint64_t bytes);
uint64_t soft_used_memory(int device);
void soft_reap(void);
void soft_pass(void);  /* blocks while this process is locked for a checkpoint */
void soft_note_managed(void);
struct soft_process *soft_process_of(int pid);
void soft_sleep_until(uint64_t when_ns);
void soft_take_time(void); /* queries of streams and beginnings of captures take as long as with a busy driver */
uint64_t soft_identity(void);
bool soft_is_dead(uint64_t owner);
int soft_open_state(void);
int soft_map_file(int fd); /* maps the state file that is open as fd, unless one is mapped; 0: success */
uint32_t soft_process_index(void);
/* returns the owner of the entry in the table of processes; 0: there is no live process */
uint64_t soft_process_at(uint32_t index);
struct soft_context;
int soft_group_new(int device); /* creates a channel group on a device; returns -1 if all groups are in use */
void soft_group_gone(int device, int group);
struct soft_group soft_group_change(int device, int group, void (*change)(struct soft_schedule *, int, uint64_t), uint64_t value);
uint64_t soft_clock(const struct soft_context *context); /* returns the present time by the context's clock */
uint64_t soft_delay(const struct soft_context *context);
uint64_t soft_expect(const struct soft_context *context, uint64_t clock_ns);
void soft_wait(const struct soft_context *context, uint64_t clock_ns);
uint64_t soft_schedule_work(const struct soft_context *context, uint64_t not_before_ns, struct soft_unit unit);
void soft_tell_context(const struct soft_context *context); /* channels.c */
void soft_tell_context_gone(const struct soft_context *context);

/* ---- objects: a program's handle is a pointer to one, and every function checks its `kind` ---- */
enum soft_kind { SOFT_CONTEXT = 0x51c0, SOFT_STREAM, SOFT_EVENT, SOFT_MODULE, SOFT_FUNCTION, SOFT_GRAPH, SOFT_EXEC,
                 SOFT_ARRAY, SOFT_POOL, SOFT_HANDLE, SOFT_NODE };

struct soft_context {
    enum soft_kind kind;
    int device;
    int group; /* index in the device's schedule; -1: the context has none */
    uint32_t references; /* number of references to a primary context */
    bool primary;
    struct soft_stream *streams; /* the context's streams, except the two default ones */
    struct soft_stream *legacy;
    uint64_t per_thread_tail_ns; /* latest end of work on a per-thread default stream */
    struct soft_context *next;
};

struct soft_stream {
    enum soft_kind kind;
    struct soft_context *context;
    bool blocking;
    int priority;
    _Atomic uint64_t tail_ns;
    uint64_t ends[SOFT_QUEUE_DEPTH]; /* ends of the last launches; a launch waits until fewer than SOFT_QUEUE_DEPTH are unfinished */
    uint32_t queued;
    int capture;          /* CU_CAPTURE_* */
    int capture_mode;
    bool capture_origin;
    uint64_t capture_thread;
    struct soft_graph *capture_graph;
    struct soft_stream *next;
    struct soft_op *first_op, *last_op; /* operations that are kept while the stream is held; see deferred.c */
    struct soft_stream *next_held;
};

struct soft_event {
    enum soft_kind kind;
    unsigned flags;
    bool recorded;
    uint32_t generation; /* number of times that the event was recorded */
    /* time of the event by the clock of `context`; SOFT_UNKNOWN_NS while the record of the event waits in the list of a
     * held stream (deferred.c) */
    _Atomic uint64_t when_ns;
    struct soft_context *context;
    struct soft_graph *captured_in;
    uint32_t uses; /* number of operations of held streams that name the event (deferred.c) */
};

#define SOFT_UNKNOWN_NS UINT64_MAX
enum soft_op_kind { SOFT_OP_WRITE, SOFT_OP_WAIT, SOFT_OP_RECORD, SOFT_OP_WAIT_EVENT, SOFT_OP_WORK };
struct soft_op {
    enum soft_op_kind kind;
    uint32_t value, generation;
    bool looked;          /* an earlier check of this wait found that its condition was false */
    /* condition of a wait for `value`: 0: the word is at least the value, 1: it is equal, 2: they have a bit in
     * common */
    unsigned compare;
    uint32_t *word;
    struct soft_event *event;
    struct soft_unit unit; /* the kernels, if the work is not a copy over the link */
    bool over_link;
    int direction;        /* direction of a copy over the link: SOFT_TO_DEVICE or SOFT_TO_HOST */
    void *to;             /* destination of a copy or memset, or NULL */
    const void *from;     /* source of a copy; NULL for a memset, which writes `element` */
    uint32_t element;
    size_t element_bytes;
    uint64_t bytes;
    const struct soft_op *parts; /* the copies and memsets of a graph's nodes */
    uint32_t part_count;
    uint64_t queued_ns;   /* time at which the program called the driver for this operation */
    struct soft_op *next;
};

struct soft_function {
    enum soft_kind kind;
    char name[640];
    uint64_t length_ns;
    uint32_t sms, work; /* see struct soft_unit */
    bool from_parameter;
};

struct soft_node {
    uint64_t length_ns;
    uint32_t sms; /* see struct soft_unit */
    uint64_t allocates;
    bool frees;
    struct soft_op contents; /* the copy or memset of this node */
};

struct soft_graph {
    enum soft_kind kind;
    uint32_t count, capacity;
    struct soft_node *nodes;
};

struct soft_exec {
    enum soft_kind kind;
    uint32_t kernels, sms; /* number of kernels of the graph, and SMs that the largest of them fills */
    uint64_t length_ns;
    uint64_t allocates; /* total size of the graph's memory nodes; the first launch reserves it */
    bool reserved;
    struct soft_op contents; /* the copies and memsets of all nodes */
};

extern pthread_mutex_t soft_lock; /* protects all objects of this process */
extern bool soft_ready;

struct soft_context *soft_current(void);
struct soft_stream *soft_stream_of(CUstream handle, bool per_thread);
CUresult soft_enqueue(struct soft_stream *stream, struct soft_unit unit, bool waits);
CUresult soft_enqueue_filling(struct soft_stream *stream, struct soft_unit unit, struct soft_op contents, bool waits);
void soft_make_contents(const struct soft_op *op);
static inline struct soft_unit soft_plain(uint64_t length_ns)
{
    return (struct soft_unit){.length_ns = length_ns, .work = 1};
}
static inline struct soft_unit soft_on_device(uint64_t bytes) /* the work of a copy or a memset on the device */
{
    return (struct soft_unit){.length_ns = bytes * 1000 / SOFT_ON_DEVICE_BYTES_PER_US + 1000, .work = 2};
}
CUresult soft_enqueue_copy(struct soft_stream *stream, int direction, void *to, const void *from, uint64_t bytes, bool waits);
uint64_t soft_event_for(const struct soft_event *event, const struct soft_context *context);
CUresult soft_hold(struct soft_stream *stream, struct soft_op op);
bool soft_defer(struct soft_stream *stream, struct soft_op op);
bool soft_is_held(struct soft_stream *stream);
void soft_settle(struct soft_stream *stream);
void soft_event_destroy(struct soft_event *event);
bool soft_is_device_memory(uint64_t address);
bool soft_is_pageable(uint64_t address);
bool soft_is_within_its_span(uint64_t address, uint64_t bytes);
bool soft_is_pooled(uint64_t address); /* the caller holds soft_lock, which protects the process's objects */
/* the caller holds soft_lock, which protects the process's objects */
bool soft_is_pooled_or_mapped(uint64_t address, bool on_device);
CUresult soft_add_node(struct soft_stream *stream, struct soft_node node);
/* For driver functions that must not be called during some stream captures (such as cuMemAlloc during one in global
 * mode). If the calling thread must not call them now, invalidates the captures that forbid it and returns the error
 * that the function must return; otherwise returns CUDA_SUCCESS. */
CUresult soft_unsafe_call(void);
/* invalidates one capture, or all if `graph` is NULL; the caller holds soft_lock */
void soft_invalidate(struct soft_graph *graph);
CUresult soft_legacy_beside_capture(struct soft_stream *stream);
CUresult soft_join_capture(struct soft_stream *stream, struct soft_graph *graph, int mode, bool origin);
struct soft_stream *soft_stream_new(struct soft_context *context, bool blocking, int priority);
uint64_t soft_context_tail(struct soft_context *context);
void soft_context_drop(struct soft_context *context);
void soft_pools_trim(int device);

#define CHECK_READY()                          \
    do {                                       \
        if (!soft_ready)                       \
            return CUDA_ERROR_NOT_INITIALIZED; \
        soft_pass();                           \
        int lost = soft_mps_lost();            \
        if (lost)                              \
            return lost;                       \
    } while (0)
#define CHECK_CONTEXT()                      \
    struct soft_context *context;            \
    do {                                     \
        CHECK_READY();                       \
        context = soft_current();            \
        if (!context)                        \
            return CUDA_ERROR_INVALID_CONTEXT; \
    } while (0)

#endif
