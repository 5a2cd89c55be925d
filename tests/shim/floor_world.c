/* Runs the shim's gate of best-effort launches (floor.c, floor/pieces.c, floor/ahead.c) in virtual time against a
 * simulated GPU that has one stream.
 *
 * Each read of the clock takes LOOK_NS of virtual time, so a loop that waits makes time pass. A kernel starts launch_ns
 * after its launch, or later, when the work queued before it has ended. An event takes event_ns of GPU time. A wait on
 * the LS gate takes WAIT_NS (1.9 to 2.2 us were measured). */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define sched_yield world_yield
#define nanosleep world_sleep
static int world_yield(void);
static int world_sleep(const struct timespec *time, struct timespec *left);

#define FLOOR_TICKS world_ticks
static uint64_t world_ticks(void);

#include "floor/floor.c"
#include "floor/pieces.c"
#include "floor/ahead.c"

#define LOOK_NS 100
#define WAIT_NS 2200
#define EVENTS 4096

_Atomic uint32_t cot_captures;
pthread_mutex_t cot_capture_lock = PTHREAD_MUTEX_INITIALIZER;
struct cost cot_costs[(1 << COST_BITS) + COST_BESIDE];
static struct thread this_thread;
__thread struct thread *cot_thread __attribute__((tls_model("initial-exec")));
HIDDEN void *cot_real_cuEventCreate, *cot_real_cuEventRecord, *cot_real_cuEventQuery, *cot_real_cuEventElapsedTime;
HIDDEN void *cot_real_cuMemHostRegister_v2, *cot_real_cuMemHostGetDevicePointer_v2, *cot_real_cuStreamBatchMemOp_v2;
/* for programs with more than one context */
HIDDEN void *cot_real_cuEventDestroy_v2, *cot_real_cuCtxPushCurrent_v2, *cot_real_cuCtxPopCurrent_v2;

bool cot_profiling;
bool cot_exiting(void) { return false; }
bool cot_start_thread(void *(*body)(void *), void *argument)
{
    (void)body;
    (void)argument;
    return true;
}
struct work cot_work_now(struct work stated) { return stated; }

static int64_t now = 1000000, gpu_free_at, launch_latency_ns, event_cost_ns, yield_cost_ns;
static int64_t done_at[EVENTS];
static uint64_t created, recorded;

static void look_at_ls(void);

uint64_t cot_now_ns(void)
{
    now += LOOK_NS;
    look_at_ls();
    return (uint64_t)now;
}
static uint64_t world_ticks(void) { return (uint64_t)now * 3; }
static int world_yield(void) { now += yield_cost_ns; return 0; }
static int world_sleep(const struct timespec *time, struct timespec *left)
{
    (void)left;
    now += time->tv_sec * 1000000000 + time->tv_nsec + 50000; /* the slack of the kernel's timers */
    return 0;
}

