/* Calls in flight, counted per thread.
 *
 * A launching thread writes only counters of its own, with plain stores.  The gate needs "count, then look at the epoch"
 * to be seen in that order by whoever closes it; instead of a fence in every launch, the one who closes has the kernel
 * put a barrier into every running thread of the process (membarrier), once a turn.  Where the kernel has no such call,
 * launches pay for a fence of their own. */
#define _GNU_SOURCE
#include <linux/membarrier.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

bool cot_calls_fenced; /* no membarrier: every launch has a fence */

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static bool registered;

static long membarrier(int command)
{
    return syscall(SYS_membarrier, command, 0, 0);
}

struct calls *cot_calls_of(struct thread *t, struct gpu *gpu)
{
    struct calls **mine = &t->calls_of[gpu - cot_gpu_at(0)];
    if (*mine)
        return *mine;
    struct calls *calls = aligned_alloc(_Alignof(struct calls), sizeof *calls);
    if (!calls)
        return NULL;
    memset(calls, 0, sizeof *calls);
    calls->gpu = gpu;
    pthread_mutex_lock(&list_lock);
    if (!registered) {
        cot_calls_fenced = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0;
        registered = true;
    }
    calls->next = gpu->calls;
    gpu->calls = calls;
    pthread_mutex_unlock(&list_lock);
    return *mine = calls;
}

static void add(struct call_counts *sum, const struct calls *calls)
{
    /* finished first: a difference of none then means that none was in flight when started was read */
    sum->finished += atomic_load_explicit(&calls->finished, memory_order_acquire);
    sum->started += atomic_load_explicit(&calls->started, memory_order_acquire);
    sum->copies += atomic_load_explicit(&calls->copies, memory_order_relaxed);
    sum->graph_launches += atomic_load_explicit(&calls->graph_launches, memory_order_relaxed);
}

struct call_counts cot_calls_sum(const struct gpu *gpu)
{
    pthread_mutex_lock(&list_lock);
    struct call_counts sum = gpu->calls_retired;
    for (const struct calls *calls = gpu->calls; calls; calls = calls->next)
        add(&sum, calls);
    pthread_mutex_unlock(&list_lock);
    return sum;
}

/* After a gate was closed: every call that passed it is counted as started, whatever its thread has in store buffers. */
void cot_calls_barrier(void)
{
    if (!cot_calls_fenced && registered && membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0)
        return;
    atomic_thread_fence(memory_order_seq_cst);
}

/* A thread ends: its counts stay. */
void cot_calls_retire(struct thread *t)
{
    pthread_mutex_lock(&list_lock);
    for (uint32_t i = 0; i < COTENANT_MAX_GPUS; i++) {
        struct calls *calls = t->calls_of[i];
        if (!calls)
            continue;
        add(&calls->gpu->calls_retired, calls);
        for (struct calls **link = &calls->gpu->calls; *link; link = &(*link)->next)
            if (*link == calls) {
                *link = calls->next;
                break;
            }
        free(calls);
        t->calls_of[i] = NULL;
    }
    pthread_mutex_unlock(&list_lock);
}

/* In the child of a fork, which has one thread; the GPUs' lists were emptied with the GPUs. */
void cot_calls_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&list_lock, &fresh, sizeof fresh);
    registered = false;
    memset(cot_thread->calls_of, 0, sizeof cot_thread->calls_of);
}
