/* Per-thread counters of launches and of calls in flight.
 *
 * A launching thread writes only its own counters, with plain stores.  The gate requires that "count, then check whether
 * it is open" is observed in that order by the thread that closes it.  Instead of a fence in every launch, the closing
 * thread makes the kernel insert a barrier into every running thread of the process (membarrier), once per turn.
 * Without that system call no launch takes the hot path, and the slow path has a fence. */
#define _GNU_SOURCE
#include <linux/membarrier.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static bool registered, fenced; /* fenced: membarrier is not available */

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
    calls->handle = COT_NO_STREAM;
    calls->log_next = &calls->unnoted;
    pthread_mutex_lock(&list_lock);
    if (!registered) {
        fenced = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0;
        registered = true;
    }
    calls->next = gpu->calls;
    gpu->calls = calls;
    pthread_mutex_unlock(&list_lock);
    return *mine = calls;
}

static void add(struct call_counts *sum, const struct calls *calls)
{
    /* read `finished` before `started`: equal values then mean that nothing was in flight when `started` was read */
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

/* The gate may be closed concurrently: cot_calls_close stores its closed epoch before it takes the lock, so it is either
 * seen here or closes again what is opened here. */
void cot_calls_open(struct calls *calls)
{
    if (fenced)
        return;
    pthread_mutex_lock(&list_lock);
    atomic_store(&calls->open, *(volatile uint64_t *)&calls->gpu->epoch != EPOCH_CLOSED);
    pthread_mutex_unlock(&list_lock);
}

/* Called with gpu->epoch closed.  Afterwards every call that passed the gate is counted as started, even if it was still
 * in its thread's store buffer. */
void cot_calls_close(struct gpu *gpu)
{
    pthread_mutex_lock(&list_lock);
    for (struct calls *calls = gpu->calls; calls; calls = calls->next)
        atomic_store(&calls->open, 0);
    pthread_mutex_unlock(&list_lock);
    if (!fenced && registered && membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0)
        return;
    atomic_thread_fence(memory_order_seq_cst);
}

/* The stream is destroyed, or its record is reused: launches with this handle count as launches into a new stream. */
void cot_calls_forget_stream(CUstream handle)
{
    pthread_mutex_lock(&list_lock);
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        for (struct calls *calls = cot_gpu_at(i)->calls; calls; calls = calls->next)
            if (handle == COT_NO_STREAM || atomic_load(&calls->handle) == handle)
                atomic_store(&calls->handle, COT_NO_STREAM);
    pthread_mutex_unlock(&list_lock);
}

/* A thread ends: its counters are kept. */
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
