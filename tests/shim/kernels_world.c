/* Runs the shim's timing of kernels (gate/kernels.c) against a driver that knows which events exist: an event is used
 * only while it and its context exist, in its own context, and is destroyed once. Contexts are made and destroyed at
 * random, and a new context often has the handle of a destroyed one. Prints the launches, those with a time, those that
 * were missed, and the largest number of events that existed at once. */
#define _GNU_SOURCE
#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gate/kernels.c"

#define CONTEXTS 3
#define EVENTS 100000

_Atomic uint32_t cot_captures;
static struct thread this_thread;
__thread struct thread *cot_thread __attribute__((tls_model("initial-exec")));
HIDDEN void *cot_real_cuEventCreate, *cot_real_cuEventRecord, *cot_real_cuEventQuery, *cot_real_cuEventElapsedTime;
HIDDEN void *cot_real_cuEventDestroy_v2, *cot_real_cuFuncGetName, *cot_real_cuKernelGetName;
HIDDEN void *cot_real_cuOccupancyMaxActiveBlocksPerMultiprocessor;

static struct { bool exists; uint64_t context, done_at; } events[EVENTS];
/* the number of a context, which is never used again; 0: there is no context with this handle */
static uint64_t context_of_handle[CONTEXTS + 1], contexts;
static uint64_t created, alive, most_alive, now = 1;

uint64_t cot_now_ns(void) { return now += 100; }

static uint64_t current(void)
{
    uint64_t number = context_of_handle[(uintptr_t)cot_thread->context];
    assert(number);
    return number;
}
static uint64_t known(CUevent event)
{
    uint64_t number = (uintptr_t)event;
    assert(number && number <= created && events[number].exists);
    return number;
}
static CUresult event_create(CUevent *event, unsigned flags)
{
    (void)flags;
    assert(created + 1 < EVENTS);
    events[++created].exists = true;
    events[created].context = current();
    *event = (CUevent)(uintptr_t)created;
    most_alive = ++alive > most_alive ? alive : most_alive;
    return CUDA_SUCCESS;
}
static CUresult event_destroy(CUevent event)
{
    events[known(event)].exists = false;
    alive--;
    return CUDA_SUCCESS;
}
static CUresult event_record(CUevent event, CUstream stream)
{
    (void)stream;
    assert(events[known(event)].context == current());
    events[known(event)].done_at = now + (uint64_t)(rand() % 4000);
    return CUDA_SUCCESS;
}
static CUresult event_query(CUevent event)
{
    return events[known(event)].done_at <= now ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
static CUresult event_elapsed(float *ms, CUevent from, CUevent to)
{
    assert(events[known(from)].context == events[known(to)].context);
    *ms = 1;
    return CUDA_SUCCESS;
}
static CUresult no_name(const char **name, CUfunction function)
{
    (void)function;
    *name = "kernel";
    return CUDA_SUCCESS;
}
static CUresult occupancy(int *blocks, CUfunction function, int threads, size_t bytes)
{
    (void)function, (void)threads, (void)bytes;
    *blocks = 1;
    return CUDA_SUCCESS;
}

static void destroy(uintptr_t handle)
{
    cot_kernels_collect();
    for (uint64_t i = 1; i <= created; i++)
        if (events[i].exists && events[i].context == context_of_handle[handle]) {
            events[i].exists = false;
            alive--;
        }
    context_of_handle[handle] = 0;
    cot_kernels_context_gone((CUcontext)handle);
}

int main(int count, char **arguments)
{
    assert(count == 4);
    srand((unsigned)atoi(arguments[1]));
    int launches = atoi(arguments[2]), lives = atoi(arguments[3]); /* mean number of launches in the life of a context */
    cot_real_cuEventCreate = event_create, cot_real_cuEventDestroy_v2 = event_destroy;
    cot_real_cuEventRecord = event_record, cot_real_cuEventQuery = event_query;
    cot_real_cuEventElapsedTime = event_elapsed, cot_real_cuFuncGetName = no_name, cot_real_cuKernelGetName = no_name;
    cot_real_cuOccupancyMaxActiveBlocksPerMultiprocessor = occupancy;
    cot_thread = &this_thread;
    cot_kernels_start();
    const struct kernel_shape shape = {.function = (CUfunction)1, .grid = {1, 1, 1}, .block = {1, 1, 1}};
    for (int i = 0; i < launches; i++) {
        uintptr_t handle = 1 + (uintptr_t)(rand() % CONTEXTS);
        if (context_of_handle[handle] && rand() % lives == 0)
            destroy(handle);
        if (!context_of_handle[handle])
            context_of_handle[handle] = ++contexts;
        cot_thread->context = (CUcontext)handle;
        struct pair *pair = cot_kernels_before(&shape, NULL);
        if (pair)
            cot_kernels_after(pair, NULL);
    }
    now += 1000000;
    for (uintptr_t handle = 1; handle <= CONTEXTS; handle++)
        if (context_of_handle[handle])
            destroy(handle);
    cot_kernels_collect();
    struct kind *kind = kind_of(&shape);
    printf("%d %llu %llu %llu\n", launches, (unsigned long long)(kind->times.count + kind->late.count),
           (unsigned long long)missed, (unsigned long long)most_alive);
    return 0;
}
