/* Replaces libnvidia-ml.so.1. It passes all calls to the real library and reduces the reported memory of a GPU to
 * the tenant's limit, so that tools and frameworks get the same numbers from NVML as from the driver shim. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "paths.h"

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORT __attribute__((visibility("default")))
#define DECLARE_REAL(name) extern HIDDEN void *cot_real_##name
#define REAL(name) cot_real_##name

enum { NVML_SUCCESS = 0, NVML_ERROR_LIBRARY_NOT_FOUND = 12, NVML_ERROR_FUNCTION_NOT_FOUND = 13 };

extern HIDDEN void *cot_real_table[];
extern HIDDEN const char *const cot_names[];
extern HIDDEN const uint32_t cot_export_count;

typedef int (*memory_view)(const uint8_t uuid[16], uint64_t *limit_bytes, uint64_t *used_bytes, uint64_t *kept_bytes);

static pthread_once_t open_once = PTHREAD_ONCE_INIT;
static void *nvml_handle;

static int absent(void)
{
    return NVML_ERROR_FUNCTION_NOT_FOUND;
}

static int no_library(void)
{
    return NVML_ERROR_LIBRARY_NOT_FOUND;
}

static void open_library(void)
{
    void *(*next_dlopen)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    char place[COTENANT_PATH_BYTES];
    const char *path = cot_first_file(getenv("COTENANT_NVML"), place);
    if (path && next_dlopen)
        nvml_handle = next_dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (uint32_t i = 0; i < cot_export_count; i++) {
        void *real = nvml_handle ? dlsym(nvml_handle, cot_names[i]) : NULL;
        if (!real)
            real = nvml_handle ? (void *)absent : (void *)no_library;
        __atomic_store_n(&cot_real_table[i], real, __ATOMIC_RELEASE);
    }
}

HIDDEN int cot_open_nvml(void)
{
    pthread_once(&open_once, open_library);
    return nvml_handle ? 0 : -1;
}

/* Finds a symbol that the real library has and this library does not export. A program that looks a symbol up in this
 * library calls the driver shim's dlsym; if that finds no such export here, it calls this function. */
EXPORT void *cotenant_nvml_symbol(void *handle, const char *name)
{
    Dl_info info;
    static void *own;
    if (!own && dladdr((void *)cotenant_nvml_symbol, &info))
        own = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle == own && cot_open_nvml() == 0 ? dlsym(nvml_handle, name) : NULL;
}

/* ---- the GPU behind an NVML handle, and the tenant's memory on it ---- */

DECLARE_REAL(nvmlDeviceGetUUID);

/* Reads a UUID of the form "GPU-" or "MIG-", then 32 hexadecimal digits with dashes. */
static int parse_uuid(const char *text, uint8_t uuid[16])
{
    int digits = 0;
    for (const char *c = strchr(text, '-'); c && *c && digits < 32; c++) {
        int value = *c >= '0' && *c <= '9'   ? *c - '0'
                    : *c >= 'a' && *c <= 'f' ? *c - 'a' + 10
                    : *c >= 'A' && *c <= 'F' ? *c - 'A' + 10
                                             : -1;
        if (value < 0)
            continue;
        uuid[digits / 2] = (uint8_t)(digits % 2 ? uuid[digits / 2] | value : value << 4);
        digits++;
    }
    return digits == 32;
}

static int view(void *device, uint64_t *limit, uint64_t *used, uint64_t *kept)
{
    char text[96] = "";
    uint8_t uuid[16];
    memory_view ask = (memory_view)dlsym(RTLD_DEFAULT, "cotenant_memory_of");
    if (!ask || ((int (*)(void *, char *, unsigned))REAL(nvmlDeviceGetUUID))(device, text, sizeof text) != NVML_SUCCESS)
        return 0;
    return parse_uuid(text, uuid) && ask(uuid, limit, used, kept) == 0;
}

/* Adjusts what the real library reports. Free memory becomes the smaller of two numbers: what is left of the
 * tenant's limit, and what is free on the card apart from the memory reserved for other tenants. */
static void adjust(void *device, uint64_t *total, uint64_t *free_bytes, uint64_t *used_bytes)
{
    uint64_t limit, used, kept;
    if (!view(device, &limit, &used, &kept))
        return;
    uint64_t left = used < limit ? limit - used : 0;
    if (*total > limit)
        *total = limit;
    *free_bytes = *free_bytes > kept ? *free_bytes - kept : 0;
    if (*free_bytes > left)
        *free_bytes = left;
    *used_bytes = *total - *free_bytes;
}

struct memory_v1 {
    uint64_t total, free, used;
};

struct memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
};

DECLARE_REAL(nvmlDeviceGetMemoryInfo);
EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct memory_v1 *memory)
{
    int result = ((int (*)(void *, struct memory_v1 *))REAL(nvmlDeviceGetMemoryInfo))(device, memory);
    if (result == NVML_SUCCESS && memory)
        adjust(device, &memory->total, &memory->free, &memory->used);
    return result;
}

DECLARE_REAL(nvmlDeviceGetMemoryInfo_v2);
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory)
{
    int result = ((int (*)(void *, struct memory_v2 *))REAL(nvmlDeviceGetMemoryInfo_v2))(device, memory);
    if (result == NVML_SUCCESS && memory) {
        uint64_t total = memory->total;
        adjust(device, &memory->total, &memory->free, &memory->used);
        if (memory->total != total)
            memory->reserved = 0; /* the tenant is not charged for the memory that the driver reserves for itself */
    }
    return result;
}
