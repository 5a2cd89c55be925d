/* Copies between pieces of device memory and their places in host memory, where evicted contents are kept.
 *
 * A separate thread registers (pins) the host memory with the driver in advance, beginning at the start of the
 * memory. Copies to registered memory are direct and keep one copy engine busy. Copies to memory that is not
 * registered, or not yet, use a small ring of pinned buffers. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi/copy_page.h"
#include "copies/host_copy.h"
#include "swap/swap.h"

#define STAGES 4
#define STAGE_BYTES (UINT64_C(16) << 20)
#define POPULATORS 4
#define REPORT_BYTES (UINT64_C(4) << 30)
/* the pinning thread leaves this much memory to the system and to other programs */
#define LEAST_LEFT (UINT64_C(512) << 20)
#define CU_STREAM_NON_BLOCKING 1
#define CU_HOST_REGISTER_PORTABLE 1
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define COLLAPSE_STEP (UINT64_C(32) << 20)
/* If one step takes longer, the kernel must compact memory to make huge pages, so small pages are used. */
#define COLLAPSE_SLOWEST_NS UINT64_C(500000000)

struct lane {
    struct gpu *gpu;
    CUcontext context;
    CUstream stream;
    CUevent events[SWAP_TICKETS];
    uint8_t *stage[STAGES];
    CUevent stage_done[STAGES];
    bool out;
};

static struct lane lanes[2];
static _Atomic uint64_t pinned_bytes, missing_bytes;


uint64_t cot_swap_pinned_bytes(void)
{
    return atomic_load(&pinned_bytes);
}

uint64_t cot_swap_usable_bytes(void)
{
    uint64_t bytes;
    return cot_swap_backing(&bytes) ? bytes - atomic_load(&missing_bytes) : 0;
}

