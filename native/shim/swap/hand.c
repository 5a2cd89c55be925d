/* Device memory that goes, as it is, from a process that leaves the GPU to one that comes.
 *
 * The driver clears what is given back to it with a copy engine before anybody can have it again, and the copies of the
 * process that comes need that engine at the same time.  A piece needs no clearing where each byte of it is written over
 * by contents that return: it goes to the other process as a descriptor, over a socket that both got with their orders.
 * What nobody has taken from it when it is closed is free. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "swap/swap.h"

#define AS_DESCRIPTOR SWAP_SHARED_AS_DESCRIPTOR

#define PROGRAMS_OWN 700 /* descriptors that the program may need itself; ours stand above (cot_wire_high) */
#define MOST_DESCRIPTORS 16384

struct swap_hand cot_hand = {.socket = -1};
static _Atomic int descriptors;


union control {
    struct cmsghdr aligned;
    char bytes[CMSG_SPACE(sizeof(int))];
};

/* A descriptor of the memory behind an address, or -1. */
int cot_hand_open(CUdeviceptr address)
{
    uint64_t handle;
    int fd = -1;
    if (REAL(cuMemRetainAllocationHandle)(&handle, (void *)address) != CUDA_SUCCESS)
        return -1;
    if (REAL(cuMemExportToShareableHandle)(&fd, handle, AS_DESCRIPTOR, 0) !=
        CUDA_SUCCESS)
        fd = -1;
    REAL(cuMemRelease)(handle);
    if (fd >= 0)
        fcntl(fd, F_SETFD, FD_CLOEXEC); /* or a program that is started now would keep the memory taken */
    return fd;
}

/* Closes `memory`: when it could not be sent, it is free. */
bool cot_hand_send(int memory, uint64_t bytes)
{
    union control control = {0};
    struct iovec part = {.iov_base = &bytes, .iov_len = sizeof bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof memory);
    memcpy(CMSG_DATA(c), &memory, sizeof memory);
    bool sent = sendmsg(cot_hand.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof bytes;
    cot_hand.memory = 0;
    close(memory);
    return sent;
}

static int receive(uint64_t *bytes) /* -1: nothing is there */
{
    union control control;
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof *bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int memory = -1;
    if (cot_hand.socket < 0 || recvmsg(cot_hand.socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *bytes)
        return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof memory))
        memcpy(&memory, CMSG_DATA(c), sizeof memory);
    return memory;
}

static int take_kept(uint32_t index) /* into the mover's hands */
{
    int memory = cot_hand.memory = cot_hand.kept[index].memory;
    memmove(&cot_hand.kept[index], &cot_hand.kept[index + 1], (--cot_hand.count - index) * sizeof cot_hand.kept[0]);
    return memory;
}

void cot_hand_let_go(int memory)
{
    cot_hand.memory = 0;
    close(memory);
}

static bool import(int memory, uint64_t *handle)
{
    return REAL(cuMemImportFromShareableHandle)(handle, (void *)(intptr_t)memory,
                                                                                      AS_DESCRIPTOR) == CUDA_SUCCESS;
}

/* Memory of just that size which somebody has left: its descriptor and a handle of it, or -1.  Other sizes are kept for a while. */
int cot_hand_take(uint64_t bytes, uint64_t *handle)
{
    uint64_t size;
    for (int memory; (memory = receive(&size)) >= 0;) {
        if (cot_hand.count == SWAP_KEPT)
            cot_hand_let_go(take_kept(0));
        cot_hand.kept[cot_hand.count].memory = memory;
        cot_hand.kept[cot_hand.count++].bytes = size;
    }
    for (uint32_t i = 0; i < cot_hand.count;) {
        if (cot_hand.kept[i].bytes != bytes) {
            i++;
            continue;
        }
        int memory = take_kept(i);
        if (import(memory, handle))
            return memory;
        cot_hand_let_go(memory);
    }
    return -1;
}

/* How many descriptors may be kept: a limit of 1024, which is usual, spares 324. */
static int most_descriptors(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur <= PROGRAMS_OWN)
        return 0;
    return limit.rlim_cur - PROGRAMS_OWN < MOST_DESCRIPTORS ? (int)(limit.rlim_cur - PROGRAMS_OWN) : MOST_DESCRIPTORS;
}

/* With a piece that has memory of another process, as long as there are descriptors to spare. */
void cot_hand_keep(struct region_piece *piece, int memory)
{
    if (atomic_fetch_add(&descriptors, 1) < most_descriptors()) {
        piece->memory = cot_wire_high(memory);
        cot_hand.memory = 0;
    } else {
        atomic_fetch_sub(&descriptors, 1);
        cot_hand_let_go(memory);
    }
}

/* -1: it had none.  The memory lives as long as anybody has a descriptor of it. */
int cot_hand_part_with(struct region_piece *piece)
{
    int memory = piece->memory;
    if (memory <= 0)
        return -1;
    piece->memory = 0;
    atomic_fetch_sub(&descriptors, 1);
    return memory;
}

/* Everything that is kept is free; true if there was something. */
bool cot_hand_free(void)
{
    uint64_t size;
    bool any = cot_hand.count > 0;
    while (cot_hand.count)
        cot_hand_let_go(take_kept(0));
    for (int memory; (memory = receive(&size)) >= 0; any = true)
        close(memory);
    return any;
}

/* A child would keep the memory taken as long as it lives. */
void cot_hand_reset_after_fork(void)
{
    if (cot_hand.memory > 0)
        close(cot_hand.memory);
    while (cot_hand.count)
        close(cot_hand.kept[--cot_hand.count].memory);
    cot_hand.memory = 0;
    cot_hand.socket = -1;
}
