/* Movable memory that other processes open (CUDA IPC), on the side of the process that owns it. swap/opened.c is the
 * other side.
 *
 * The driver makes IPC handles only for its own allocations, not for addresses to which pieces are mapped. So the
 * shim makes the handle. The handle names this process's socket and a region, which stays on the GPU from then on.
 * When a process opens the handle, a thread sends it descriptors of the region's pieces, and it maps the same
 * memory. Both processes must run under the shim. In a process without the shim, the driver returns an error, since
 * it does not know the handle. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "swap/share.h"

struct shared { /* a region of this process for which a handle was made */
    struct region *region;
    uint64_t serial;
    struct shared *next;
    int memory[]; /* a descriptor of the device memory of each piece of the region */
};

/* held to make a handle, which only one thread does at a time; it is taken before `lock` */
static pthread_mutex_t export_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* protects the list; never held during a driver call */
static struct shared *shares;
static uint64_t own_process, last_serial;
static int listener = -1;

socklen_t cot_share_name(uint64_t process, struct sockaddr_un *address)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "cotenant-memory-%016llx",
                          (unsigned long long)process);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

void cot_share_limit_waits(int fd)
{
    struct timeval patience = {.tv_sec = SHARE_PATIENCE_S};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && (peer.uid == geteuid() || peer.uid == 0);
}

/* Duplicates the descriptors of a region's memory, so that they stay valid if the region is freed while they are
 * sent. NULL: there is no region with this serial number. */
static int *copies_of(uint64_t serial, struct share_offer *offer)
{
    int *copies = NULL;
    *offer = (struct share_offer){0};
    pthread_mutex_lock(&lock);
    struct shared *shared = shares;
    while (shared && shared->serial != serial)
        shared = shared->next;
    if (shared && (copies = malloc(shared->region->pieces * sizeof *copies))) {
        *offer = (struct share_offer){shared->region->bytes, shared->region->piece_bytes, shared->region->pieces};
        for (uint32_t i = 0; i < shared->region->pieces; i++)
            copies[i] = fcntl(shared->memory[i], F_DUPFD_CLOEXEC, 3);
    }
    pthread_mutex_unlock(&lock);
    return copies;
}

static void serve(int fd)
{
    uint64_t serial;
    struct share_offer offer;
    cot_share_limit_waits(fd);
    if (!same_user(fd) || recv(fd, &serial, sizeof serial, 0) != (ssize_t)sizeof serial)
        return;
    int *copies = copies_of(serial, &offer);
    bool going = send(fd, &offer, sizeof offer, MSG_NOSIGNAL) == (ssize_t)sizeof offer;
    for (uint64_t i = 0; i < offer.pieces; i++)
        if (copies[i] >= 0) {
            going = going && cot_hand_pass(fd, copies[i], i, 0);
            close(copies[i]);
        } else
            going = false; /* this process has no free descriptors; the other process sees that the connection closes */
    free(copies);
}

static void *server(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "cotenant-share");
    while (!cot_exiting()) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0) {
            serve(fd);
            close(fd);
        } else if (errno != EINTR && errno != ECONNABORTED)
            cot_nap_for(COT_STALL_NS); /* this process has no free descriptors, so it accepts the connection later */
    }
    return NULL;
}

static bool start_server(void) /* the caller holds export_lock, so no other thread starts it */
{
    struct sockaddr_un address;
    if (listener >= 0)
        return true;
    /* called as a system call, since glibc has the function only from version 2.25 on */
    if (syscall(SYS_getrandom, &own_process, sizeof own_process, 0) != (long)sizeof own_process)
        return false;
    socklen_t length = cot_share_name(own_process, &address);
    int fd = cot_wire_high(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, length) == 0 && listen(fd, 64) == 0) {
        listener = fd;
        if (cot_start_thread(server, NULL))
            return true;
        listener = -1;
    }
    if (fd >= 0)
        close(fd);
    return false;
}

