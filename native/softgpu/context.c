/* Devices and contexts of the software GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"
#include "visible.h"

pthread_mutex_t soft_lock = PTHREAD_MUTEX_INITIALIZER;
bool soft_ready;

#define STACK_DEPTH 32
static __thread struct soft_context *stack[STACK_DEPTH];
static __thread int depth; /* the current context of the thread is stack[depth - 1] */
static struct soft_context *contexts;
static struct soft_context *primaries[SOFT_MAX_DEVICES];

EXPORT CUresult cuInit(unsigned flags)
{
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&soft_lock);
    CUresult result = soft_attach();
    if (result == CUDA_SUCCESS) {
        soft_read_visible();
        result = soft_visible_count() ? soft_mps_join() : CUDA_ERROR_NO_DEVICE;
    }
    soft_ready = result == CUDA_SUCCESS;
    pthread_mutex_unlock(&soft_lock);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = SOFT_DRIVER_VERSION;
    return CUDA_SUCCESS;
}

static bool is_device(CUdevice ordinal)
{
    return soft_device_at(ordinal) >= 0;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    CHECK_READY();
    *count = soft_visible_count();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CHECK_READY();
    if (!is_device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CHECK_READY();
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "Cotenant Software GPU");
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(struct cu_uuid *uuid, CUdevice device)
{
    CHECK_READY();
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    soft_uuid(soft_device_at(device), uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(struct cu_uuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CHECK_READY();
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = soft_state()->memory_bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CHECK_READY();
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    static const int known[][2] = {{1, 1024}, {2, 1024}, {5, 2147483647}, {10, 32}, {16, SOFT_SM_COUNT},
                                   {31, 1},   {41, 1},   {75, 9},         {76, 0},  {83, 1},
                                   /* The attributes, by number: 1: threads per block, 2: threads per block in x,
                                    * 5: grid size in x, 10: warp size, 16: number of SMs, 31: concurrent kernels,
                                    * 41: unified addressing, 75 and 76: compute capability, 83: managed memory,
                                    * 102: virtual memory, 115: memory pools. */
                                   {102, 1},  {115, 1}};
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i][0] == attribute)
            *value = known[i][1] == SOFT_SM_COUNT ? (int)soft_mps_sms() : known[i][1];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name)
{
    static const struct {
        CUresult code;
        const char *name;
    } names[] = {{CUDA_SUCCESS, "CUDA_SUCCESS"},
                 {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                 {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
                 {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
                 {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
                 {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
                 {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
                 {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
                 {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY"},
                 {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED"},
                 {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
                 {CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY"},
                 {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                 {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                 {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i].code == error) {
            *name = names[i].name;
            return CUDA_SUCCESS;
        }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    return cuGetErrorName(error, text);
}

/* ---- contexts ---- */

struct soft_context *soft_current(void)
{
    return depth > 0 ? stack[depth - 1] : NULL;
}

static bool is_context(const struct soft_context *wanted)
{
    for (struct soft_context *context = contexts; context; context = context->next)
        if (context == wanted)
            return true;
    return false;
}

/* the caller holds soft_lock, which protects the process's objects */
static CUresult make_context(struct soft_context **out, int device, bool primary)
{
    if (soft_attach() != CUDA_SUCCESS || !soft_take_memory(device, SOFT_CONTEXT_BYTES))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct soft_context *context = calloc(1, sizeof *context);
    context->kind = SOFT_CONTEXT;
    context->device = device;
    context->primary = primary;
    context->group = soft_group_new(device);
    context->legacy = soft_stream_new(context, true, 0);
    context->next = contexts;
    contexts = context;
    soft_tell_context(context);
    soft_mps_tell(device);
    *out = context;
    return CUDA_SUCCESS;
}

/* the caller holds soft_lock, which protects the process's objects */
void soft_context_drop(struct soft_context *context)
{
    soft_give_memory(context->device, SOFT_CONTEXT_BYTES);
    soft_tell_context_gone(context);
    soft_group_gone(context->device, context->group);
    context->group = -1;
    for (struct soft_context **link = &contexts; *link; link = &(*link)->next)
        if (*link == context) {
            *link = context->next;
            break;
        }
    if (primaries[context->device] == context)
        primaries[context->device] = NULL;
    /* the context's record is not freed: the program may still use the handle, and must get an error then */
    context->kind = 0;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    (void)flags;
    CHECK_READY();
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    struct soft_context *context = NULL;
    pthread_mutex_lock(&soft_lock);
    CUresult result = depth < STACK_DEPTH ? make_context(&context, soft_device_at(device), false) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&soft_lock);
    if (result != CUDA_SUCCESS)
        return result;
    stack[depth++] = context;
    *out = (CUcontext)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *out, void *params, unsigned flags, CUdevice device)
{
    (void)params;
    return cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext handle)
{
    CHECK_READY();
    struct soft_context *context = (struct soft_context *)handle;
    pthread_mutex_lock(&soft_lock);
    bool known = is_context(context) && !context->primary;
    if (known)
        soft_context_drop(context);
    pthread_mutex_unlock(&soft_lock);
    if (known && soft_current() == context)
        depth--;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal)
{
    CHECK_READY();
    int device = soft_device_at(ordinal);
    if (device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&soft_lock);
    if (!primaries[device])
        result = make_context(&primaries[device], device, true);
    if (result == CUDA_SUCCESS) {
        primaries[device]->references++;
        *out = (CUcontext)primaries[device];
    }
    pthread_mutex_unlock(&soft_lock);
    return result;
}

static CUresult end_primary(CUdevice ordinal, bool all)
{
    CHECK_READY();
    int device = soft_device_at(ordinal);
    if (device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&soft_lock);
    if (!primaries[device])
        result = all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    else if (all || --primaries[device]->references == 0)
        soft_context_drop(primaries[device]);
    pthread_mutex_unlock(&soft_lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return end_primary(device, false);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    return end_primary(device, true);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    CHECK_READY();
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = primaries[soft_device_at(device)] != NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    (void)flags;
    return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *out)
{
    CHECK_READY();
    *out = (CUcontext)soft_current();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    CHECK_READY();
    if (depth == 0)
        depth = 1;
    stack[depth - 1] = (struct soft_context *)context;
    if (!context && depth == 1)
        depth = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CHECK_READY();
    if (!context || !is_context((struct soft_context *)context) || depth >= STACK_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = (struct soft_context *)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    CHECK_READY();
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out)
        *out = (CUcontext)stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    CHECK_CONTEXT();
    *device = soft_ordinal_of(context->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    CHECK_CONTEXT();
    (void)context;
    *flags = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    CHECK_CONTEXT();
    CUresult forbidden = soft_unsafe_call();
    if (forbidden != CUDA_SUCCESS)
        return forbidden;
    soft_settle(NULL);
    soft_wait(context, soft_context_tail(context));
    soft_pools_trim(context->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CHECK_CONTEXT();
    (void)context;
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}
