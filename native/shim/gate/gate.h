/* The interface of turns (time slices that the agent grants), of the GPUs of this process, and of kernel profiles. */
#ifndef COTENANT_GATE_ROOM_H
#define COTENANT_GATE_ROOM_H

#include "shim.h"

/* ---- gate.c ---- */
HIDDEN void cot_thread_context_changed(void);
/* returns the GPU of the current context, attached to the agent; NULL without a context */
HIDDEN struct gpu *cot_thread_gpu(void);
HIDDEN struct gpu *cot_gpu_of_device(CUdevice device, bool attach);
HIDDEN struct gpu *cot_gpu_at(uint32_t index);
HIDDEN uint32_t cot_gpu_count(void);
/* called before a driver call in which the host waits for the GPU to finish its work */
HIDDEN void cot_sync_begin(void);
HIDDEN void cot_gate_grant(struct gpu *gpu, uint64_t epoch, uint64_t deadline_ns);
HIDDEN void cot_gate_begin_close(struct gpu *gpu, uint32_t reason);
/* advances the turns of this process; returns the time in ns until the helper thread must call it again */
HIDDEN uint64_t cot_gates_advance(uint64_t now_ns);
HIDDEN void cot_gates_agent_lost(uint32_t fail_mode);
HIDDEN void cot_gates_exit(void);
HIDDEN void cot_gate_reset_after_fork(void);
HIDDEN void cot_gpu_publish(struct gpu *gpu, uint64_t now_ns);
HIDDEN bool cot_gpu_is_denied(CUdevice device);
HIDDEN CUresult cot_gpu_before_context(CUdevice device);
/* called if the driver had no memory for a context: asks the agent to evict other tenants' memory */
HIDDEN bool cot_gpu_room_for_context(CUdevice device);
HIDDEN void cot_gpu_context_made(CUdevice device, CUcontext context);
HIDDEN void cot_gpu_context_gone(CUdevice device, CUcontext context);
HIDDEN void cot_gpus_after_reconnect(void);
/* called on the helper thread after a PAGE_UPDATE message, since the process may have been restored on other GPUs */
HIDDEN void cot_gpus_follow(void);
/* starts a thread that tries again to join the LS gates of this process's GPUs */
HIDDEN void cot_gpus_join_again(void);
HIDDEN uint64_t cot_total_launches(void);
HIDDEN uint32_t cot_total_contexts(void);

HIDDEN struct thread *cot_thread_get(void); /* creates this thread's record if necessary; NULL: memory is exhausted */

/* ---- kernels.c ---- */
#define COTENANT_KERNELS_PATH_BYTES 512
struct kernel_shape {
    CUfunction function;
    uint32_t grid[3], block[3], shared_bytes, zero;
};
struct pair;
extern HIDDEN bool cot_profiling; /* this program's kernels are being measured, so every launch takes the slow path */
HIDDEN void cot_kernels_start(void);
HIDDEN struct pair *cot_kernels_before(const struct kernel_shape *shape, CUstream stream);
HIDDEN void cot_kernels_after(struct pair *pair, CUstream stream);
HIDDEN void cot_kernels_collect(void);
HIDDEN void cot_kernels_context_gone(CUcontext gone);

HIDDEN const char *cot_kernel_name(CUfunction function); /* NULL: the driver does not know the function */

#define HASH_BASIS UINT64_C(14695981039346656037) /* FNV-1a, 64 bits */
static inline uint64_t cot_hash(uint64_t hash, const void *data, size_t length)
{
    for (const uint8_t *at = data, *end = at + length; at < end; at++)
        hash = (hash ^ *at) * UINT64_C(1099511628211);
    return hash;
}

/* ---- work.c ---- */
struct work {
    uint32_t work_class, sms; /* the same values as in struct cotenant_floor_reply */
    uint32_t duration_ns;     /* 0: not known */
};
extern HIDDEN bool cot_kernels_known;
/* the kernel that this thread is launching; set only for launches that take the slow path (cot_gate_slow) */
extern HIDDEN __thread const struct kernel_shape *cot_launching __attribute__((tls_model("initial-exec")));
HIDDEN void cot_work_table(int fd, uint32_t count);
HIDDEN struct work cot_work_now(struct work stated);
HIDDEN void cot_work_after_fork(void);

#endif