static CUresult event_create(CUevent *event, unsigned flags)
{
    (void)flags;
    *event = (CUevent)(uintptr_t)++created;
    return CUDA_SUCCESS;
}
static CUresult event_record(CUevent event, CUstream stream)
{
    (void)stream;
    recorded++;
    now += 1000;
    gpu_free_at = (gpu_free_at > now ? gpu_free_at : now) + event_cost_ns;
    done_at[(uintptr_t)event % EVENTS] = gpu_free_at;
    return CUDA_SUCCESS;
}
static CUresult event_query(CUevent event)
{
    now += 400;
    return done_at[(uintptr_t)event % EVENTS] <= now ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
static CUresult event_elapsed(float *ms, CUevent from, CUevent to)
{
    *ms = (float)((double)(done_at[(uintptr_t)to % EVENTS] - done_at[(uintptr_t)from % EVENTS]) / 1e6);
    return CUDA_SUCCESS;
}

static struct floor world_floor;
static struct gpu world_gpu;
uint32_t cot_gpu_count(void) { return 1; }
struct gpu *cot_gpu_at(uint32_t number) { (void)number; return &world_gpu; }
static struct cotenant_floor page;
static struct cotenant_floor_words words_page;
static int64_t part_began; /* time at which the GPU began the work that follows the last stream wait */
static CUresult host_pointer(CUdeviceptr *address, void *host, unsigned flags)
{
    (void)flags;
    *address = (CUdeviceptr)(uintptr_t)host;
    return CUDA_SUCCESS;
}
static int64_t floor_down_at(int64_t at);
static int64_t waits, stream_number = 1;
int64_t world_waits(void) { return waits; }
/* Sets the number of streams that launches use in turn. */
void world_streams(int64_t number) { stream_number = number, waits = 0; }
static CUresult batch(CUstream stream, unsigned count, const struct word_operation *operations, unsigned flags)
{
    (void)stream, (void)flags;
    if (count != 1 || operations->kind != WORD_WAIT || operations->flags != WORD_EQUAL || operations->value != 0 ||
        operations->address != (uintptr_t)words_page.raised)
        return CUDA_ERROR_INVALID_VALUE;
    now += 1500;
    waits++;
    gpu_free_at = floor_down_at((gpu_free_at > now ? gpu_free_at : now) + WAIT_NS);
    part_began = gpu_free_at;
    return CUDA_SUCCESS;
}
static struct cotenant_slot slot;
static struct stream world_stream;

struct settings {
    /* own_us: budget that the program itself was given */
    uint32_t scheme, in_flight_us, own_us, run_ahead, duty_cycle_permille;
    int64_t launch_ns, event_ns, yield_ns;
};
struct launch {
    int64_t kind, length_ns, host_ns; /* host_ns: time that the program spends on the host before the launch */
};
struct burst {
    int64_t up_ns, down_ns; /* start and end of the LS work, from the start of the run */
};
struct result {
    int64_t took_ns, busy_ns;
    uint64_t events;
    /* largest amount of work in flight after any launch, by the simulated GPU's own account */
    int64_t longest_in_flight_ns;
    /* time that LS work waited, over all bursts, for BE work that was in flight when the gate was raised */
    int64_t waited_ns;
    int64_t longest_wait_ns;
    int64_t launched_while_up;
    int64_t bursts;
};

void world_start(const struct settings *s)
{
    cot_real_cuEventCreate = event_create;
    cot_real_cuEventRecord = event_record;
    cot_real_cuEventQuery = event_query;
    cot_real_cuEventElapsedTime = event_elapsed;
    cot_real_cuMemHostGetDevicePointer_v2 = host_pointer;
    cot_real_cuStreamBatchMemOp_v2 = batch;
    page = (struct cotenant_floor){.scheme = s->scheme, .tenants = 1, .present = 1, .present_words = 1,
                                   .in_flight_us = s->in_flight_us, .heartbeat_timeout_ms = 500, .run_ahead = s->run_ahead,
                                   .duty_cycle_permille = s->duty_cycle_permille};
    memset(cot_costs, 0, sizeof cot_costs);
    memset(&world_floor, 0, sizeof world_floor);
    pthread_mutex_init(&world_floor.lock, NULL);
    world_floor.page = &page;
    world_floor.in_flight_us = s->own_us;
    world_floor.ahead.shown = &words_page;
    world_gpu.floor = &world_floor;
    world_gpu.page_slot = &slot;
    slot = (struct cotenant_slot){.flags = COTENANT_SLOT_UNGATED};
    this_thread = (struct thread){.gpu = &world_gpu, .stream = &world_stream, .context = (CUcontext)1};
    world_stream.handle = (CUstream)2;
    cot_thread = &this_thread;
    stream_number = 1;
    launch_latency_ns = s->launch_ns;
    event_cost_ns = s->event_ns;
    yield_cost_ns = s->yield_ns;
    gpu_free_at = part_began = created = recorded = 0;
    now = 1000000;
}

/* Sets what the agent has decided about dividing the GPU, and whether the agent is lost. */
void world_divide(uint32_t tenants, uint64_t parts, bool lost)
{
    page.tenants = tenants;
    slot.floor_parts = parts;
    world_gpu.stale = lost;
}

static int64_t asked_ns; /* at the end of a run: how long ago a launch last checked the LS gate */
int64_t world_asked_ns(void) { return asked_ns; }

int64_t world_cost(int64_t kind) { return cot_costs[kind].ns; }

/* LS work comes and goes by the clock, whatever the program does: the gate page is updated before each read of the
 * clock. */
static const struct burst *bursts;
static int64_t burst_count, burst_at, burst_up, began;
static struct result *run;

static int64_t floor_down_at(int64_t at)
{
    for (int64_t i = burst_at; i < burst_count && began + bursts[i].up_ns <= at; i++)
        if (at < began + bursts[i].down_ns)
            at = began + bursts[i].down_ns;
    return at;
}

/* The last kernels, with the times at which the GPU ran them. */
#define RUNS 65536
static struct { int64_t start, end, part, launched; } runs[RUNS];
static int64_t run_count;

/* Returns the time until which LS work that arrives at `up` has to wait: the end of the part that then runs. */
static int64_t in_the_way_until(int64_t up)
{
    int64_t until = up;
    for (int64_t i = run_count - 1; i >= 0 && i > run_count - RUNS && runs[i % RUNS].end > up; i--)
        if (runs[i % RUNS].part <= up && runs[i % RUNS].end > until)
            until = runs[i % RUNS].end;
    return until;
}

static void look_at_ls(void)
{
    while (burst_at < burst_count && now - began >= bursts[burst_at].up_ns) {
        if (!burst_up) {
            int64_t up = began + bursts[burst_at].up_ns, wait = in_the_way_until(up) - up;
            burst_up = 1;
            page.raised_ns[0] = (uint64_t)up;
            page.raised[0] = COTENANT_WORK_UNKNOWN;
            run->bursts++;
            run->waited_ns += wait > 0 ? wait : 0;
            run->longest_wait_ns = wait > run->longest_wait_ns ? wait : run->longest_wait_ns;
        }
        if (now - began < bursts[burst_at].down_ns)
            return;
        page.raised[0] = 0;
        burst_up = 0;
        burst_at++;
    }
}

void world_run(const struct launch *launches, int64_t count, const struct burst *ls, int64_t ls_count, struct result *result)
{
    bursts = ls, burst_count = ls_count, burst_at = burst_up = run_count = 0, began = now, run = result;
    *result = (struct result){0};
    uint64_t before = recorded;
    for (int64_t i = 0; i < count; i++) {
        struct cost *cost = &cot_costs[launches[i].kind];
        if (!cost->ns)
            *cost = (struct cost){(uintptr_t)launches[i].kind, COST_UNKNOWN_NS};
        now += launches[i].host_ns;
        look_at_ls();
        world_stream.handle = (CUstream)(uintptr_t)(2 + i % stream_number);
        if (!cot_floor_goes_on(&this_thread, cost))
            cot_floor_enter(&this_thread, cost);
        look_at_ls();
        int64_t start = now + launch_latency_ns;
        start = gpu_free_at > start ? gpu_free_at : start;
        gpu_free_at = start + launches[i].length_ns;
        bool held = world_floor.ahead.on;
        int64_t part = held ? part_began : start;
        runs[run_count++ % RUNS] = (typeof(runs[0])){start, gpu_free_at, part, now};
        result->launched_while_up += burst_up && (!held || part <= began + bursts[burst_at].up_ns);
        result->busy_ns += launches[i].length_ns;
        int64_t in_flight = gpu_free_at - (held && part > now ? part : now);
        if (in_flight > result->longest_in_flight_ns)
            result->longest_in_flight_ns = in_flight;
        if (this_thread.solo)
            cot_floor_launched(&this_thread);
    }
    asked_ns = now - (int64_t)slot.floor_ns;
    while (now < gpu_free_at) { /* LS work may arrive until all work has ended */
        now += 10000;
        look_at_ls();
    }
    result->took_ns = (gpu_free_at > now ? gpu_free_at : now) - began;
    result->events = recorded - before;
}
