/* A small replacement for NVML. From the software GPU's shared state, it answers which GPUs exist, how much of their
 * memory is used, and which processes use them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"
#include "softgpu.h"

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_UNKNOWN = 999
};

static bool ready;

static int index_of(void *device)
{
    return (int)((uintptr_t)device - 1);
}

EXPORT int nvmlInit_v2(void)
{
    ready = soft_map() == CUDA_SUCCESS;
    return ready ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

EXPORT int nvmlShutdown(void)
{
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(int error)
{
    return error == NVML_SUCCESS ? "Success" : "Error of the software GPU";
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    snprintf(text, length, getenv("COTENANT_SOFTGPU_CGROUPS") ? "615 (software)" : "580 (software)");
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    if (!ready)
        return NVML_ERROR_UNINITIALIZED;
    *count = soft_state()->device_count;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if (!ready)
        return NVML_ERROR_UNINITIALIZED;
    if (index >= soft_state()->device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = (void *)(uintptr_t)(index + 1);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    (void)device;
    snprintf(name, length, "Cotenant Software GPU");
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(void *device, char *text, unsigned length)
{
    uint8_t uuid[16];
    soft_uuid(index_of(device), uuid);
    size_t used = (size_t)snprintf(text, length, "GPU-");
    for (int i = 0; i < 16 && used < length; i++)
        used += (size_t)snprintf(text + used, length - used, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                                 uuid[i]);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    char text[96];
    unsigned count;
    int result = nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; result == NVML_SUCCESS && i < count; i++) {
        nvmlDeviceGetHandleByIndex_v2(i, device);
        nvmlDeviceGetUUID(*device, text, sizeof text);
        if (strcmp(text, uuid) == 0)
            return NVML_SUCCESS;
    }
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : result;
}

struct pci_info {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[SOFT_BUS_BYTES];
};

EXPORT int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *pci)
{
    *pci = (struct pci_info){.bus = (unsigned)index_of(device) + 1};
    soft_bus_id(index_of(device), pci->bus_id);
    return NVML_SUCCESS;
}

enum { HIGHEST_MHZ = 2000 };

EXPORT int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz)
{
    (void)device, (void)kind;
    *mhz = HIGHEST_MHZ;
    return NVML_SUCCESS;
}

/* Returns the SM clock that NVML reports. The variable COTENANT_SOFTGPU_CLOCK sets it, in percent of the highest clock.
 * It does not change the duration of kernels. */
EXPORT int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz)
{
    (void)device, (void)kind;
    const char *text = getenv("COTENANT_SOFTGPU_CLOCK");
    *mhz = HIGHEST_MHZ / 100 * (text ? (unsigned)atoi(text) : 100);
    return NVML_SUCCESS;
}

struct memory_v1 {
    uint64_t total, free, used;
};

struct memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
};

EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct memory_v1 *memory)
{
    if (!ready)
        return NVML_ERROR_UNINITIALIZED;
    soft_reap();
    memory->total = soft_state()->memory_bytes;
    memory->used = soft_used_memory(index_of(device));
    memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory)
{
    struct memory_v1 plain;
    int result = nvmlDeviceGetMemoryInfo(device, &plain);
    if (result == NVML_SUCCESS) {
        memory->total = plain.total;
        memory->free = plain.free;
        memory->used = plain.used;
        memory->reserved = 0;
    }
    return result;
}

/* Returns the MIG mode: on if COTENANT_SOFTGPU_MIG is 1, otherwise not supported. GPUs in MIG mode have no memory
 * limits by control group. */
EXPORT int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending)
{
    (void)device;
    if (!soft_mig())
        return SOFT_NVML_NOT_SUPPORTED;
    *now = *pending = 1;
    return 0;
}

struct set_limits {
    const char *group;
    uint64_t soft, hard;
};

EXPORT int nvmlDeviceSetMemoryLimits_v1(void *device, const struct set_limits *limits)
{
    return ready ? soft_set_memory_limits(index_of(device), limits->group, limits->soft, limits->hard)
                 : NVML_ERROR_UNINITIALIZED;
}

struct get_limits {
    const char *group;
    uint64_t soft, hard, used;
};

EXPORT int nvmlDeviceGetMemoryLimits_v1(void *device, struct get_limits *limits)
{
    return ready ? soft_get_memory_limits(index_of(device), limits->group, &limits->soft, &limits->hard, &limits->used)
                 : NVML_ERROR_UNINITIALIZED;
}

struct process_info {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process_info *infos)
{
    if (!ready)
        return NVML_ERROR_UNINITIALIZED;
    unsigned found = 0;
    soft_reap();
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES; i++) {
        struct soft_process *process = &soft_state()->processes[i];
        uint64_t owner = atomic_load(&process->owner), bytes = atomic_load(&process->bytes[index_of(device)]);
        if (!owner || !bytes)
            continue;
        if (infos && found < *count)
            infos[found] = (struct process_info){(unsigned)(owner >> 32), bytes, UINT32_MAX, UINT32_MAX};
        found++;
    }
    /* 7 is NVML_ERROR_INSUFFICIENT_SIZE: the caller's array is too small */
    int result = infos && found > *count ? 7 : NVML_SUCCESS;
    *count = found;
    return result;
}
