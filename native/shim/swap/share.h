/* Handles of movable memory that processes share, and the messages that the owner and the opening process exchange. */
#ifndef COTENANT_SHARE_H
#define COTENANT_SHARE_H

#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "swap/swap.h"

#define SHARE_PATIENCE_S 10 /* longest wait of a process for a message of the other process, which may be suspended */

#define SHARE_MAGIC "cotenant-shared"

/* what a program gets instead of a CUipcMemHandle; the handles of one allocation are always equal, since libraries
 * compare them */
struct share_handle {
    char magic[16];
    uint64_t process; /* random number of the process that owns the memory */
    uint64_t serial;  /* serial number of the region to which the handle belongs */
    uint64_t offset;  /* offset of the allocation in its region */
    uint64_t bytes;   /* size of the allocation */
    uint64_t zero[2];
};
_Static_assert(sizeof(struct share_handle) == sizeof(struct cu_ipc_handle), "a share_handle does not fit into a cu_ipc_handle");

/* the answer of the process that owns the memory; after it comes one message with a descriptor for each piece */
struct share_offer {
    uint64_t bytes, piece_bytes;
    uint64_t pieces; /* 0: the owner has freed the memory */
};

HIDDEN socklen_t cot_share_name(uint64_t process, struct sockaddr_un *address);
HIDDEN void cot_share_limit_waits(int fd);
HIDDEN bool cot_share_is_own(const struct share_handle *handle);
HIDDEN void cot_opened_reset_after_fork(void);

#endif
