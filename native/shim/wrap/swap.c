/* Wrappers of driver functions that export the memory behind an address, or that access it without passing the turn
 * gate. They matter only in programs whose memory is swapped; in a process without movable allocations they only
 * call the driver. */
#include "swap/swap.h"

#define CU_POINTER_ATTRIBUTE_P2P_TOKENS 5

bool cot_swap_fix_around(CUdeviceptr address, const char *why)
{
    CUdeviceptr base;
    size_t bytes;
    if (!cot_swap_extent(address, &base, &bytes))
        return false;
    cot_swap_fix(why);
    return true;
}

/* Makes a handle by which another process can open memory. The driver makes handles for plain allocations only, so
 * for movable ones the shim makes its own. Managed memory cannot be shared: the program gets the driver's error, and
 * its later allocations are plain. */
EXPORT CUresult cuIpcGetMemHandle(void *handle, CUdeviceptr address)
{
    CUdeviceptr base;
    size_t bytes;
    if (!handle || !cot_swap_extent(address, &base, &bytes))
        return REAL(cuIpcGetMemHandle)(handle, address);
    if (cot_swap_is_managed(address)) {
        cot_swap_fix("the program shares memory with other processes (cuIpcGetMemHandle), which is not possible for managed "
                     "memory; start it with --oversubscribe swap");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return bytes ? cot_share_export(address, handle) : CUDA_ERROR_INVALID_VALUE;
}

#define IPC_OPEN(name)                                                                                               \
    DECLARE_REAL(name);                                                                                              \
    EXPORT CUresult name(CUdeviceptr *out, struct cu_ipc_handle handle, unsigned flags)                              \
    {                                                                                                                \
        if (cot_share_is_handle(&handle))                                                                            \
            return cot_share_open(out, &handle);                                                                     \
        return ((CUresult(*)(CUdeviceptr *, struct cu_ipc_handle, unsigned))REAL_POINTER(name))(out, handle, flags); \
    }
IPC_OPEN(cuIpcOpenMemHandle)
IPC_OPEN(cuIpcOpenMemHandle_v2)

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    CUresult result;
    return cot_share_close(address, &result) ? result : REAL(cuIpcCloseMemHandle)(address);
}

EXPORT CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, int type, uint64_t flags)
{
    cot_swap_fix_around(address, "the program registers memory with the network (cuMemGetHandleForAddressRange)");
    return REAL(cuMemGetHandleForAddressRange)(handle, address, bytes,
                                                                                                       type, flags);
}

EXPORT CUresult cuMulticastBindAddr(uint64_t multicast, size_t offset, CUdeviceptr address, size_t bytes, uint64_t flags)
{
    cot_swap_fix_around(address, "the program binds memory to a multicast object (cuMulticastBindAddr)");
    return REAL(cuMulticastBindAddr)(multicast, offset, address,
                                                                                                    bytes, flags);
}

EXPORT CUresult cuMulticastBindAddr_v2(uint64_t multicast, CUdevice device, size_t offset, CUdeviceptr address, size_t bytes,
                                       uint64_t flags)
{
    cot_swap_fix_around(address, "the program binds memory to a multicast object (cuMulticastBindAddr)");
    return REAL(cuMulticastBindAddr_v2)(multicast, device, offset, address, bytes, flags);
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    if (UNLIKELY(attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS))
        cot_swap_fix_around(address, "the program registers memory with a device (CU_POINTER_ATTRIBUTE_P2P_TOKENS)");
    return REAL(cuPointerGetAttribute)(data, attribute, address);
}

