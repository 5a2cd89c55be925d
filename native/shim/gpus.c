/* The GPUs of this process: attaches each to its slot on the page that the agent shares with the process, counts
 * contexts, and publishes counters on that page. */
#define _GNU_SOURCE
#include <string.h>

#include "shim.h"
#include "swap/swap.h"

#define PUBLISH_NS 200000000
#define SM_COUNT_ATTRIBUTE 16

static struct gpu gpus[COTENANT_MAX_GPUS];
static _Atomic uint32_t gpu_count;
static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;


struct gpu *cot_gpu_at(uint32_t index)
{
    return &gpus[index];
}

uint32_t cot_gpu_count(void)
{
    return atomic_load(&gpu_count);
}

static int attach(struct gpu *gpu)
{
    struct cotenant_gpu_attach attach = {.ordinal = (uint32_t)gpu->device};
    /* after a relocation to another GPU, the agent has already written the UUID to the slot */
    CUresult result = CUDA_SUCCESS;
    if (!gpu->relocations)
        result = REAL(cuDeviceGetUuid_v2)(&gpu->uuid, gpu->device);
    if (result != CUDA_SUCCESS)
        result = REAL(cuDeviceGetUuid)(&gpu->uuid, gpu->device);
    if (result != CUDA_SUCCESS)
        return -1;
    size_t total = 0;
    int sms = 0;
    REAL(cuDeviceTotalMem_v2)(&total, gpu->device);
    REAL(cuDeviceGetAttribute)(&sms, SM_COUNT_ATTRIBUTE, gpu->device);
    REAL(cuDeviceGetName)((char *)attach.name, sizeof attach.name - 1, gpu->device);
    memcpy(attach.uuid, gpu->uuid.bytes, sizeof attach.uuid);
    attach.total_bytes = gpu->total_bytes = total;
    attach.sm_count = gpu->sm_count = (uint32_t)sms;
    struct cotenant_message reply;
    if (cot_agent_call(COTENANT_GPU_ATTACH, COTENANT_NO_SLOT, &attach, sizeof attach, &reply) != 0)
        return -1;
    if (reply.header.type != COTENANT_GPU_REPLY || reply.header.status != COTENANT_OK ||
        reply.header.slot >= COTENANT_MAX_GPUS) {
        gpu->denied = true;
        return -1;
    }
    pthread_mutex_lock(&cot_lock);
    gpu->slot = reply.header.slot;
    gpu->page_slot = &cot_agent_page()->slots[gpu->slot];
    /* The agent may have restarted after the contexts were created. The new agent must know of them, since it evicts
     * whole processes only if they have contexts. */
    gpu->page_slot->contexts = gpu->contexts;
    gpu->epoch = EPOCH_CLOSED;
    /* another thread may still use the previous agent's page, so launches must take the slow path, which finds the new
     * page */
    cot_calls_close(gpu);
    gpu->released_epoch = 0;
    if (gpu->attached) {
        /* Work that was launched in a turn of the previous agent, or while no agent ran, may still use the memory. So
         * this agent can neither grant a turn nor move the memory before that work has ended. No turn of this agent
         * ends then, so nothing is reported. */
        gpu->turn_epoch = 0;
        gpu->reported_hung = true;
        cot_gate_begin_close(gpu, COTENANT_RELEASE_REVOKED);
        cot_agent_wake_helper(); /* which ends the turn */
    } else
        gpu->state = GATE_CLOSED;
    gpu->stale = false;
    gpu->attached = true;
    pthread_cond_broadcast(&cot_changed);
    pthread_mutex_unlock(&cot_lock);
    cot_floor_join(gpu);
    cot_holder_join(gpu);
    return 0;
}

/* Called when the agent has changed the page. If the UUID of a GPU has changed, this process was restored on another
 * GPU, so it leaves the LS gate of the previous GPU and joins that of the new one. */
void cot_gpus_follow(void)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++) {
        struct gpu *gpu = &gpus[i];
        if (!gpu->attached || gpu->stale || memcmp(gpu->uuid.bytes, gpu->page_slot->uuid, sizeof gpu->uuid.bytes) == 0)
            continue;
        memcpy(gpu->uuid.bytes, gpu->page_slot->uuid, sizeof gpu->uuid.bytes);
        atomic_fetch_add(&gpu->relocations, 1);
        cot_floor_join(gpu);
        cot_holder_join(gpu);
    }
}

