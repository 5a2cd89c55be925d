/* Virtual memory management: address ranges, physical memory, and memory shared between processes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "softgpu.h"
#include "visible.h"

#define SHARED_AS_FD 1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */

struct soft_handle {
    enum soft_kind kind;
    int device;
    int fd;
    uint64_t bytes;
    uint32_t references, mappings;
    bool shared; /* the physical memory may be exported to other processes */
};

struct soft_mapping {
    uint64_t address, bytes;
    struct soft_handle *handle;
    struct soft_mapping *next;
};

static struct soft_mapping *mappings;

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr hint, uint64_t flags)
{
    CHECK_READY();
    (void)alignment, (void)hint, (void)flags;
    void *address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (uint64_t)(uintptr_t)address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    return munmap((void *)(uintptr_t)address, bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const struct cu_allocation_prop *prop, int option)
{
    (void)prop, (void)option;
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}

static struct soft_handle *new_handle(int device, int fd, uint64_t bytes)
{
    struct soft_handle *handle = calloc(1, sizeof *handle);
    if (handle)
        *handle = (struct soft_handle){.kind = SOFT_HANDLE, .device = device, .fd = fd, .bytes = bytes, .references = 1};
    return handle;
}

EXPORT CUresult cuMemCreate(struct soft_handle **out, size_t bytes, const struct cu_allocation_prop *prop, uint64_t flags)
{
    CHECK_READY();
    (void)flags;
    bool on_device = prop->location.type == CU_LOCATION_DEVICE;
    int device = on_device ? soft_device_at(prop->location.id) : -1;
    if (on_device && device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (on_device && !soft_take_memory(device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = (int)syscall(SYS_memfd_create, "soft", MFD_CLOEXEC);
    struct soft_handle *handle = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 ? new_handle(device, fd, bytes) : NULL;
    if (!handle) {
        if (fd >= 0)
            close(fd);
        if (on_device)
            soft_give_memory(device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    handle->shared = prop->handle_types & SHARED_AS_FD;
    *out = handle;
    return CUDA_SUCCESS;
}

/* Exports memory as a descriptor. The memory exists as long as any process has its descriptor. Each process with a
 * handle to the memory is charged for it. */
EXPORT CUresult cuMemExportToShareableHandle(void *out, struct soft_handle *handle, int type, uint64_t flags)
{
    (void)flags;
    if (!handle || handle->kind != SOFT_HANDLE || type != SHARED_AS_FD || !handle->shared)
        return CUDA_ERROR_INVALID_VALUE;
    int fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 3);
    memcpy(out, &fd, sizeof fd);
    return fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Imports memory. The memory is charged to the device of the current context, even if it was created on another one. */
EXPORT CUresult cuMemImportFromShareableHandle(struct soft_handle **out, void *given, int type)
{
    CHECK_CONTEXT();
    off_t bytes = type == SHARED_AS_FD ? lseek((int)(intptr_t)given, 0, SEEK_END) : -1;
    if (bytes < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!soft_take_memory(context->device, (uint64_t)bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = fcntl((int)(intptr_t)given, F_DUPFD_CLOEXEC, 3);
    *out = fd >= 0 ? new_handle(context->device, fd, (uint64_t)bytes) : NULL;
    if (!*out) {
        soft_give_memory(context->device, (uint64_t)bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* an imported handle cannot be exported again; driver release 580 returns INVALID_VALUE for an attempt */
    return CUDA_SUCCESS;
}

static void drop_if_dead(struct soft_handle *handle)
{
    if (handle->references || handle->mappings)
        return;
    if (handle->device >= 0)
        soft_give_memory(handle->device, handle->bytes);
    close(handle->fd);
    handle->kind = 0;
    free(handle);
}

EXPORT CUresult cuMemRelease(struct soft_handle *handle)
{
    if (!handle || handle->kind != SOFT_HANDLE || !handle->references)
        return CUDA_ERROR_INVALID_VALUE;
    handle->references--;
    drop_if_dead(handle);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, struct soft_handle *handle, uint64_t flags)
{
    (void)flags;
    if (!handle || handle->kind != SOFT_HANDLE)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, (off_t)offset) == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    struct soft_mapping *mapping = malloc(sizeof *mapping);
    pthread_mutex_lock(&soft_lock);
    *mapping = (struct soft_mapping){address, bytes, handle, mappings};
    mappings = mapping;
    handle->mappings++;
    pthread_mutex_unlock(&soft_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const void *descriptors, size_t count)
{
    (void)descriptors, (void)count;
    return mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    bool any = false;
    pthread_mutex_lock(&soft_lock);
    for (struct soft_mapping **link = &mappings; *link;) {
        struct soft_mapping *mapping = *link;
        if (mapping->address < address || mapping->address + mapping->bytes > address + bytes) {
            link = &mapping->next;
            continue;
        }
        *link = mapping->next;
        mmap((void *)(uintptr_t)mapping->address, mapping->bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        mapping->handle->mappings--;
        drop_if_dead(mapping->handle);
        free(mapping);
        any = true;
    }
    pthread_mutex_unlock(&soft_lock);
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool soft_is_pooled_or_mapped(uint64_t address, bool on_device)
{
    if (on_device && soft_is_pooled(address))
        return true;
    for (struct soft_mapping *mapping = mappings; mapping; mapping = mapping->next)
        if (address - mapping->address < mapping->bytes)
            return on_device == (mapping->handle->device >= 0);
    return false;
}

EXPORT CUresult cuMemRetainAllocationHandle(struct soft_handle **out, void *address)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&soft_lock);
    for (struct soft_mapping *mapping = mappings; mapping; mapping = mapping->next)
        if ((uint64_t)(uintptr_t)address - mapping->address < mapping->bytes) {
            mapping->handle->references++;
            *out = mapping->handle;
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&soft_lock);
    return result;
}
