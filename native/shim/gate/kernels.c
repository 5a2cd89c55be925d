/* Measures the kernels of a program, for `cotenant profile kernels`. It records an event before and after each
 * launch, and adds up the GPU time between the two by kernel, grid and block. Only programs that are started with
 * COTENANT_ENV_KERNELS are measured; all their launches take the slow path.
 *
 * The events are recorded in the stream of the launch. The first event completes when earlier work in that stream
 * has ended, so launches need not wait for each other. If the thread gets no processor for a while between the two
 * events, and the stream has no earlier work then, the time between them is too long. Such a time counts only if the
 * kernel has no other. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "abi/floor.h"
#include "shim.h"

/* number of entries of the table of kernels: a power of two, since hashes are reduced to indices by a mask */
#define KINDS 4096
#define PAIRS 256
#define END_PATIENCE_NS UINT64_C(2000000000)
/* a launch and its two events usually take less time of the host than this */
#define LAUNCH_NS 20000

struct times {
    uint64_t count;
    double total_ns, least_ns;
};

struct kind {
    struct kernel_shape shape;
    char name[COTENANT_KERNEL_NAME + 1];
    /* number of SMs that the grid fills, computed from the number of its blocks that fit on one SM; 0: not known */
    uint32_t sms;
    struct times times;
    struct times late; /* times that may include a pause of the thread */
};

struct pair {
    CUevent before, after;
    CUcontext context;
    struct kind *kind;
    bool closed;           /* both events of the pair have been recorded, or are gone with their context */
    uint64_t began_ns;     /* time at which the thread began to record the first event */
    uint64_t pause_ns;     /* at most this much of the time between the events may be a pause of the thread */
};

bool cot_profiling;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kind *kinds;
static struct pair pairs[PAIRS];
static uint32_t oldest, newest; /* the entries of `pairs` with the indices [oldest, newest) are in use */
static uint64_t missed;
static char path[COTENANT_KERNELS_PATH_BYTES];
static pid_t owner;


const char *cot_kernel_name(CUfunction function)
{
    const char *name = NULL;
    if (REAL(cuFuncGetName)(&name, function) != CUDA_SUCCESS || !name)
        if (REAL(cuKernelGetName)(&name, function) != CUDA_SUCCESS)
            name = NULL;
    return name;
}

static void describe(struct kind *kind)
{
    const struct kernel_shape *s = &kind->shape;
    const char *name = cot_kernel_name(s->function);
    if (name)
        strncpy(kind->name, name, sizeof kind->name - 1);
    else
        snprintf(kind->name, sizeof kind->name, "kernel at %p", (void *)s->function);
    int per_sm = 0;
    int threads = (int)(s->block[0] * s->block[1] * s->block[2]);
    uint64_t blocks = (uint64_t)s->grid[0] * s->grid[1] * s->grid[2];
    if (REAL(cuOccupancyMaxActiveBlocksPerMultiprocessor)(
            &per_sm, s->function, threads, s->shared_bytes) == CUDA_SUCCESS && per_sm > 0)
        kind->sms = (uint32_t)((blocks + (uint64_t)per_sm - 1) / (uint64_t)per_sm);
}

static struct kind *kind_of(const struct kernel_shape *shape)
{
    uint64_t hash = cot_hash(HASH_BASIS, shape, sizeof *shape);
    for (uint32_t i = 0; i < 64; i++) {
        struct kind *kind = &kinds[(hash + i) & (KINDS - 1)];
        if (kind->name[0] && memcmp(&kind->shape, shape, sizeof *shape) == 0)
            return kind;
        if (!kind->name[0]) {
            kind->shape = *shape;
            describe(kind);
            return kind;
        }
    }
    return NULL;
}

/* Adds up the times of completed pairs of events, oldest first. */
static void collect(void)
{
    while (oldest != newest) {
        struct pair *pair = &pairs[oldest % PAIRS];
        if (pair->closed && !pair->after) {
            missed++;
            oldest++;
            continue;
        }
        if (!pair->closed || REAL(cuEventQuery)(pair->after) == CUDA_ERROR_NOT_READY)
            return;
        float ms = 0;
        if (REAL(cuEventElapsedTime)(&ms, pair->before, pair->after) ==
                CUDA_SUCCESS && ms > 0) {
            double ns = (double)ms * 1e6;
            struct times *times = (double)pair->pause_ns * 10 > ns ? &pair->kind->late : &pair->kind->times;
            times->total_ns += ns;
            times->least_ns = times->count && times->least_ns < ns ? times->least_ns : ns;
            times->count++;
        }
        oldest++;
    }
}