static _Atomic bool joining;

static void *join_again(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&attach_lock);
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (gpus[i].attached && !gpus[i].stale && gpus[i].floor_again_ns) {
            cot_floor_join(&gpus[i]);
            cot_holder_join(&gpus[i]);
            cot_calls_close(&gpus[i]); /* the next launch of each thread takes the slow path, even within an interval */
        }
    pthread_mutex_unlock(&attach_lock);
    joining = false;
    return NULL;
}

/* Retries to join the LS gates. It uses a thread of its own, since the agent's answer may take seconds. */
void cot_gpus_join_again(void)
{
    if (!atomic_exchange(&joining, true) && !cot_start_thread(join_again, NULL))
        joining = false;
}

/* Returns the record of a device, which is created if it does not exist. If want_attached is true: NULL if the agent
 * does not allow this tenant to use the device. */
struct gpu *cot_gpu_of_device(CUdevice device, bool want_attached)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (gpus[i].device == device && (gpus[i].attached || !want_attached))
            return &gpus[i];
    pthread_mutex_lock(&attach_lock);
    struct gpu *gpu = NULL;
    uint32_t count = cot_gpu_count();
    for (uint32_t i = 0; i < count; i++)
        if (gpus[i].device == device)
            gpu = &gpus[i];
    if (!gpu && count < COTENANT_MAX_GPUS) {
        gpu = &gpus[count];
        memset(gpu, 0, sizeof *gpu);
        gpu->device = device;
        gpu->slot = COTENANT_NO_SLOT;
        gpu->epoch = EPOCH_CLOSED;
        atomic_store(&gpu_count, count + 1);
    }
    if (gpu && want_attached && !gpu->attached && (cot_agent_connect() != CUDA_SUCCESS || attach(gpu) != 0))
        gpu = NULL;
    pthread_mutex_unlock(&attach_lock);
    return gpu;
}

/* Returns whether the agent denied this tenant the device; if so, prints a message. The driver itself reports a
 * device that does not exist. */
bool cot_gpu_is_denied(CUdevice device)
{
    struct gpu *gpu = cot_gpu_of_device(device, true);
    if (gpu || !(gpu = cot_gpu_of_device(device, false)) || !gpu->denied)
        return false;
    cot_say("the agent does not allow this tenant to use GPU %d", device);
    return true;
}

/* Asks the agent for the memory of a new context. If the agent refuses, the program gets the error code. */
CUresult cot_gpu_before_context(CUdevice device)
{
    struct gpu *gpu = cot_gpu_of_device(device, true);
    if (!gpu)
        return cot_gpu_is_denied(device) ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_SYSTEM_NOT_READY;
    if (gpu->contexts > 0)
        return CUDA_SUCCESS;
    uint64_t reservation = 0;
    CUresult result = cot_memory_reserve(gpu, COTENANT_MEMORY_CONTEXT, 0, &reservation);
    if (result == CUDA_SUCCESS)
        cot_memory_commit(gpu, COTENANT_MEMORY_CONTEXT, reservation, 0);
    return result;
}

bool cot_gpu_room_for_context(CUdevice device)
{
    struct gpu *gpu = cot_gpu_of_device(device, false);
    return gpu && gpu->attached && cot_swap_room_now(gpu, 0, COTENANT_MOVE_CONTEXT);
}

void cot_gpu_context_made(CUdevice device, CUcontext context)
{
    struct gpu *gpu = cot_gpu_of_device(device, false);
    if (!gpu)
        return;
    pthread_mutex_lock(&cot_lock);
    gpu->contexts++;
    gpu->any_context = context;
    gpu->page_slot->contexts = gpu->contexts;
    pthread_mutex_unlock(&cot_lock);
    cot_agent_wake_helper();
    cot_swap_context_made(gpu);
}

void cot_gpu_context_gone(CUdevice device, CUcontext context)
{
    struct gpu *gpu = cot_gpu_of_device(device, false);
    if (!gpu || !gpu->attached)
        return;
    if (context) {
        cot_streams_context_gone(context);
        cot_swap_forget_context(gpu, context);
        cot_share_forget_context(context);
        cot_floor_context_gone(gpu, context);
        cot_kernels_context_gone(context);
    }
    pthread_mutex_lock(&cot_lock);
    /* `context` is NULL if a context was announced to the agent but could not be created: then no context is
     * subtracted */
    if (context && gpu->contexts > 0)
        gpu->contexts--;
    bool last = gpu->contexts == 0;
    if (gpu->any_context == context)
        gpu->any_context = NULL;
    gpu->page_slot->contexts = gpu->contexts;
    pthread_mutex_unlock(&cot_lock);
    if (last) {
        cot_memory_forget_gpu(gpu);
        cot_memory_release(gpu, COTENANT_MEMORY_CONTEXT, 0);
    }
}

