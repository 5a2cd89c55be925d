/* Handle transfer: passes device memory from a process that is being evicted to a process that is being restored.
 *
 * The driver clears released memory with a copy engine before the memory can be allocated again. The copies of the
 * process that is restored need that engine at the same time. But memory need not be cleared if the restored contents
 * will overwrite it completely. So instead of being released, such memory is passed to the other process, as one
 * descriptor for each piece. The agent makes a pair of connected sockets for the descriptors. It sends one of them to
 * each of the two processes, together with the order to evict or restore memory. Memory that has not been taken when
 * the sockets are closed becomes free. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "swap/swap.h"

#define AS_DESCRIPTOR SWAP_SHARED_AS_DESCRIPTOR

/* this many descriptors are left to the program; those of the shim have higher numbers (cot_wire_high) */
#define PROGRAMS_OWN 700
#define MOST_DESCRIPTORS 16384

struct swap_hand cot_hand = {.socket = -1};
static _Atomic int descriptors;


union control {
    struct cmsghdr aligned;
    char bytes[CMSG_SPACE(sizeof(int))];
};

/* Returns a descriptor of the device memory behind an address, or -1. */
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
        /* a program that this process executes must not inherit the descriptor, since it would keep the memory in
         * use */
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    return fd;
}

/* Sends a descriptor of device memory and a number over a socket. */
bool cot_hand_pass(int socket, int memory, uint64_t number, int flags)
{
    union control control = {0};
    struct iovec part = {.iov_base = &number, .iov_len = sizeof number};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof memory);
    memcpy(CMSG_DATA(c), &memory, sizeof memory);
    return sendmsg(socket, &message, MSG_NOSIGNAL | flags) == (ssize_t)sizeof number;
}

/* Sends the descriptor `memory` of device memory to the other process and closes it. If it cannot be sent, the memory
 * becomes free. */
bool cot_hand_send(int memory, uint64_t bytes)
{
    bool sent = cot_hand_pass(cot_hand.socket, memory, bytes, MSG_DONTWAIT);
    cot_hand.memory = 0;
    close(memory);
    return sent;
}

/* returns the received descriptor; -1 if none has arrived */
int cot_hand_receive(int socket, uint64_t *number, int flags)
{
    union control control;
    struct iovec part = {.iov_base = number, .iov_len = sizeof *number};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int memory = -1;
    if (socket < 0 || recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags) != (ssize_t)sizeof *number)
        return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof memory))
        memcpy(&memory, CMSG_DATA(c), sizeof memory);
    return memory;
}

/* Removes an entry from the list of kept memory, and makes its descriptor the one that the mover (the thread that
 * evicts and restores contents) is handling. */
static int take_kept(uint32_t index)
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

/* Finds memory of exactly this size that an evicted process has sent. Returns its descriptor and a handle to it, or
 * -1. Memory of other sizes is kept for later requests. */
int cot_hand_take(uint64_t bytes, uint64_t *handle)
{
    uint64_t size;
    for (int memory; (memory = cot_hand_receive(cot_hand.socket, &size, MSG_DONTWAIT)) >= 0;) {
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

/* Returns how many descriptors may be kept; it is 324 if the process has the usual limit of 1024. */
static int most_descriptors(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur <= PROGRAMS_OWN)
        return 0;
    return limit.rlim_cur - PROGRAMS_OWN < MOST_DESCRIPTORS ? (int)(limit.rlim_cur - PROGRAMS_OWN) : MOST_DESCRIPTORS;
}

/* Stores the descriptor of memory from another process in the piece that uses the memory. If no more descriptors may
 * be kept, it closes the descriptor instead. */
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

/* Takes the stored descriptor out of a piece; -1: the piece has none. Device memory exists as long as any process has a
 * descriptor of it. */
int cot_hand_part_with(struct region_piece *piece)
{
    int memory = piece->memory;
    if (memory <= 0)
        return -1;
    piece->memory = 0;
    atomic_fetch_sub(&descriptors, 1);
    return memory;
}

/* Frees the memory that was received from other processes but not used. Returns true if there was any. */
bool cot_hand_free(void)
{
    uint64_t size;
    bool any = cot_hand.count > 0;
    while (cot_hand.count)
        cot_hand_let_go(take_kept(0));
    for (int memory; (memory = cot_hand_receive(cot_hand.socket, &size, MSG_DONTWAIT)) >= 0; any = true)
        close(memory);
    return any;
}

/* Closes all descriptors in the child of a fork, which would otherwise keep the memory in use as long as it runs. */
void cot_hand_reset_after_fork(void)
{
    if (cot_hand.memory > 0)
        close(cot_hand.memory);
    while (cot_hand.count)
        close(cot_hand.kept[--cot_hand.count].memory);
    cot_hand.memory = 0;
    cot_hand.socket = -1;
}