static CUresult make_lane(struct lane *lane, CUcontext context)
{
    lane->context = context;
    memset(lane->stage, 0, sizeof lane->stage);
    CUresult result = REAL(cuStreamCreate)(&lane->stream, CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < SWAP_TICKETS && result == CUDA_SUCCESS; i++)
        result = REAL(cuEventCreate)(&lane->events[i],
                                                                        CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    return result;
}

/* Makes the GPU's context current on the calling thread, in a capture mode that does not affect the program's captures,
 * and returns the stream for copies in one direction. */
struct lane *cot_swap_lane(struct gpu *gpu, bool out)
{
    static __thread bool relaxed;
    CUcontext current = NULL, context = gpu->any_context;
    if (!relaxed) {
        int mode = CU_CAPTURE_MODE_RELAXED;
        cot_exchange_capture_mode(&mode);
        relaxed = true;
    }
    REAL(cuCtxGetCurrent)(&current);
    if (!context || (current != context && REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS))
        return NULL;
    struct lane *lane = &lanes[out];
    lane->gpu = gpu;
    lane->out = out;
    if (lane->context != context && make_lane(lane, context) != CUDA_SUCCESS) {
        lane->context = NULL;
        return NULL;
    }
    return lane;
}

struct stretch { /* source and destination of a copy that moves contents out (to the host) or in */
    CUdeviceptr device;
    uint8_t *host;
    bool out;
};

static CUresult issue_stretch(const struct host_copy *copy, uint64_t from, uint64_t bytes, CUstream stream, bool asynchronous)
{
    (void)asynchronous;
    const struct stretch *call = copy->call;
    CUdeviceptr device = call->device + from;
    uint8_t *host = call->host + from;
    return call->out ? REAL(cuMemcpyDtoHAsync_v2)(host, device, bytes, stream)
                     : REAL(cuMemcpyHtoDAsync_v2)(device, host, bytes,
                                                                                                             stream);
}

/* Enqueues a copy. It is scheduled on the link if the tenants' copies are scheduled. */
static CUresult copy_now(struct lane *lane, CUdeviceptr device, uint8_t *host, uint64_t bytes)
{
    struct stretch call = {device, host, lane->out};
    struct host_copy copy = {
        .direction = lane->out ? COTENANT_COPY_TO_HOST : COTENANT_COPY_TO_DEVICE,
        .bytes = bytes,
        .unit = 1,
        .host = host,
        .issue = issue_stretch,
        .call = &call,
        .stream = lane->stream,
    };
    return cot_copy_of_shim(lane->gpu, &copy);
}

static CUresult record(struct lane *lane, CUevent event)
{
    return REAL(cuEventRecord)(event, lane->stream);
}

static CUresult wait_event(CUevent event)
{
    return REAL(cuEventSynchronize)(event);
}

static CUresult make_stages(struct lane *lane)
{
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < STAGES && result == CUDA_SUCCESS && !lane->stage[i]; i++) {
        result = REAL(cuEventCreate)(&lane->stage_done[i],
                                                                        CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
        if (result == CUDA_SUCCESS)
            result = REAL(cuMemHostAlloc)((void **)&lane->stage[i], STAGE_BYTES, 0);
    }
    return result;
}

/* Copies through the ring of buffers: while the copy engine fills (or empties) one buffer, this thread empties (or
 * fills) another one. */
static CUresult copy_staged(struct lane *lane, CUdeviceptr device, uint8_t *host, uint64_t bytes)
{
    CUresult result = make_stages(lane);
    uint64_t count = (bytes + STAGE_BYTES - 1) / STAGE_BYTES;
    for (uint64_t i = 0; i < count + STAGES && result == CUDA_SUCCESS; i++) {
        uint32_t slot = (uint32_t)(i % STAGES);
        if (i >= STAGES) { /* copies i and i - STAGES use the same buffer: the earlier one must have ended */
            uint64_t at = (i - STAGES) * STAGE_BYTES, length = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
            result = wait_event(lane->stage_done[slot]);
            if (result == CUDA_SUCCESS && lane->out)
                memcpy(host + at, lane->stage[slot], length);
        }
        if (i < count && result == CUDA_SUCCESS) {
            uint64_t at = i * STAGE_BYTES, length = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
            if (!lane->out)
                memcpy(lane->stage[slot], host + at, length);
            result = copy_now(lane, device + at, lane->stage[slot], length);
            if (result == CUDA_SUCCESS)
                result = record(lane, lane->stage_done[slot]);
        }
    }
    return result;
}

/* Starts to copy a piece; cot_swap_copied waits for its end. A single copy never crosses the end of a registered
 * span, because the driver treats each span separately. */
CUresult cot_swap_copy(struct lane *lane, CUdeviceptr device, uint64_t backing, uint64_t bytes, uint32_t ticket)
{
    uint64_t backing_bytes, pinned = atomic_load(&pinned_bytes);
    uint8_t *host = cot_swap_backing(&backing_bytes);
    CUresult result = CUDA_SUCCESS;
    for (uint64_t done = 0; done < bytes && result == CUDA_SUCCESS;) {
        uint64_t at = backing + done, length = SWAP_PIN_STEP - at % SWAP_PIN_STEP;
        if (length > bytes - done)
            length = bytes - done;
        result = at + length <= pinned ? copy_now(lane, device + done, host + at, length)
                                       : copy_staged(lane, device + done, host + at, length);
        done += length;
    }
    return result == CUDA_SUCCESS ? record(lane, lane->events[ticket]) : result;
}

CUresult cot_swap_copied(struct lane *lane, uint32_t ticket)
{
    return wait_event(lane->events[ticket]);
}

/* Starts to move the pages of managed memory. `where` is the number of the destination GPU, or -1 for host memory. */
CUresult cot_swap_prefetch(struct lane *lane, CUdeviceptr device, uint64_t bytes, int where, uint32_t ticket)
{
    CUresult result = REAL(cuMemPrefetchAsync)(device, bytes, where,
                                                                                                 lane->stream);
    return result == CUDA_SUCCESS ? record(lane, lane->events[ticket]) : result;
}

/* ---- pinning in advance ---- */

struct span {
    uint8_t *begin;
    uint64_t bytes;
    int failed;
};

/* The functions below allocate the pages of a span with several threads, because pinning spends most of its time on
 * clearing the pages. */
/* Asks the kernel for huge pages, which shared memory does not get by default. */
static void collapse(const struct span *span)
{
    static _Atomic bool useless;
    for (uint64_t at = 0; at < span->bytes && !atomic_load_explicit(&useless, memory_order_relaxed); at += COLLAPSE_STEP) {
        uint64_t began = cot_now_ns(), length = span->bytes - at < COLLAPSE_STEP ? span->bytes - at : COLLAPSE_STEP;
        int failed = madvise(span->begin + at, length, MADV_COLLAPSE) != 0 ? errno : 0;
        if ((failed && failed != EAGAIN) || cot_now_ns() - began > COLLAPSE_SLOWEST_NS)
            /* the kernel does not give huge pages: it is too old, a setting forbids them, or memory is fragmented */
            atomic_store(&useless, true);
    }
}

static void *populate(void *argument)
{
    struct span *span = argument;
    collapse(span);
    while (madvise(span->begin, span->bytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN)
            continue;
        if (errno != EINVAL) { /* an old kernel returns EINVAL; it allocates pages when they are touched */
            span->failed = errno;
            break;
        }
        for (uint64_t at = 0; at < span->bytes; at += 4096)
            /* the page is touched without changing it, since another process may already have stored contents in the
             * page */
            __atomic_fetch_or(span->begin + at, 0, __ATOMIC_RELAXED);
        break;
    }
    return NULL;
}

static bool populate_span(uint8_t *begin, uint64_t bytes)
{
    struct span spans[POPULATORS];
    pthread_t threads[POPULATORS];
    bool started[POPULATORS], good = true;
    uint64_t part = (bytes / POPULATORS + SWAP_GRANULE - 1) & ~(SWAP_GRANULE - 1);
    for (uint64_t i = 0, at = 0; i < POPULATORS; i++, at += part) {
        uint64_t length = at >= bytes ? 0 : bytes - at < part ? bytes - at : part;
        spans[i] = (struct span){begin + at, length, 0};
        started[i] = length > 0 && pthread_create(&threads[i], NULL, populate, &spans[i]) == 0;
        if (length > 0 && !started[i])
            populate(&spans[i]);
    }
    for (uint32_t i = 0; i < POPULATORS; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        good = good && spans[i].failed == 0;
    }
    return good;
}

static void report_all(void)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->attached)
            cot_swap_report_state(cot_gpu_at(i));
}

