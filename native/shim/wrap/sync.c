/* Wrappers of calls that synchronise, of captures, and of the destruction of streams. They only keep the shim's
 * records up to date. */
#include "shim.h"

#define HOST_WAITS(name)                                    \
    DECLARE_REAL(name);                                     \
    EXPORT CUresult name(word what)                         \
    {                                                       \
        cot_sync_begin();                                   \
        CUresult result = ((CUresult(*)(word))REAL_POINTER(name))(what); \
        if (UNLIKELY(cot_holding))                          \
            cot_holders_settle();                           \
        cot_pools_refresh();                                \
        return result;                                      \
    }
HOST_WAITS(cuStreamSynchronize)
HOST_WAITS(cuStreamSynchronize_ptsz)
HOST_WAITS(cuEventSynchronize)
HOST_WAITS(cuCtxSynchronize_v2)

/* Functions by which programs poll for the end of work instead of waiting for it. */
#define HOST_ASKS(name)                                     \
    DECLARE_REAL(name);                                     \
    EXPORT CUresult name(word what)                         \
    {                                                       \
        cot_sync_begin();                                   \
        return ((CUresult(*)(word))REAL_POINTER(name))(what);       \
    }
HOST_ASKS(cuStreamQuery)
HOST_ASKS(cuStreamQuery_ptsz)
HOST_ASKS(cuEventQuery)

EXPORT CUresult cuCtxSynchronize(void)
{
    cot_sync_begin();
    CUresult result = REAL(cuCtxSynchronize)();
    if (UNLIKELY(cot_holding))
        cot_holders_settle();
    cot_pools_refresh();
    return result;
}

#define BEGIN_CAPTURE_1(name, effective)                                                     \
    DECLARE_REAL(name);                                                                      \
    EXPORT CUresult name(CUstream stream)                                                    \
    {                                                                                        \
        cot_capture_before_begin();                                                          \
        CUresult result = ((CUresult(*)(CUstream))REAL_POINTER(name))(stream);                       \
        cot_capture_after_begin(effective, result);                                          \
        return result;                                                                       \
    }
#define BEGIN_CAPTURE_2(name, effective)                                                     \
    DECLARE_REAL(name);                                                                      \
    EXPORT CUresult name(CUstream stream, word mode)                                         \
    {                                                                                        \
        cot_capture_before_begin();                                                          \
        CUresult result = ((CUresult(*)(CUstream, word))REAL_POINTER(name))(stream, mode);           \
        cot_capture_after_begin(effective, result);                                          \
        return result;                                                                       \
    }
#define BEGIN_CAPTURE_6(name, effective)                                                                   \
    DECLARE_REAL(name);                                                                                    \
    EXPORT CUresult name(CUstream stream, word graph, word dependencies, word data, word count, word mode) \
    {                                                                                                      \
        cot_capture_before_begin();                                                                        \
        CUresult result = ((CUresult(*)(CUstream, word, word, word, word, word))REAL_POINTER(name))(               \
            stream, graph, dependencies, data, count, mode);                                               \
        cot_capture_after_begin(effective, result);                                                        \
        return result;                                                                                     \
    }
#define BEGIN_CAPTURE_5(name, effective)                                                                   \
    DECLARE_REAL(name);                                                                                    \
    EXPORT CUresult name(CUstream stream, word mode, word graph, word callback, word data)                 \
    {                                                                                                      \
        cot_capture_before_begin();                                                                        \
        CUresult result = ((CUresult(*)(CUstream, word, word, word, word))REAL_POINTER(name))(stream, mode, graph, \
                                                                                     callback, data);      \
        cot_capture_after_begin(effective, result);                                                        \
        return result;                                                                                     \
    }
BEGIN_CAPTURE_5(cuStreamBeginRecaptureToGraph, stream)
BEGIN_CAPTURE_5(cuStreamBeginRecaptureToGraph_ptsz, PTSZ(stream))
BEGIN_CAPTURE_2(cuStreamBeginCaptureToCig, stream)
BEGIN_CAPTURE_1(cuStreamBeginCapture, stream)
BEGIN_CAPTURE_1(cuStreamBeginCapture_ptsz, PTSZ(stream))
BEGIN_CAPTURE_2(cuStreamBeginCapture_v2, stream)
BEGIN_CAPTURE_2(cuStreamBeginCapture_v2_ptsz, PTSZ(stream))
BEGIN_CAPTURE_6(cuStreamBeginCaptureToGraph, stream)
BEGIN_CAPTURE_6(cuStreamBeginCaptureToGraph_ptsz, PTSZ(stream))

#define END_CAPTURE(name, effective)                                                \
    DECLARE_REAL(name);                                                             \
    EXPORT CUresult name(CUstream stream, word graph)                               \
    {                                                                               \
        CUresult result = ((CUresult(*)(CUstream, word))REAL_POINTER(name))(stream, graph); \
        cot_capture_after_end(effective);                                           \
        return result;                                                              \
    }
END_CAPTURE(cuStreamEndCapture, stream)
END_CAPTURE(cuStreamEndCapture_ptsz, PTSZ(stream))

EXPORT CUresult cuStreamEndCaptureToCig(CUstream stream)
{
    CUresult result = REAL(cuStreamEndCaptureToCig)(stream);
    cot_capture_after_end(stream);
    return result;
}

/* A stream that waits for an event of a capture becomes part of that capture. The lock keeps this from happening
 * while the helper thread queries streams. */
#define WAIT_EVENT(name)                                                                                   \
    DECLARE_REAL(name);                                                                                    \
    EXPORT CUresult name(CUstream stream, CUevent event, unsigned flags)                                   \
    {                                                                                                      \
        bool locked = atomic_load(&cot_captures) > 0;                                                      \
        if (locked)                                                                                        \
            pthread_mutex_lock(&cot_capture_lock);                                                         \
        CUresult result = ((CUresult(*)(CUstream, CUevent, unsigned))REAL_POINTER(name))(stream, event, flags);    \
        if (locked)                                                                                        \
            pthread_mutex_unlock(&cot_capture_lock);                                                       \
        return result;                                                                                     \
    }
WAIT_EVENT(cuStreamWaitEvent)
WAIT_EVENT(cuStreamWaitEvent_ptsz)

#define STREAM_DESTROY(name)                              \
    DECLARE_REAL(name);                                   \
    EXPORT CUresult name(CUstream stream)                 \
    {                                                     \
        if (stream)                                       \
            cot_stream_gone(stream);                      \
        return ((CUresult(*)(CUstream))REAL_POINTER(name))(stream); \
    }
STREAM_DESTROY(cuStreamDestroy)
STREAM_DESTROY(cuStreamDestroy_v2)
