/* The driver's checkpoint of another process, in four steps: lock, checkpoint, restore, unlock.
 *
 * A locked process waits at its next driver call. A process with a checkpoint holds no memory on the device, so
 * other processes can have it. If too little memory is left when the process is restored, the restore fails and
 * cannot be repeated, as with the real driver. The contents are not copied: the memory of the software GPU is
 * ordinary memory of the process. */
#include <string.h>

#include "softgpu.h"

enum { RUNNING = 0, LOCKED = 1, CHECKPOINTED = 2, FAILED = 3 };

struct lock_args {
    unsigned timeout_ms, reserved;
    uint64_t reserved_1[7];
};

struct gpu_pair {
    struct cu_uuid from, to;
};

struct restore_args {
    const struct gpu_pair *pairs;
    unsigned count;
};

static CUresult find(int pid, struct soft_process **process)
{
    if (soft_attach() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_INITIALIZED;
    *process = soft_process_of(pid);
    return *process ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static uint64_t last_end(const struct soft_process *process)
{
    uint64_t latest = 0;
    for (int d = 0; d < SOFT_MAX_DEVICES; d++) {
        uint64_t ends[3] = {process->tail_ns[d], process->engine_tail_ns[d][0], process->engine_tail_ns[d][1]};
        for (int i = 0; i < 3; i++)
            latest = ends[i] > latest ? ends[i] : latest;
    }
    return latest;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    struct soft_process *process;
    CUresult result = find(pid, &process);
    if (result == CUDA_SUCCESS)
        *state = (int)atomic_load(&process->checkpoint);
    return result;
}

static CUresult change(struct soft_process *process, uint32_t from, uint32_t to)
{
    return atomic_compare_exchange_strong(&process->checkpoint, &from, to) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, const struct lock_args *args)
{
    struct soft_process *process;
    CUresult result = find(pid, &process);
    if (result == CUDA_SUCCESS)
        result = change(process, RUNNING, LOCKED);
    uint64_t began = soft_now_ns(), patience = args && args->timeout_ms ? args->timeout_ms * UINT64_C(1000000) : UINT64_MAX;
    while (result == CUDA_SUCCESS && last_end(process) > soft_now_ns()) {
        if (soft_now_ns() - began > patience) {
            atomic_store(&process->checkpoint, RUNNING);
            return CUDA_ERROR_NOT_READY;
        }
        soft_sleep_until(soft_now_ns() + 1000000);
    }
    return result;
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, const void *args)
{
    (void)args;
    struct soft_process *process;
    CUresult result = find(pid, &process);
    if (result != CUDA_SUCCESS)
        return result;
    if (atomic_load(&process->managed))
        return CUDA_ERROR_NOT_SUPPORTED;
    result = change(process, LOCKED, CHECKPOINTED);
    for (int d = 0; d < SOFT_MAX_DEVICES && result == CUDA_SUCCESS; d++)
        atomic_store(&process->saved_bytes[d], atomic_exchange(&process->bytes[d], 0));
    return result;
}

static int device_of(const struct cu_uuid *uuid)
{
    uint8_t known[16];
    for (uint32_t d = 0; d < soft_state()->device_count; d++) {
        soft_uuid((int)d, known);
        if (memcmp(known, uuid->bytes, sizeof known) == 0)
            return (int)d;
    }
    return -1;
}

/* Reads the pairs of old and new GPU from the arguments of a restore: the memory of device d is restored on device
 * to[d]. As in driver release 580, all memory stays on its device if there are no pairs. Otherwise each GPU must occur
 * exactly once as old and once as new, even if its memory stays. Returns false if the pairs are invalid. */
static bool read_pairs(const struct restore_args *args, int to[SOFT_MAX_DEVICES])
{
    uint32_t old = 0, new = 0, all = (UINT32_C(1) << soft_state()->device_count) - 1;
    for (int d = 0; d < SOFT_MAX_DEVICES; d++)
        to[d] = d;
    if (!args || !args->count)
        return true;
    for (unsigned i = 0; args->pairs && i < args->count; i++) {
        int from = device_of(&args->pairs[i].from), target = device_of(&args->pairs[i].to);
        if (from < 0 || target < 0 || old & UINT32_C(1) << from || new & UINT32_C(1) << target)
            return false;
        old |= UINT32_C(1) << from;
        new |= UINT32_C(1) << target;
        to[from] = target;
    }
    return old == all && new == all;
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, const struct restore_args *args)
{
    struct soft_process *process;
    int to[SOFT_MAX_DEVICES];
    CUresult result = find(pid, &process);
    if (result == CUDA_SUCCESS && atomic_load(&process->checkpoint) != CHECKPOINTED)
        result = CUDA_ERROR_ILLEGAL_STATE;
    if (result == CUDA_SUCCESS && !read_pairs(args, to))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    soft_reap();
    for (int d = 0; d < SOFT_MAX_DEVICES; d++) {
        uint64_t bytes = atomic_load(&process->saved_bytes[d]);
        if (bytes && soft_used_memory(to[d]) + bytes > soft_state()->memory_bytes) {
            atomic_store(&process->checkpoint, FAILED);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    for (int d = 0; d < SOFT_MAX_DEVICES; d++) {
        uint64_t bytes = atomic_exchange(&process->saved_bytes[d], 0);
        atomic_fetch_add(&process->bytes[to[d]], bytes);
        /* an earlier restore may have moved the process to another device */
        int now = process->place[d] ? (int)process->place[d] - 1 : d;
        atomic_store(&process->place[d], (uint32_t)to[now] + 1);
    }
    return change(process, CHECKPOINTED, LOCKED);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, const void *args)
{
    (void)args;
    struct soft_process *process;
    CUresult result = find(pid, &process);
    return result == CUDA_SUCCESS ? change(process, LOCKED, RUNNING) : result;
}