#define ADDRESS_RANGE(name)                                                                             \
    DECLARE_REAL(name);                                                                                 \
    EXPORT CUresult name(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)                         \
    {                                                                                                   \
        CUdeviceptr own_base;                                                                           \
        size_t own_bytes;                                                                               \
        if (!cot_swap_extent(address, &own_base, &own_bytes) && !cot_share_extent(address, &own_base, &own_bytes)) \
            return ((CUresult(*)(CUdeviceptr *, size_t *, CUdeviceptr))REAL_POINTER(name))(base, bytes, address); \
        if (own_bytes == 0) /* the address is in an unused slot of a slab */                                         \
            return CUDA_ERROR_INVALID_VALUE;                                                            \
        if (base)                                                                                       \
            *base = own_base;                                                                           \
        if (bytes)                                                                                      \
            *bytes = own_bytes;                                                                         \
        return CUDA_SUCCESS;                                                                            \
    }
ADDRESS_RANGE(cuMemGetAddressRange_v2)

/* The driver's cuMemFreeAsync also frees plain allocations, after the enqueued work has ended. For movable
 * allocations, cot_swap_free waits for that work. */
#define FREE_ASYNC(name)                                                                       \
    DECLARE_REAL(name);                                                                        \
    EXPORT CUresult name(CUdeviceptr address, CUstream stream)                                 \
    {                                                                                          \
        CUresult result;                                                                       \
        if (cot_swap_free(address, &result))                                                   \
            return result;                                                                     \
        return ((CUresult(*)(CUdeviceptr, CUstream))REAL_POINTER(name))(address, stream);              \
    }
FREE_ASYNC(cuMemFreeAsync)
FREE_ASYNC(cuMemFreeAsync_ptsz)

/* Stream operations that write to memory are not launches. If memory is movable, they must wait for a turn like
 * launches, since the memory may be evicted. */
#define STREAM_WRITE(name, value_type, effective)                                                                      \
    DECLARE_REAL(name);                                                                                                \
    EXPORT CUresult name(CUstream stream, CUdeviceptr address, value_type value, unsigned flags)                       \
    {                                                                                                                  \
        struct calls *calls = cot_swap_mode() ? cot_gate_enter((uintptr_t)name, effective) : NULL;                         \
        CUresult result =                                                                                              \
            ((CUresult(*)(CUstream, CUdeviceptr, value_type, unsigned))REAL_POINTER(name))(stream, address, value, flags);     \
        cot_gate_exit(calls);                                                                                            \
        return result;                                                                                                 \
    }
STREAM_WRITE(cuStreamWriteValue32, uint32_t, stream)
STREAM_WRITE(cuStreamWriteValue32_ptsz, uint32_t, PTSZ(stream))
STREAM_WRITE(cuStreamWriteValue32_v2, uint32_t, stream)
STREAM_WRITE(cuStreamWriteValue32_v2_ptsz, uint32_t, PTSZ(stream))
STREAM_WRITE(cuStreamWriteValue64, uint64_t, stream)
STREAM_WRITE(cuStreamWriteValue64_ptsz, uint64_t, PTSZ(stream))
STREAM_WRITE(cuStreamWriteValue64_v2, uint64_t, stream)
STREAM_WRITE(cuStreamWriteValue64_v2_ptsz, uint64_t, PTSZ(stream))

#define BATCH_MEM_OP(name, effective)                                                                                  \
    DECLARE_REAL(name);                                                                                                \
    EXPORT CUresult name(CUstream stream, unsigned count, void *operations, unsigned flags)                            \
    {                                                                                                                  \
        struct calls *calls = cot_swap_mode() ? cot_gate_enter((uintptr_t)name, effective) : NULL;                         \
        CUresult result = ((CUresult(*)(CUstream, unsigned, void *, unsigned))REAL_POINTER(name))(stream, count, operations, flags); \
        cot_gate_exit(calls);                                                                                            \
        return result;                                                                                                 \
    }
BATCH_MEM_OP(cuStreamBatchMemOp, stream)
BATCH_MEM_OP(cuStreamBatchMemOp_ptsz, PTSZ(stream))
BATCH_MEM_OP(cuStreamBatchMemOp_v2, stream)
BATCH_MEM_OP(cuStreamBatchMemOp_v2_ptsz, PTSZ(stream))
