/* The parts of the driver's binary interface that the shim and the software GPU need. No CUDA header is needed to build
 * them. */
#ifndef COTENANT_CUDA_ABI_H
#define COTENANT_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
/* an integer or a pointer, as an argument of a driver function: the calling convention passes both in the same way */
typedef uintptr_t word;
typedef unsigned long long CUdeviceptr;
typedef struct cot_opaque_context *CUcontext;
typedef struct cot_opaque_stream *CUstream;
typedef struct cot_opaque_event *CUevent;
typedef struct cot_opaque_function *CUfunction;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
};

enum { CU_STREAM_LEGACY_VALUE = 1, CU_STREAM_PER_THREAD_VALUE = 2 };
#define PER_THREAD ((CUstream)(uintptr_t)CU_STREAM_PER_THREAD_VALUE)
/* Entry points whose names end in _ptsz take a missing stream (0) as the per-thread stream instead of the legacy
 * one. */
#define PTSZ(stream) ((stream) ? (CUstream)(stream) : PER_THREAD)
enum { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_CAPTURE_NONE = 0, CU_CAPTURE_ACTIVE = 1, CU_CAPTURE_INVALIDATED = 2 };
enum { CU_CAPTURE_MODE_GLOBAL = 0, CU_CAPTURE_MODE_THREAD_LOCAL = 1, CU_CAPTURE_MODE_RELAXED = 2 };
enum { CU_LOCATION_DEVICE = 1 };
enum { CU_POOL_RESERVED_CURRENT = 5, CU_POOL_USED_CURRENT = 7 };
enum { CU_GRAPH_MEM_RESERVED_CURRENT = 2 };

struct cu_launch_config {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    CUstream stream;
    void *attributes;
    uint32_t attribute_count;
};

struct cu_ipc_handle { /* an argument of this type is passed by value */
    char bytes[64];
};

struct cu_location {
    int type;
    int id;
};

struct cu_access {
    struct cu_location location;
    int flags;
};

struct cu_allocation_prop {
    int type;
    int handle_types;
    struct cu_location location;
    void *win32;
    uint8_t flags[8];
};

struct cu_pool_prop {
    int type;
    int handle_types;
    struct cu_location location;
    void *win32;
    size_t max_bytes;
    uint8_t reserved[56];
};

struct cu_array_descriptor { /* the second version of CUDA_ARRAY_DESCRIPTOR, in which widths are size_t */
    size_t width;
    size_t height;
    uint32_t format;
    uint32_t channels;
};

struct cu_array_descriptor_v1 {
    uint32_t width;
    uint32_t height;
    uint32_t format;
    uint32_t channels;
};

struct cu_array3d_descriptor {
    size_t width;
    size_t height;
    size_t depth;
    uint32_t format;
    uint32_t channels;
    uint32_t flags;
};

struct cu_array3d_descriptor_v1 {
    uint32_t width;
    uint32_t height;
    uint32_t depth;
    uint32_t format;
    uint32_t channels;
    uint32_t flags;
};

struct cu_uuid {
    uint8_t bytes[16];
};

/* CUDA_MEMCPY2D of the driver API */
struct cu_copy_2d {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    CUdeviceptr from_device;
    word from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    int to_type;
    void *to_host;
    CUdeviceptr to_device;
    word to_array;
    size_t to_pitch;
    size_t width, height;
};

#endif
