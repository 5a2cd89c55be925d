/* Counters of launches and of calls in flight, one record per thread.
 *
 * A launching thread writes only its own counters, with plain stores: it first counts the launch and then checks
 * whether the turn gate is open. The thread that closes the gate must see these two steps in that order. For this,
 * launches do not execute a fence instruction. Instead, the closing thread makes the operating system execute a
 * barrier on every running thread of the process (membarrier), once per turn. If the system has no membarrier, no
 * launch takes the hot path, and the slow path executes a fence instruction. */
#define _GNU_SOURCE
#include <linux/membarrier.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static bool registered, fenced; /* fenced: the system has no membarrier, so launches execute a fence instruction */

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
    /* `finished` is read before `started`, so that if the two are equal, nothing was in flight when `started` was
     * read */
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

/* Lets a thread use the hot path, the inline part of a launch. Another thread may close the turn gate at the same
 * time (cot_calls_close). That thread stores EPOCH_CLOSED before it takes the lock. So either this function sees that
 * epoch, or cot_calls_close takes the lock later and sets `open` back to 0. */
void cot_calls_open(struct calls *calls)
{
    if (fenced)
        return;
    pthread_mutex_lock(&list_lock);
    atomic_store(&calls->open, *(volatile uint64_t *)&calls->gpu->epoch != EPOCH_CLOSED);
    pthread_mutex_unlock(&list_lock);
}

/* Closes the hot path for all threads. The caller has set gpu->epoch to EPOCH_CLOSED. When this function returns,
 * every call that passed the gate is counted as started, even if the count was still in the store buffer of its
 * thread's processor. */
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

/* Called when a stream is destroyed or its record is reused, so that the next launch into a stream with this handle
 * takes the slow path. */
void cot_calls_forget_stream(CUstream handle)
{
    pthread_mutex_lock(&list_lock);
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        for (struct calls *calls = cot_gpu_at(i)->calls; calls; calls = calls->next)
            if (handle == COT_NO_STREAM || atomic_load(&calls->handle) == handle)
                atomic_store(&calls->handle, COT_NO_STREAM);
    pthread_mutex_unlock(&list_lock);
}

/* Called when a thread ends: adds its counters to those of ended threads. */
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

/* Called in the child of a fork, which has only one thread. cot_gate_reset_after_fork has already cleared the records
 * of the GPUs, and with them the lists of `struct calls`. */
void cot_calls_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&list_lock, &fresh, sizeof fresh);
    registered = false;
    memset(cot_thread->calls_of, 0, sizeof cot_thread->calls_of);
}
