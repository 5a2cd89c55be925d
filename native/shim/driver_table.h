/* A table of the driver functions that the shim itself calls, with their types: REAL(cuCtxGetDevice)(&device) calls
 * the driver. A wrapper that passes its own arguments on unchanged uses the pointer without a type, REAL_POINTER. */
#ifndef COTENANT_DRIVER_TABLE_H
#define COTENANT_DRIVER_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

/* exports.S defines one pointer for each driver function, and cot_open_driver sets them. */
#define REAL(name) real_##name
#define REAL_FUNCTION(name, ...) \
    extern __attribute__((visibility("hidden"))) CUresult (*real_##name)(__VA_ARGS__) __asm__("cot_real_" #name)
#define REAL_POINTER(name) cot_real_##name
#define DECLARE_REAL(name) extern __attribute__((visibility("hidden"))) void *cot_real_##name

REAL_FUNCTION(cuCtxGetCurrent, CUcontext *);
REAL_FUNCTION(cuCtxGetDevice, CUdevice *);
REAL_FUNCTION(cuCtxPopCurrent_v2, CUcontext *);
REAL_FUNCTION(cuCtxPushCurrent_v2, CUcontext);
REAL_FUNCTION(cuCtxSetCurrent, CUcontext);
REAL_FUNCTION(cuCtxSynchronize, void);
REAL_FUNCTION(cuDeviceGetAttribute, int *, int, CUdevice);
REAL_FUNCTION(cuDeviceGetCount, int *);
REAL_FUNCTION(cuDeviceGetDefaultMemPool, word *, CUdevice);
REAL_FUNCTION(cuDeviceGetGraphMemAttribute, CUdevice, int, void *);
REAL_FUNCTION(cuDeviceGetMemPool, word *, CUdevice);
REAL_FUNCTION(cuDeviceGetName, char *, int, CUdevice);
REAL_FUNCTION(cuDeviceGetUuid, struct cu_uuid *, CUdevice);
REAL_FUNCTION(cuDeviceGetUuid_v2, struct cu_uuid *, CUdevice);
REAL_FUNCTION(cuDeviceGraphMemTrim, CUdevice);
REAL_FUNCTION(cuDevicePrimaryCtxGetState, CUdevice, unsigned *, int *);
REAL_FUNCTION(cuDevicePrimaryCtxRelease_v2, CUdevice);
REAL_FUNCTION(cuDevicePrimaryCtxRetain, CUcontext *, CUdevice);
REAL_FUNCTION(cuDeviceTotalMem_v2, size_t *, CUdevice);
REAL_FUNCTION(cuDriverGetVersion, int *);
REAL_FUNCTION(cuEventCreate, CUevent *, unsigned);
REAL_FUNCTION(cuEventDestroy_v2, CUevent);
REAL_FUNCTION(cuEventElapsedTime, float *, CUevent, CUevent);
REAL_FUNCTION(cuEventQuery, CUevent);
REAL_FUNCTION(cuEventRecord, CUevent, CUstream);
REAL_FUNCTION(cuEventSynchronize, CUevent);
REAL_FUNCTION(cuFuncGetName, const char **, CUfunction);
REAL_FUNCTION(cuGetProcAddress, const char *, void **, int, uint64_t);
REAL_FUNCTION(cuGetProcAddress_v2, const char *, void **, int, uint64_t, int *);
REAL_FUNCTION(cuGraphAddMemAllocNode, word, word, word, size_t, word);
REAL_FUNCTION(cuGraphAddNode, word, word, word, size_t, const int *);
REAL_FUNCTION(cuInit, unsigned);
REAL_FUNCTION(cuIpcCloseMemHandle, CUdeviceptr);
REAL_FUNCTION(cuIpcGetMemHandle, void *, CUdeviceptr);
REAL_FUNCTION(cuKernelGetName, const char **, CUfunction);
REAL_FUNCTION(cuLaunch, CUfunction);
REAL_FUNCTION(cuLaunchCooperativeKernelMultiDevice, word, unsigned, unsigned);
REAL_FUNCTION(cuLaunchGrid, CUfunction, int, int);
REAL_FUNCTION(cuLaunchGridAsync, CUfunction, int, int, CUstream);
REAL_FUNCTION(cuMemAddressFree, CUdeviceptr, size_t);
REAL_FUNCTION(cuMemAddressReserve, CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t);
REAL_FUNCTION(cuMemAllocManaged, CUdeviceptr *, size_t, unsigned);
REAL_FUNCTION(cuMemCreate, uint64_t *, size_t, const struct cu_allocation_prop *, uint64_t);
REAL_FUNCTION(cuMemExportToShareableHandle, int *, uint64_t, int, uint64_t);
REAL_FUNCTION(cuMemFree_v2, CUdeviceptr);
REAL_FUNCTION(cuMemGetHandleForAddressRange, void *, CUdeviceptr, size_t, int, uint64_t);
REAL_FUNCTION(cuMemHostAlloc, void **, size_t, unsigned);
REAL_FUNCTION(cuMemHostGetDevicePointer_v2, CUdeviceptr *, void *, unsigned);
REAL_FUNCTION(cuMemHostRegister_v2, void *, size_t, unsigned);
REAL_FUNCTION(cuMemImportFromShareableHandle, uint64_t *, void *, int);
REAL_FUNCTION(cuMemMap, CUdeviceptr, size_t, size_t, uint64_t, uint64_t);
REAL_FUNCTION(cuMemPoolCreate, word *, const struct cu_pool_prop *);
REAL_FUNCTION(cuMemPoolDestroy, word);
REAL_FUNCTION(cuMemPoolGetAttribute, word, int, void *);
REAL_FUNCTION(cuMemPoolTrimTo, word, size_t);
REAL_FUNCTION(cuMemPrefetchAsync, CUdeviceptr, size_t, int, CUstream);
REAL_FUNCTION(cuMemRelease, uint64_t);
REAL_FUNCTION(cuMemRetainAllocationHandle, uint64_t *, void *);
REAL_FUNCTION(cuMemSetAccess, CUdeviceptr, size_t, const struct cu_access *, size_t);
REAL_FUNCTION(cuMemUnmap, CUdeviceptr, size_t);
REAL_FUNCTION(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, size_t, CUstream);
REAL_FUNCTION(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, size_t, CUstream);
REAL_FUNCTION(cuMipmappedArrayCreate, word *, const struct cu_array3d_descriptor *, unsigned);
REAL_FUNCTION(cuMulticastBindAddr, uint64_t, size_t, CUdeviceptr, size_t, uint64_t);
REAL_FUNCTION(cuMulticastBindAddr_v2, uint64_t, CUdevice, size_t, CUdeviceptr, size_t, uint64_t);
REAL_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *, CUfunction, int, size_t);
REAL_FUNCTION(cuPointerGetAttribute, void *, int, CUdeviceptr);
REAL_FUNCTION(cuStreamBatchMemOp_v2, CUstream, unsigned, void *, unsigned);
REAL_FUNCTION(cuStreamCreate, CUstream *, unsigned);
REAL_FUNCTION(cuStreamEndCaptureToCig, CUstream);
REAL_FUNCTION(cuStreamGetCtx, CUstream, CUcontext *);
REAL_FUNCTION(cuStreamIsCapturing, CUstream, int *);
REAL_FUNCTION(cuStreamQuery, CUstream);
REAL_FUNCTION(cuStreamSynchronize, CUstream);
REAL_FUNCTION(cuThreadExchangeStreamCaptureMode, int *);

#endif
