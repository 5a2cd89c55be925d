/* Movable memory of another process that this process has opened by a handle (CUDA IPC). swap/share.c is the side of
 * the process that owns the memory. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "swap/share.h"

struct opened { /* an opened allocation of another process; the whole region that contains the allocation is mapped */
    struct share_handle handle;
    CUcontext context;
    CUdeviceptr address;
    struct share_offer size;
    uint32_t references;
    struct opened *next;
};

/* held to open or close memory, which only one thread does at a time; it is taken before `lock` */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
/* held to change the list of opened memory; never held during a driver call */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct opened *) openings;

bool cot_share_is_handle(const struct cu_ipc_handle *handle)
{
    return memcmp(handle, SHARE_MAGIC, sizeof SHARE_MAGIC) == 0;
}

/* the caller holds `lock` or `open_lock`, so that the list of opened memory does not change */
static struct opened *find(CUdeviceptr address)
{
    for (struct opened *opened = openings; opened; opened = opened->next)
        if (address - opened->address < opened->size.bytes)
            return opened;
    return NULL;
}

static uint64_t piece_bytes(const struct share_offer *size, uint64_t index)
{
    uint64_t left = size->bytes - index * size->piece_bytes;
    return left < size->piece_bytes ? left : size->piece_bytes;
}

/* Unmaps the first `pieces` pieces of an opened region, and frees its range of addresses. */
static void unmap(const struct opened *opened, uint64_t pieces)
{
    for (uint64_t i = 0; i < pieces; i++)
        REAL(cuMemUnmap)(opened->address + i * opened->size.piece_bytes, piece_bytes(&opened->size, i));
    REAL(cuMemAddressFree)(opened->address, opened->size.bytes);
}

static CUresult map_piece(const struct opened *opened, uint64_t index, int memory, CUdevice device)
{
    CUdeviceptr address = opened->address + index * opened->size.piece_bytes;
    uint64_t bytes = piece_bytes(&opened->size, index), handle;
    CUresult result = REAL(cuMemImportFromShareableHandle)(&handle, (void *)(intptr_t)memory, SWAP_SHARED_AS_DESCRIPTOR);
    return result == CUDA_SUCCESS ? cot_swap_map(address, bytes, handle, device) : result;
}

static CUresult map_all(int fd, struct opened *opened)
{
    CUdevice device;
    CUresult result = REAL(cuCtxGetDevice)(&device);
    if (result == CUDA_SUCCESS)
        result = REAL(cuMemAddressReserve)(&opened->address, opened->size.bytes, SWAP_GRANULE, 0, 0);
    if (result != CUDA_SUCCESS)
        return result;
    for (uint64_t i = 0, index; i < opened->size.pieces; i++) {
        int memory = cot_hand_receive(fd, &index, 0);
        result = memory >= 0 && index == i ? map_piece(opened, i, memory, device) : CUDA_ERROR_INVALID_HANDLE;
        if (memory >= 0)
            close(memory);
        if (result != CUDA_SUCCESS) {
            unmap(opened, i);
            return result;
        }
    }
    return CUDA_SUCCESS;
}

static bool is_sound(const struct share_offer *size, const struct share_handle *handle)
{
    return size->piece_bytes && size->piece_bytes % SWAP_GRANULE == 0 && size->bytes && size->bytes % SWAP_GRANULE == 0 &&
           size->pieces == (size->bytes - 1) / size->piece_bytes + 1 && handle->offset < size->bytes;
}

static CUresult fetch(struct opened *opened)
{
    struct sockaddr_un address;
    socklen_t length = cot_share_name(opened->handle.process, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    cot_share_limit_waits(fd);
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    if (connect(fd, (struct sockaddr *)&address, length) != 0 ||
        send(fd, &opened->handle.serial, sizeof opened->handle.serial, MSG_NOSIGNAL) < 0 ||
        recv(fd, &opened->size, sizeof opened->size, 0) != (ssize_t)sizeof opened->size)
        cot_say("memory that another process shares (CUDA IPC) cannot be opened: that process has ended, does not answer, or has "
                "another network namespace");
    else if (is_sound(&opened->size, &opened->handle))
        result = map_all(fd, opened);
    close(fd);
    return result;
}

CUresult cot_share_open(CUdeviceptr *out, const struct cu_ipc_handle *given)
{
    struct share_handle handle;
    CUcontext context = NULL;
    memcpy(&handle, given, sizeof handle);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context || cot_share_is_own(&handle))
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&open_lock);
    struct opened *opened = openings;
    while (opened && (memcmp(&opened->handle, &handle, sizeof handle) != 0 || opened->context != context))
        opened = opened->next;
    CUresult result = CUDA_SUCCESS;
    if (!opened) {
        opened = calloc(1, sizeof *opened);
        if (opened) {
            opened->handle = handle;
            opened->context = context;
        }
        result = opened ? fetch(opened) : CUDA_ERROR_OUT_OF_MEMORY;
        if (result == CUDA_SUCCESS) {
            pthread_mutex_lock(&lock);
            opened->next = openings;
            openings = opened;
            pthread_mutex_unlock(&lock);
        } else
            free(opened);
    }
    if (result == CUDA_SUCCESS) {
        opened->references++;
        *out = opened->address + handle.offset;
    }
    pthread_mutex_unlock(&open_lock);
    return result;
}

static void take_out(struct opened *opened)
{
    pthread_mutex_lock(&lock);
    struct opened *first = openings;
    if (first == opened)
        openings = opened->next;
    for (; first != opened && first; first = first->next)
        if (first->next == opened)
            first->next = opened->next;
    pthread_mutex_unlock(&lock);
}

bool cot_share_close(CUdeviceptr address, CUresult *result)
{
    if (!openings)
        return false;
    pthread_mutex_lock(&open_lock);
    struct opened *opened = find(address);
    bool last = opened && --opened->references == 0;
    if (last)
        take_out(opened);
    pthread_mutex_unlock(&open_lock);
    /* enqueued work may still use the opened memory, so the end of that work is awaited first */
    *result = last ? REAL(cuCtxSynchronize)() : CUDA_SUCCESS;
    if (last) {
        unmap(opened, opened->size.pieces);
        free(opened);
    }
    return opened != NULL;
}

bool cot_share_extent(CUdeviceptr address, CUdeviceptr *base, size_t *bytes)
{
    if (!openings)
        return false;
    pthread_mutex_lock(&lock);
    const struct opened *opened = find(address);
    if (opened) {
        *base = opened->address + opened->handle.offset;
        *bytes = opened->handle.bytes;
    }
    pthread_mutex_unlock(&lock);
    return opened != NULL;
}

void cot_share_forget_context(CUcontext context)
{
    pthread_mutex_lock(&open_lock);
    for (struct opened *opened = openings, *next; opened; opened = next) {
        next = opened->next;
        if (opened->context != context)
            continue;
        take_out(opened);
        unmap(opened, opened->size.pieces);
        free(opened);
    }
    pthread_mutex_unlock(&open_lock);
}

void cot_opened_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&lock, &fresh, sizeof fresh);
    memcpy(&open_lock, &fresh, sizeof fresh);
    openings = NULL;
}