/* Returns whether the system has enough free memory to give up this many bytes. */
static bool can_be_spared(uint64_t bytes)
{
    char line[128];
    uint64_t kilobytes = UINT64_MAX >> 10;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %" SCNu64, &kilobytes) == 1)
            break;
    if (file)
        fclose(file);
    return kilobytes << 10 > bytes + LEAST_LEFT;
}

/* Registers all of the host memory with the driver, span by span. Copies use what is registered so far. */
void *cot_swap_pinner(void *context)
{
    int mode = CU_CAPTURE_MODE_RELAXED;
    uint64_t bytes, at = 0;
    uint8_t *host = cot_swap_backing(&bytes);
    pthread_setname_np(pthread_self(), "cotenant-pin");
    cot_exchange_capture_mode(&mode);
    bool good = REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS, registered = good;
    while (at < bytes && good && !cot_exiting()) {
        uint64_t length = bytes - at < SWAP_PIN_STEP ? bytes - at : SWAP_PIN_STEP;
        good = can_be_spared(length) && populate_span(host + at, length);
        registered = registered && good &&
                     REAL(cuMemHostRegister_v2)(host + at, length, CU_HOST_REGISTER_PORTABLE) == CUDA_SUCCESS;
        at += good ? length : 0;
        if (registered)
            atomic_store(&pinned_bytes, at);
        if (at % REPORT_BYTES == 0)
            report_all();
    }
    if (!good)
        atomic_store(&missing_bytes, bytes - at);
    if (!good && !cot_exiting())
        cot_agent_warn(COTENANT_WARN_NOT_MOVABLE, "the system has only %.1f of %.1f GiB of host memory for swapping",
                       (double)at / (1 << 30), (double)bytes / (1 << 30));
    else if (!registered && !cot_exiting())
        cot_say("only %.1f of %.1f GiB of host memory could be pinned: copies to and from the rest are slower",
                (double)cot_swap_pinned_bytes() / (1 << 30), (double)bytes / (1 << 30));
    report_all();
    return NULL;
}

void cot_swap_copy_reset(void)
{
    memset(lanes, 0, sizeof lanes);
    atomic_store(&pinned_bytes, 0);
    atomic_store(&missing_bytes, 0);
}
