/* The interface of the counters of calls per thread, and of the list of streams into which the process has launched. */
#ifndef COTENANT_INFLIGHT_ROOM_H
#define COTENANT_INFLIGHT_ROOM_H

#include "shim.h"

/* ---- calls.c ---- */
/* returns the thread's counters on a GPU, which are created at the first call; NULL: memory is exhausted */
HIDDEN struct calls *cot_calls_of(struct thread *t, struct gpu *gpu);
HIDDEN struct call_counts cot_calls_sum(const struct gpu *gpu);
/* lets this thread launch on the hot path (the inline part of a launch) until cot_calls_close is called */
HIDDEN void cot_calls_open(struct calls *calls);
HIDDEN void cot_calls_close(struct gpu *gpu);          /* makes all threads leave the hot path on this GPU */
/* the next launches into this stream take the slow path (cot_gate_slow); COT_NO_STREAM: into any stream */
HIDDEN void cot_calls_forget_stream(CUstream handle);
HIDDEN void cot_calls_retire(struct thread *t);
HIDDEN void cot_calls_reset_after_fork(void);

/* ---- streams.c ---- */
extern HIDDEN _Atomic uint32_t cot_captures;       /* number of streams that are being captured */
/* held while the shim uses streams or events, and while a capture begins or ends */
extern HIDDEN pthread_mutex_t cot_capture_lock;
HIDDEN struct stream *cot_stream_find(CUstream handle, CUcontext context, struct gpu *gpu);
HIDDEN void cot_stream_gone(CUstream handle);
HIDDEN void cot_streams_context_gone(CUcontext context);
HIDDEN bool cot_stream_is_capturing(CUstream handle);
HIDDEN bool cot_streams_drained(struct gpu *gpu);
/* sets which calls of this thread would invalidate a capture of another thread, and returns the previous setting */
HIDDEN void cot_exchange_capture_mode(int *mode);
HIDDEN void cot_capture_before_begin(void);
HIDDEN void cot_capture_after_begin(CUstream handle, CUresult result);
HIDDEN void cot_capture_after_end(CUstream handle);
HIDDEN void cot_streams_reset_after_fork(void);
extern HIDDEN struct stream cot_no_stream;

#endif
