/* Interface of per-thread call counters, and of the streams into which the process has launched. */
#ifndef COTENANT_INFLIGHT_ROOM_H
#define COTENANT_INFLIGHT_ROOM_H

#include "shim.h"

/* ---- calls.c ---- */
HIDDEN struct calls *cot_calls_of(struct thread *t, struct gpu *gpu); /* registered; NULL: memory exhausted */
HIDDEN struct call_counts cot_calls_sum(const struct gpu *gpu);
HIDDEN void cot_calls_open(struct calls *calls);       /* the calling thread's record: its launches then follow its GPU's gate */
HIDDEN void cot_calls_close(struct gpu *gpu);          /* no thread takes the hot path any more */
HIDDEN void cot_calls_forget_stream(CUstream handle);  /* COT_NO_STREAM: any */
HIDDEN void cot_calls_retire(struct thread *t);
HIDDEN void cot_calls_reset_after_fork(void);

/* ---- streams.c ---- */
extern HIDDEN _Atomic uint32_t cot_captures;       /* number of streams that capture now */
extern HIDDEN pthread_mutex_t cot_capture_lock;    /* held while the shim itself touches streams or events */
HIDDEN struct stream *cot_stream_find(CUstream handle, CUcontext context, struct gpu *gpu);
HIDDEN void cot_stream_gone(CUstream handle);
HIDDEN void cot_streams_context_gone(CUcontext context);
HIDDEN bool cot_stream_is_capturing(CUstream handle);
HIDDEN bool cot_streams_drained(struct gpu *gpu);
HIDDEN void cot_exchange_capture_mode(int *mode); /* of this thread: which of its calls would invalidate a capture */
HIDDEN void cot_capture_before_begin(void);
HIDDEN void cot_capture_after_begin(CUstream handle, CUresult result);
HIDDEN void cot_capture_after_end(CUstream handle);
HIDDEN void cot_streams_reset_after_fork(void);
extern HIDDEN struct stream cot_no_stream;

#endif
