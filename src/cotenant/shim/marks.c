/* The mark at the end of an interval: put into the stream, and asked for later.
 *
 * An event with a time is needed at both ends of an interval from which something is learned; elsewhere one without
 * does.  A word in host memory that the GPU writes can be read without the driver, but is written by a call of its own
 * and needs pinned memory; it is here to be compared with (slot.fencing). */
#include <string.h>

#include "shim.h"

#define HOST_PORTABLE_AND_MAPPED 3

DECLARE_REAL(cuEventCreate);
DECLARE_REAL(cuEventDestroy_v2);
DECLARE_REAL(cuEventRecord);
DECLARE_REAL(cuEventQuery);
DECLARE_REAL(cuMemHostAlloc);
DECLARE_REAL(cuMemHostGetDevicePointer_v2);
DECLARE_REAL(cuMemFreeHost);
DECLARE_REAL(cuStreamWriteValue32_v2);

static bool have_word(struct ring *ring)
{
    if (ring->word)
        return true;
    void *host = NULL;
    if (((CUresult(*)(void **, size_t, unsigned))REAL(cuMemHostAlloc))(&host, sizeof *ring->word,
                                                                      HOST_PORTABLE_AND_MAPPED) != CUDA_SUCCESS)
        return false;
    if (((CUresult(*)(CUdeviceptr *, void *, unsigned))REAL(cuMemHostGetDevicePointer_v2))(&ring->word_device, host, 0) !=
        CUDA_SUCCESS) {
        ((CUresult(*)(void *))REAL(cuMemFreeHost))(host);
        return false;
    }
    ring->word = host;
    *ring->word = ring->word_given = 0;
    return true;
}

/* The caller has set fence->mark and holds cot_capture_lock; nothing captures. */
bool cot_mark_record(struct ring *ring, struct fence *fence, CUstream stream)
{
    if (fence->mark == MARK_WORD && have_word(ring)) {
        fence->word = ring->word_given + 1;
        if (((CUresult(*)(CUstream, CUdeviceptr, uint32_t, unsigned))REAL(cuStreamWriteValue32_v2))(
                stream, ring->word_device, fence->word, 0) != CUDA_SUCCESS)
            return false;
        ring->word_given = fence->word;
        return true;
    }
    if (fence->mark == MARK_WORD)
        fence->mark = MARK_PLAIN;
    CUevent *event = &fence->event[fence->mark];
    unsigned flags = fence->mark == MARK_TIMED ? 0 : CU_EVENT_DISABLE_TIMING;
    if (!*event && ((CUresult(*)(CUevent *, unsigned))REAL(cuEventCreate))(event, flags) != CUDA_SUCCESS)
        return false;
    return ((CUresult(*)(CUevent, CUstream))REAL(cuEventRecord))(*event, stream) == CUDA_SUCCESS;
}

CUresult cot_mark_query(const struct ring *ring, const struct fence *fence)
{
    if (fence->mark == MARK_WORD)
        return (int32_t)(*ring->word - fence->word) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    return ((CUresult(*)(CUevent))REAL(cuEventQuery))(fence->event[fence->mark]);
}

/* destroy: the context lives; otherwise it has taken, or will take, everything with it. */
void cot_marks_forget(struct ring *ring, bool destroy)
{
    for (uint32_t i = 0; i < FENCES; i++)
        for (uint32_t mark = 0; mark < MARK_WORD; mark++) {
            if (ring->fences[i].event[mark] && destroy)
                ((CUresult(*)(CUevent))REAL(cuEventDestroy_v2))(ring->fences[i].event[mark]);
            ring->fences[i].event[mark] = NULL;
        }
    if (ring->word && destroy && atomic_load(&cot_captures) == 0) /* it would break a capture: rather leave a word behind */
        ((CUresult(*)(void *))REAL(cuMemFreeHost))((void *)ring->word);
    ring->word = NULL;
}
