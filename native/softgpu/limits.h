/* Memory limits by control group (limits.c). */
#ifndef COTENANT_SOFTGPU_LIMITS_H
#define COTENANT_SOFTGPU_LIMITS_H

#include <stdio.h>

#include "softgpu.h"

#define SOFT_NO_LIMIT UINT64_MAX /* NVML_DEVICE_MEMORY_LIMIT_MAX */
#define SOFT_BUS_BYTES 32
#define SOFT_REGION_BYTES 64

enum { /* nvmlReturn_t */
    SOFT_NVML_INVALID_ARGUMENT = 2,
    SOFT_NVML_NOT_SUPPORTED = 3,
    SOFT_NVML_NO_PERMISSION = 4,
    SOFT_NVML_NOT_FOUND = 6,
    SOFT_NVML_FUNCTION_NOT_FOUND = 13,
    SOFT_NVML_UNKNOWN = 999
};

bool soft_mig(void);
int soft_set_memory_limits(int device, const char *group, uint64_t soft, uint64_t hard);
int soft_get_memory_limits(int device, const char *group, uint64_t *soft, uint64_t *hard, uint64_t *used);
/* returns whether the limits that apply to this process's control group are kept on a device; an allocation is checked
 * after its bytes were added to soft_process.bytes */
bool soft_within_limits(int device);
void soft_limit_view(int device, uint64_t *free_bytes, uint64_t *total_bytes);

/* Writes the PCI address of a device in NVML's notation. */
static inline void soft_bus_id(int device, char text[SOFT_BUS_BYTES])
{
    snprintf(text, SOFT_BUS_BYTES, "00000000:%02X:00.0", (unsigned)device + 1);
}

#endif
