/* Wrappers of memsets, prefetches and of those copies that are never scheduled on the link. All their arguments are
 * integers or pointers, so one macro for each number of arguments suffices; the tables below say which arguments are
 * the stream and the size. Copies that may be scheduled on the link are in wrap/copies.c and wrap/batches.c. */
#include "copies/host_copy.h"

#define P(n) word a##n
#define PLAIN_WORD(stream) ((CUstream)(stream))

#define P1 P(1)
#define P2 P1, P(2)
#define P3 P2, P(3)
#define P4 P3, P(4)
#define P5 P4, P(5)
#define P6 P5, P(6)
#define P7 P6, P(7)
#define P8 P7, P(8)
#define P9 P8, P(9)
#define A1 a1
#define A2 A1, a2
#define A3 A2, a3
#define A4 A3, a4
#define A5 A4, a5
#define A6 A5, a6
#define A7 A6, a7
#define A8 A7, a8
#define A9 A8, a9
#define T1 word
#define T2 T1, word
#define T3 T2, word
#define T4 T3, word
#define T5 T4, word
#define T6 T5, word
#define T7 T6, word
#define T8 T7, word
#define T9 T8, word

#define GATED(name, n, stream, bytes)                                                       \
    DECLARE_REAL(name);                                                                     \
    EXPORT CUresult name(P##n)                                                              \
    {                                                                                       \
        struct calls *call = cot_gate_enter(cot_copy_key((void *)name, bytes), stream);     \
        CUresult result = ((CUresult(*)(T##n))REAL_POINTER(name))(A##n);                            \
        cot_gate_exit(call);                                                                \
        cot_count_copy(call);                                                               \
        return result;                                                                      \
    }
#define SYNC(name, n, bytes) GATED(name, n, NULL, bytes)
#define SYNC_PTDS(name, n, bytes) GATED(name, n, PER_THREAD, bytes)
#define ASYNC(name, n, s, bytes) GATED(name, n, PLAIN_WORD(a##s), bytes)
#define ASYNC_PTSZ(name, n, s, bytes) GATED(name, n, PTSZ(a##s), bytes)

/* Each of the macros below defines the two or three variants of one driver function. */
#define SYNC_ALL(name, n, bytes) SYNC(name, n, bytes) SYNC(name##_v2, n, bytes) SYNC_PTDS(name##_v2_ptds, n, bytes)
#define SYNC_BOTH(name, n, bytes) SYNC(name, n, bytes) SYNC_PTDS(name##_ptds, n, bytes)
#define ASYNC_BOTH(name, n, s, bytes) ASYNC(name, n, s, bytes) ASYNC_PTSZ(name##_ptsz, n, s, bytes)
#define ASYNC_ALL(name, n, s, bytes) \
    ASYNC(name, n, s, bytes) ASYNC(name##_v2, n, s, bytes) ASYNC_PTSZ(name##_v2_ptsz, n, s, bytes)

SYNC_BOTH(cuMemcpyPeer, 5, a5)
SYNC(cuMemcpyHtoD, 3, a3)
SYNC(cuMemcpyDtoH, 3, a3)
SYNC(cuMemcpyDtoD, 3, a3)
SYNC_ALL(cuMemcpyDtoA, 4, a4)
SYNC_ALL(cuMemcpyAtoD, 4, a4)
SYNC(cuMemcpyHtoA, 4, a4)
SYNC(cuMemcpyAtoH, 4, a4)
SYNC_ALL(cuMemcpyAtoA, 5, a5)
SYNC(cuMemcpy2D, 1, 0)
SYNC(cuMemcpy2DUnaligned, 1, 0)
SYNC(cuMemcpy3D, 1, 0)
SYNC_BOTH(cuMemcpy3DPeer, 1, 0)

ASYNC_BOTH(cuMemcpyPeerAsync, 6, 6, a5)
ASYNC(cuMemcpyHtoDAsync, 4, 4, a3)
ASYNC(cuMemcpyDtoHAsync, 4, 4, a3)
ASYNC(cuMemcpyDtoDAsync, 4, 4, a3)
ASYNC(cuMemcpyHtoAAsync, 5, 5, a4)
ASYNC(cuMemcpyAtoHAsync, 5, 5, a4)
ASYNC(cuMemcpy2DAsync, 2, 2, 0)
ASYNC(cuMemcpy3DAsync, 2, 2, 0)
ASYNC_BOTH(cuMemcpy3DPeerAsync, 2, 2, 0)
ASYNC_BOTH(cuMemcpy3DBatchAsync, 5, 5, a1)
ASYNC_BOTH(cuMemcpy3DBatchAsync_v2, 4, 4, a1)
ASYNC_BOTH(cuMemcpy3DWithAttributesAsync, 3, 3, 0)
ASYNC_BOTH(cuMemBatchDecompressAsync, 5, 5, a2)

SYNC_ALL(cuMemsetD8, 3, a3)
SYNC_ALL(cuMemsetD16, 3, a3 * 2)
SYNC_ALL(cuMemsetD32, 3, a3 * 4)
SYNC_ALL(cuMemsetD2D8, 5, a4 *a5)
SYNC_ALL(cuMemsetD2D16, 5, a4 *a5 * 2)
SYNC_ALL(cuMemsetD2D32, 5, a4 *a5 * 4)
ASYNC_BOTH(cuMemsetD8Async, 4, 4, a3)
ASYNC_BOTH(cuMemsetD16Async, 4, 4, a3 * 2)
ASYNC_BOTH(cuMemsetD32Async, 4, 4, a3 * 4)
ASYNC_BOTH(cuMemsetD2D8Async, 6, 6, a4 *a5)
ASYNC_BOTH(cuMemsetD2D16Async, 6, 6, a4 *a5 * 2)
ASYNC_BOTH(cuMemsetD2D32Async, 6, 6, a4 *a5 * 4)

ASYNC_BOTH(cuMemPrefetchAsync, 4, 4, a2)
ASYNC_BOTH(cuMemPrefetchAsync_v2, 5, 5, a2)
ASYNC_BOTH(cuMemPrefetchBatchAsync, 8, 8, a3)
ASYNC_BOTH(cuMemDiscardBatchAsync, 5, 5, a3)
ASYNC_BOTH(cuMemDiscardAndPrefetchBatchAsync, 8, 8, a3)
