/* Wrappers of initialisation and contexts: they determine the GPU of a thread, and charge the memory of contexts. */
#include "shim.h"


HIDDEN bool cot_driver_is_substitutable(void);

EXPORT CUresult cuInit(unsigned flags)
{
    CUresult result = REAL(cuInit)(flags);
    if (result != CUDA_SUCCESS)
        return result;
    result = cot_agent_connect();
    if (result == CUDA_SUCCESS && !cot_driver_is_substitutable()) {
        cot_agent_warn(COTENANT_WARN_NOT_INTERCEPTED,
                       "this driver version returns entry points that the shim cannot replace, so the tenant's limits could not be "
                       "enforced; CUDA does not start");
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    return result;
}

static CUdevice device_of(CUcontext context)
{
    CUdevice device = -1;
    CUcontext popped;
    if (REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return -1;
    if (REAL(cuCtxGetDevice)(&device) != CUDA_SUCCESS)
        device = -1;
    REAL(cuCtxPopCurrent_v2)(&popped);
    return device;
}

/* ---- creation of contexts ---- */

#define CTX_CREATE(name, parameters, device, types, arguments)    \
    DECLARE_REAL(name);                                           \
    EXPORT CUresult name parameters                               \
    {                                                             \
        CUresult result = cot_gpu_before_context(device);         \
        if (result != CUDA_SUCCESS)                               \
            return result;                                        \
        result = ((CUresult(*) types)REAL_POINTER(name))arguments;        \
        if (result == CUDA_ERROR_OUT_OF_MEMORY && cot_gpu_room_for_context(device)) \
            result = ((CUresult(*) types)REAL_POINTER(name))arguments;    \
        if (result == CUDA_SUCCESS)                               \
            cot_gpu_context_made(device, *context);               \
        else                                                      \
            cot_gpu_context_gone(device, NULL);                   \
        cot_thread_context_changed();                             \
        return result;                                            \
    }
CTX_CREATE(cuCtxCreate, (CUcontext * context, unsigned flags, CUdevice device), device,
           (CUcontext *, unsigned, CUdevice), (context, flags, device))
CTX_CREATE(cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device), device,
           (CUcontext *, unsigned, CUdevice), (context, flags, device))
CTX_CREATE(cuCtxCreate_v3, (CUcontext * context, word params, int count, unsigned flags, CUdevice device), device,
           (CUcontext *, word, int, unsigned, CUdevice), (context, params, count, flags, device))
CTX_CREATE(cuCtxCreate_v4, (CUcontext * context, word params, unsigned flags, CUdevice device), device,
           (CUcontext *, word, unsigned, CUdevice), (context, params, flags, device))

static bool primary_is_active(CUdevice device)
{
    unsigned flags = 0;
    int active = 0;
    return REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) ==
               CUDA_SUCCESS && active;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    bool fresh = !primary_is_active(device);
    if (fresh) {
        CUresult refused = cot_gpu_before_context(device);
        if (refused != CUDA_SUCCESS)
            return refused;
    }
    CUresult result = REAL(cuDevicePrimaryCtxRetain)(context, device);
    if (fresh && result == CUDA_ERROR_OUT_OF_MEMORY && cot_gpu_room_for_context(device))
        result = REAL(cuDevicePrimaryCtxRetain)(context, device);
    if (fresh && result == CUDA_SUCCESS)
        cot_gpu_context_made(device, *context);
    else if (fresh)
        cot_gpu_context_gone(device, NULL);
    return result;
}

/* ---- destruction of contexts ---- */

static CUcontext primary_of(CUdevice device)
{
    CUcontext context = NULL;
    if (REAL(cuDevicePrimaryCtxRetain)(&context, device) != CUDA_SUCCESS)
        return NULL;
    REAL(cuDevicePrimaryCtxRelease_v2)(device);
    return context;
}

#define PRIMARY_END(name)                                            \
    DECLARE_REAL(name);                                              \
    EXPORT CUresult name(CUdevice device)                            \
    {                                                                \
        bool active = primary_is_active(device);                     \
        CUcontext context = active ? primary_of(device) : NULL;      \
        cot_kernels_collect();                                       \
        CUresult result = ((CUresult(*)(CUdevice))REAL_POINTER(name))(device); \
        if (active && !primary_is_active(device)) {                  \
            cot_thread_context_changed();                            \
            cot_gpu_context_gone(device, context);                   \
        }                                                            \
        return result;                                               \
    }
PRIMARY_END(cuDevicePrimaryCtxRelease)
PRIMARY_END(cuDevicePrimaryCtxRelease_v2)
PRIMARY_END(cuDevicePrimaryCtxReset)
PRIMARY_END(cuDevicePrimaryCtxReset_v2)

#define CTX_DESTROY(name)                                                  \
    DECLARE_REAL(name);                                                    \
    EXPORT CUresult name(CUcontext context)                                \
    {                                                                      \
        CUdevice device = context ? device_of(context) : -1;               \
        cot_kernels_collect();                                             \
        CUresult result = ((CUresult(*)(CUcontext))REAL_POINTER(name))(context);   \
        cot_thread_context_changed();                                      \
        if (result == CUDA_SUCCESS && device >= 0)                         \
            cot_gpu_context_gone(device, context);                         \
        return result;                                                     \
    }
CTX_DESTROY(cuCtxDestroy)
CTX_DESTROY(cuCtxDestroy_v2)

/* ---- changes of the current context ---- */

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult result = REAL(cuCtxSetCurrent)(context);
    if (cot_thread->context != context)
        cot_thread_context_changed();
    return result;
}

static void look_at_current(void)
{
    CUcontext now = NULL;
    REAL(cuCtxGetCurrent)(&now);
    if (now != cot_thread->context)
        cot_thread_context_changed();
}

#define CTX_CHANGE(name)                                        \
    DECLARE_REAL(name);                                         \
    EXPORT CUresult name(word context)                          \
    {                                                           \
        CUresult result = ((CUresult(*)(word))REAL_POINTER(name))(context); \
        look_at_current();                                      \
        return result;                                          \
    }
CTX_CHANGE(cuCtxPushCurrent)
CTX_CHANGE(cuCtxPushCurrent_v2)
CTX_CHANGE(cuCtxPopCurrent)
CTX_CHANGE(cuCtxPopCurrent_v2)