static int memory_of(struct gpu *gpu, uint64_t *limit_bytes, uint64_t *used_bytes, uint64_t *kept_bytes)
{
    if (!cot_memory_view(gpu, limit_bytes, used_bytes)) {
        *limit_bytes = COTENANT_NO_LIMIT;
        *used_bytes = 0;
    }
    *kept_bytes = cot_memory_kept(gpu);
    return *limit_bytes == COTENANT_NO_LIMIT && *kept_bytes == 0 ? -1 : 0;
}

/* Called by the replacement of NVML, which identifies a card by its UUID only. If the tenant has the GPU, returns 0
 * and fills in the tenant's limit, the memory charged to it, and the memory that is reserved for other tenants. */
EXPORT int cotenant_memory_of(const uint8_t uuid[16], uint64_t *limit_bytes, uint64_t *used_bytes, uint64_t *kept_bytes)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (gpus[i].attached && memcmp(gpus[i].uuid.bytes, uuid, sizeof gpus[i].uuid.bytes) == 0)
            return memory_of(&gpus[i], limit_bytes, used_bytes, kept_bytes);
    struct cotenant_gpu_attach attach = {.ordinal = UINT32_MAX};
    struct cotenant_message reply;
    memcpy(attach.uuid, uuid, sizeof attach.uuid);
    if (cot_agent_connect() != CUDA_SUCCESS ||
        cot_agent_call(COTENANT_GPU_ATTACH, COTENANT_NO_SLOT, &attach, sizeof attach, &reply) != 0 ||
        reply.header.status != COTENANT_OK || reply.header.slot >= COTENANT_MAX_GPUS)
        return -1;
    struct gpu named = {.attached = true, .slot = reply.header.slot,
                        .page_slot = &cot_agent_page()->slots[reply.header.slot]};
    return memory_of(&named, limit_bytes, used_bytes, kept_bytes);
}

void cot_gpus_after_reconnect(void)
{
    pthread_mutex_lock(&attach_lock);
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (gpus[i].attached && attach(&gpus[i]) == 0) {
            cot_memory_report_state(&gpus[i]);
            cot_swap_report_state(&gpus[i]);
        }
    pthread_mutex_unlock(&attach_lock);
    cot_memory_report_host(); /* the last report, by which the agent knows that it has all of them */
}

void cot_gpu_publish(struct gpu *gpu, uint64_t now)
{
    struct cotenant_slot *slot = gpu->page_slot;
    if (gpu->state == GATE_OPEN && now - gpu->published_ns < PUBLISH_NS)
        return;
    gpu->published_ns = now;
    struct call_counts counts = cot_calls_sum(gpu);
    slot->calls_in_flight = counts.started > counts.finished ? counts.started - counts.finished : 0;
    slot->launches = counts.started > counts.copies ? counts.started - counts.copies : 0;
    slot->copies = counts.copies;
    slot->graph_launches = counts.graph_launches;
    slot->fences = atomic_load(&gpu->fences);
    slot->predicted_busy_ns = atomic_load(&gpu->predicted_busy_ns);
    slot->waited_ns = atomic_load(&gpu->waited_ns);
    slot->turns = gpu->turns;
    slot->last_submit_ns = gpu->activity_ns;
}

uint64_t cot_total_launches(void)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        total += cot_calls_sum(&gpus[i]).started;
    return total;
}

uint32_t cot_total_contexts(void)
{
    uint32_t total = 0;
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        total += gpus[i].contexts;
    return total;
}

void cot_gate_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&attach_lock, &fresh, sizeof fresh);
    cot_thread_context_changed();
    for (uint32_t i = 0; i < cot_gpu_count(); i++) {
        cot_floor_after_fork(&gpus[i]);
        cot_holder_after_fork(&gpus[i]);
    }
    cot_work_after_fork();
    joining = false;
    atomic_store(&gpu_count, 0);
    memset(gpus, 0, sizeof gpus);
    cot_calls_reset_after_fork();
}
