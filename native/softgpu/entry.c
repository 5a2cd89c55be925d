/* Both versions of cuGetProcAddress. They interpret name, version and flags by the driver's rules. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "softgpu.h"

enum { FOUND = 0, NOT_FOUND = 1, VERSION_NOT_SUFFICIENT = 2 };
enum { FLAG_LEGACY = 1, FLAG_PER_THREAD = 2 };

/* The suffix that the exported name of a function has from a driver version on. Functions that are not listed have
 * no suffix. */
static const struct {
    const char *base;
    int since;
    const char *suffix;
} versions[] = {
    {"cuGetProcAddress", 11030, ""},      {"cuGetProcAddress", 12000, "_v2"},
    {"cuMemAlloc", 3020, "_v2"},          {"cuMemAllocPitch", 3020, "_v2"},
    {"cuMemFree", 3020, "_v2"},           {"cuMemGetInfo", 3020, "_v2"},
    {"cuMemAllocHost", 3020, "_v2"},      {"cuMemHostRegister", 6050, "_v2"},
    {"cuArrayCreate", 3020, "_v2"},       {"cuArray3DCreate", 3020, "_v2"},
    {"cuMemcpyHtoD", 3020, "_v2"},        {"cuMemcpyDtoH", 3020, "_v2"},
    {"cuMemcpyDtoD", 3020, "_v2"},        {"cuMemcpyHtoDAsync", 3020, "_v2"},
    {"cuMemcpyDtoHAsync", 3020, "_v2"},   {"cuMemcpyDtoDAsync", 3020, "_v2"},
    {"cuMemsetD8", 3020, "_v2"},          {"cuMemsetD32", 3020, "_v2"},
    {"cuDeviceTotalMem", 3020, "_v2"},    {"cuDeviceGetUuid", 9020, ""},
    {"cuDeviceGetUuid", 11040, "_v2"},    {"cuCtxCreate", 3020, "_v2"},
    {"cuCtxCreate", 12050, "_v4"},        {"cuCtxDestroy", 4000, "_v2"},
    {"cuCtxPushCurrent", 4000, "_v2"},    {"cuCtxPopCurrent", 4000, "_v2"},
    {"cuDevicePrimaryCtxRelease", 11000, "_v2"}, {"cuDevicePrimaryCtxReset", 11000, "_v2"},
    {"cuDevicePrimaryCtxSetFlags", 11000, "_v2"}, {"cuStreamDestroy", 4000, "_v2"},
    {"cuEventDestroy", 4000, "_v2"},      {"cuStreamBeginCapture", 10010, "_v2"},
    {"cuGraphAddKernelNode", 12000, "_v2"},
    {"cuMemcpy2D", 3020, "_v2"},          {"cuMemcpy2DUnaligned", 3020, "_v2"},
    {"cuMemcpy2DAsync", 3020, "_v2"},     {"cuMemHostGetDevicePointer", 3020, "_v2"},
    {"cuStreamWaitValue32", 11070, "_v2"}, {"cuStreamWriteValue32", 11070, "_v2"},
    {"cuStreamBatchMemOp", 11070, "_v2"},
    {"cuGraphLaunch", 10000, ""},         {"cuLaunchKernelEx", 11060, ""},
    {"cuLaunchKernel", 4000, ""},         {"cuMemAllocAsync", 11020, ""},
};

static void *own_symbol(const char *name)
{
    static void *handle;
    static Dl_info info;
    if (!handle && dladdr((void *)own_symbol, &info))
        handle = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void *found = handle ? dlsym(handle, name) : NULL;
    Dl_info of_found;
    return found && dladdr(found, &of_found) && of_found.dli_fbase == info.dli_fbase ? found : NULL;
}

static void *with_stream_kind(const char *name, uint64_t flags)
{
    char full[160];
    void *found = NULL;
    if (flags & FLAG_PER_THREAD) {
        snprintf(full, sizeof full, "%s_ptsz", name);
        found = own_symbol(full);
        if (!found) {
            snprintf(full, sizeof full, "%s_ptds", name);
            found = own_symbol(full);
        }
    }
    return found ? found : own_symbol(name);
}

static int find(const char *symbol, void **out, int version, uint64_t flags)
{
    const char *suffix = "";
    bool listed = false, reached = false;
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++)
        if (strcmp(versions[i].base, symbol) == 0) {
            listed = true;
            if (version >= versions[i].since) {
                suffix = versions[i].suffix;
                reached = true;
            }
        }
    if (listed && !reached)
        return VERSION_NOT_SUFFICIENT;
    char name[128];
    snprintf(name, sizeof name, "%s%s", symbol, suffix);
    *out = with_stream_kind(name, flags);
    return *out ? FOUND : NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status)
{
    if (!symbol || !out || version > SOFT_DRIVER_VERSION || flags & ~(uint64_t)(FLAG_LEGACY | FLAG_PER_THREAD))
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    int outcome = find(symbol, out, version, flags);
    if (status)
        *status = outcome;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags)
{
    int status;
    CUresult result = cuGetProcAddress_v2(symbol, out, version, flags, &status);
    return result == CUDA_SUCCESS && !*out ? CUDA_ERROR_NOT_FOUND : result;
}

EXPORT CUresult cuGetExportTable(const void **table, const void *id)
{
    (void)table, (void)id;
    return CUDA_ERROR_NOT_FOUND; /* the software GPU has no private export tables */
}