static void write_all(void)
{
    if (owner != getpid())
        return;
    pthread_mutex_lock(&lock);
    for (uint64_t began = cot_now_ns(); oldest != newest && cot_now_ns() - began < END_PATIENCE_NS; usleep(1000))
        collect();
    char name[sizeof path + 32];
    snprintf(name, sizeof name, "%s.%d", path, (int)owner);
    FILE *file = fopen(name, "w");
    for (uint32_t i = 0; file && i < KINDS; i++) {
        const struct kind *k = &kinds[i];
        const struct times *times = k->times.count ? &k->times : &k->late;
        const uint32_t *g = k->shape.grid, *b = k->shape.block;
        if (times->count)
            fprintf(file, "%llu\t%.0f\t%.0f\t%u\t%u,%u,%u\t%u,%u,%u\t%u\t%s\n",
                    (unsigned long long)(k->times.count + k->late.count), times->total_ns / (double)times->count,
                    times->least_ns, k->sms, g[0], g[1], g[2], b[0], b[1], b[2], k->shape.shared_bytes, k->name);
    }
    if (file) {
        fprintf(file, "missed\t%llu\n", (unsigned long long)missed);
        fclose(file);
    }
    pthread_mutex_unlock(&lock);
}

/* Called when the process first connects to the agent. A child process writes a file of its own. */
void cot_kernels_start(void)
{
    const char *given = getenv(COTENANT_ENV_KERNELS);
    if (!given || !given[0] || strlen(given) >= sizeof path || owner == getpid())
        return;
    free(kinds);
    kinds = calloc(KINDS, sizeof *kinds);
    if (!kinds)
        return;
    /* after a fork, the events in `pairs` are those of the parent process */
    memset(pairs, 0, sizeof pairs);
    oldest = newest = 0;
    missed = 0;
    strcpy(path, given);
    owner = getpid();
    cot_profiling = true;
    atexit(write_all);
}

/* Records the first event of a launch that passed the turn gate. Returns NULL if the launch is not measured. */
struct pair *cot_kernels_before(const struct kernel_shape *shape, CUstream stream)
{
    if (atomic_load(&cot_captures) > 0)
        return NULL;
    pthread_mutex_lock(&lock);
    collect();
    struct pair *pair = newest - oldest < PAIRS ? &pairs[newest % PAIRS] : NULL;
    if (pair && pair->context != cot_thread->context) {
        /* events can be recorded only in streams of their own context, so this context needs two new ones */
        if (pair->before)
            REAL(cuEventDestroy_v2)(pair->before);
        if (pair->after)
            REAL(cuEventDestroy_v2)(pair->after);
        pair->before = pair->after = NULL;
        pair->context = cot_thread->context;
    }
    CUresult (*create)(CUevent *, unsigned) = REAL(cuEventCreate);
    if (pair && ((!pair->before && create(&pair->before, 0) != CUDA_SUCCESS) ||
                 (!pair->after && create(&pair->after, 0) != CUDA_SUCCESS) || !(pair->kind = kind_of(shape))))
        pair = NULL;
    uint64_t began_ns = cot_now_ns();
    if (pair && REAL(cuEventRecord)(pair->before, stream) != CUDA_SUCCESS)
        pair = NULL;
    if (pair) {
        pair->closed = false;
        pair->began_ns = began_ns;
        newest++;
    } else
        missed++;
    pthread_mutex_unlock(&lock);
    return pair;
}

void cot_kernels_after(struct pair *pair, CUstream stream)
{
    REAL(cuEventRecord)(pair->after, stream);
    uint64_t took_ns = cot_now_ns() - pair->began_ns;
    bool queued = took_ns > LAUNCH_NS && REAL(cuEventQuery)(pair->before) == CUDA_ERROR_NOT_READY;
    pthread_mutex_lock(&lock);
    pair->pause_ns = took_ns > LAUNCH_NS && !queued ? took_ns : 0;
    pair->closed = true;
    pthread_mutex_unlock(&lock);
}

/* Called before a context is destroyed: afterwards, the times of its kernels could not be read any more. */
void cot_kernels_collect(void)
{
    if (!cot_profiling)
        return;
    pthread_mutex_lock(&lock);
    collect();
    pthread_mutex_unlock(&lock);
}

/* Called when a context was destroyed, and its events with it. The driver may give a new context the same handle. */
void cot_kernels_context_gone(CUcontext gone)
{
    if (!cot_profiling)
        return;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < PAIRS; i++)
        if (pairs[i].context == gone) {
            pairs[i].before = pairs[i].after = NULL;
            pairs[i].context = NULL;
            pairs[i].closed = true;
        }
    pthread_mutex_unlock(&lock);
}