static struct shared *describe(struct region *region)
{
    struct shared *shared = calloc(1, sizeof *shared + region->pieces * sizeof shared->memory[0]);
    for (uint32_t i = 0; shared && i < region->pieces; i++) {
        int memory = region->piece[i].memory > 0 ? fcntl(region->piece[i].memory, F_DUPFD_CLOEXEC, 3)
                                                 : cot_hand_open(cot_swap_piece_address(region, i));
        if (memory < 0) {
            while (i > 0)
                close(shared->memory[--i]);
            free(shared);
            return NULL;
        }
        shared->memory[i] = cot_wire_high(memory);
    }
    return shared;
}

/* the caller holds export_lock, so no other thread starts it */
static CUresult export(CUdeviceptr address, struct share_handle *handle, bool *impossible)
{
    CUdeviceptr base;
    size_t bytes;
    struct region *region = cot_swap_keep(address, &base, &bytes);
    if (!region)
        /* the memory is evicted; that is possible if the call did not wait for a turn, because a stream is being
         * captured or the process is ending */
        return CUDA_ERROR_NOT_READY;
    if (!region->shared) {
        struct shared *shared = start_server() ? describe(region) : NULL;
        *impossible = shared == NULL;
        if (!shared)
            return CUDA_ERROR_NOT_SUPPORTED;
        pthread_mutex_lock(&lock);
        shared->region = region;
        shared->serial = ++last_serial;
        shared->next = shares;
        region->shared = shares = shared;
        pthread_mutex_unlock(&lock);
    }
    *handle = (struct share_handle){.process = own_process, .serial = region->shared->serial,
                                    .offset = base - region->address, .bytes = bytes};
    memcpy(handle->magic, SHARE_MAGIC, sizeof handle->magic);
    return CUDA_SUCCESS;
}

CUresult cot_share_export(CUdeviceptr address, void *handle)
{
    static _Atomic bool told;
    bool impossible = false;
    /* the region is on the GPU during a turn, so the call passes the turn gate first */
    struct calls *calls = cot_gate_enter((uintptr_t)cot_share_export, NULL);
    pthread_mutex_lock(&export_lock);
    CUresult result = export(address, handle, &impossible);
    pthread_mutex_unlock(&export_lock);
    struct gpu *gpu = cot_thread_gpu();
    cot_gate_exit(calls);
    if (impossible)
        cot_swap_fix("the program shares memory with other processes (cuIpcGetMemHandle), which is not possible for memory "
                     "that is swapped; start it without --oversubscribe swap");
    if (result != CUDA_SUCCESS || !gpu)
        return result;
    cot_swap_report_state(gpu);
    if (!atomic_exchange(&told, true))
        cot_agent_warn(COTENANT_WARN_NOT_MOVABLE,
                       "memory that this process shares with other processes (CUDA IPC) stays on the GPU, %llu MiB so far; the rest "
                       "is still swapped",
                       (unsigned long long)(cot_swap_of(gpu)->staying_bytes >> 20));
    return result;
}

void cot_share_end(struct region *region)
{
    struct shared *shared = region->shared;
    pthread_mutex_lock(&lock);
    for (struct shared **link = &shares; *link; link = &(*link)->next)
        if (*link == shared) {
            *link = shared->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    for (uint32_t i = 0; i < region->pieces; i++)
        close(shared->memory[i]);
    free(shared);
    region->shared = NULL;
}

bool cot_share_is_own(const struct share_handle *handle)
{
    return own_process && handle->process == own_process;
}

/* Called in the child of a fork: closes the inherited descriptors of shared memory, which would keep the memory in use
 * as long as the child runs, and the inherited socket, on which the child would not answer other processes. */
void cot_share_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&lock, &fresh, sizeof fresh);
    memcpy(&export_lock, &fresh, sizeof fresh);
    for (struct shared *shared = shares; shared; shared = shared->next)
        for (uint32_t i = 0; i < shared->region->pieces; i++)
            close(shared->memory[i]);
    if (listener >= 0)
        close(listener);
    shares = NULL;
    own_process = 0;
    listener = -1;
    cot_opened_reset_after_fork();
}
