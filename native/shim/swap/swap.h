/* Swappable memory: allocations of a tenant that oversubscribes the GPU keep their addresses while their contents are evicted to host memory.
 *
 * swap/swap.c    the agent's settings, where contents are, and which orders may run
 * swap/list.c    the list of allocations
 * swap/region.c  the life of an allocation: its addresses, the memory mapped to them, small allocations packed together
 * swap/move.c    the mover thread, which moves contents out and in
 * swap/copy.c    copies between a piece and its place in host memory; pinning of that memory
 * swap/hand.c    handle transfer: passes device memory from one process to the next
 * swap/share.c   memory that other processes open (CUDA IPC), on the owner's side
 * swap/opened.c  the same memory on the side of the processes that open it
 * wrap/swap.c    driver functions that would not work with an allocation that moves
 *
 * A *region* is a range of addresses for one allocation, or for a *slab* of small allocations; memory is mapped to it in
 * *pieces*.  A piece is HERE (resident: memory is mapped), AWAY (evicted: its contents are in host memory) or EMPTY (it never
 * had memory, because it was allocated while its process was evicted).  A piece changes between HERE and the other states
 * only on the mover thread while `moving` is set, or while its region is not in the list. */
#ifndef COTENANT_SWAP_H
#define COTENANT_SWAP_H

#include "shim.h"

#define SWAP_GRANULE (UINT64_C(2) << 20)
#define SWAP_PIECE (UINT64_C(256) << 20) /* the largest piece, unless the agent sets another size */
/* Smaller pieces are released instead of being passed to another process. Passing a piece saves the time in which the
 * driver clears it, and small pieces are cleared quickly. */
#define SWAP_SHARED_LEAST (UINT64_C(16) << 20)
#define SWAP_SHARED_AS_DESCRIPTOR 1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
/* host memory is registered with the driver in spans of this length; copies are split at the ends of spans */
#define SWAP_PIN_STEP (UINT64_C(256) << 20)

enum piece_state { PIECE_EMPTY, PIECE_HERE, PIECE_AWAY };

struct region_piece {
    enum piece_state state;
    uint64_t backing; /* offset of the piece's contents in the host memory */
    /* descriptor of memory that came from another process, which can be passed on but not exported a second time; 0:
     * none */
    int memory;
};

struct region {
    CUdeviceptr address;
    uint64_t bytes;       /* multiple of SWAP_GRANULE */
    uint64_t asked_bytes;
    struct gpu *gpu;
    CUcontext context;
    struct slab *slab;    /* the slab whose small allocations are in this region, or NULL */
    bool managed;
    bool stays;             /* the region is never evicted any more, so all its pieces are HERE */
    struct shared *shared;  /* data of the handle by which other processes open this region; NULL: there is no handle */
    struct region *next;
    uint64_t piece_bytes; /* size of a piece, as the agent had set it when the region was created */
    uint32_t pieces;
    struct region_piece piece[];
};

/* The movable memory of one GPU; protected by cot_lock. */
struct swap_gpu {
    uint64_t here_bytes;
    uint64_t away_bytes;  /* sum of the sizes of pieces in state PIECE_AWAY or PIECE_EMPTY */
    /* sum of the sizes of regions that stay on the GPU; the other two sums do not include these regions */
    uint64_t staying_bytes;
    bool moving;
};

/* An order to the mover, the thread that evicts and restores contents; protected by cot_lock. */
struct swap_order {
    uint16_t type;        /* type of the agent's message, MOVE_OUT or MOVE_IN; 0: no order */
    uint64_t sequence;
    struct gpu *gpu;
    uint64_t bytes, base, span_bytes;
    /* socket over which device memory is passed to or from another process (handle transfer); -1: none is passed. The
     * mover thread closes this socket. */
    int hand;
};

/* The times of a move, which are reported to the agent. */
struct swap_times {
    uint64_t elapsed_ns; /* duration of the move, without the waits for MOVE_ALLOW */
    uint64_t mapping_ns; /* part of elapsed_ns in which memory was mapped and unmapped */
    uint64_t copying_ns; /* part of elapsed_ns in which the mover waited for copies */
    uint64_t handed_bytes; /* bytes of device memory that were passed to or from another process */
};

/* ---- swap.c ---- */
/* returns a cotenant_oversubscribe; NONE if the memory of this process must not be evicted */
HIDDEN uint32_t cot_swap_mode(void);
HIDDEN struct swap_gpu *cot_swap_of(const struct gpu *gpu);
HIDDEN uint8_t *cot_swap_backing(uint64_t *bytes); /* the mapped host memory that holds evicted contents */
HIDDEN uint64_t cot_swap_piece(void);           /* the size of a full piece in a new region */
HIDDEN void cot_swap_take_terms(const struct cotenant_hello_reply *terms);
/* The caller holds cot_lock. If the function takes the passed descriptor over, it sets *passed_fd to -1. */
HIDDEN void cot_swap_message(struct gpu *gpu, const struct cotenant_message *message, int *passed_fd);
/* returns whether a launch now would access memory that is not mapped; the caller holds cot_lock */
HIDDEN bool cot_swap_is_away(const struct gpu *gpu);
HIDDEN void cot_swap_report(struct gpu *gpu, uint16_t type, uint64_t sequence, uint32_t status, uint64_t moved_bytes,
                            const struct swap_times *times);
HIDDEN void cot_swap_report_state(struct gpu *gpu);
HIDDEN void cot_swap_fix(const char *why);      /* makes sure that from now on no memory of this process is evicted */
/* calls cot_swap_fix if the address is in movable memory */
HIDDEN bool cot_swap_fix_around(CUdeviceptr address, const char *why);
HIDDEN void cot_swap_context_made(struct gpu *gpu);
/* the caller holds cot_lock, which protects orders and the sums of swap_gpu */
HIDDEN void cot_swap_agent_lost(void);
HIDDEN void cot_swap_reset_after_fork(void);
/* the mover waits here for an order; false: the process is ending */
HIDDEN bool cot_swap_next_order(struct swap_order *order);
HIDDEN void cot_swap_order_done(const struct swap_order *order, uint32_t status, uint64_t moved_bytes,
                                const struct swap_times *times);
/* the mover waits here for MOVE_ALLOW; false: the agent allows no more bytes, or is lost */
HIDDEN bool cot_swap_wait_allowed(uint64_t total_bytes);
HIDDEN bool cot_swap_make_room(struct gpu *gpu, uint64_t bytes, bool *later);
/* asks the agent to evict other tenants' memory now, before the next turn */
HIDDEN bool cot_swap_room_now(struct gpu *gpu, uint64_t bytes, uint32_t flags);

/* ---- swap/list.c ---- */
#define SMALLEST_SLOT 512
#define SLAB_CLASSES 12 /* sizes of the slots of slabs, from 512 B to 1 MiB */
#define LARGEST_SLOT (SWAP_GRANULE / 2)

struct slab {
    struct region *region;
    uint32_t slot_bytes, slots, used;
    struct slab *next;                            /* next slab in the list of those that have slots of this size */
    /* for each slot of the slab, the size that the program requested; 0: the slot is free */
    uint32_t asked[SWAP_GRANULE / SMALLEST_SLOT];
};

/* protects the list of regions; taken after cot_lock, and never held during a driver call */
extern HIDDEN pthread_mutex_t cot_swap_lock;
extern HIDDEN struct slab *cot_slabs[COTENANT_MAX_GPUS][SLAB_CLASSES];
HIDDEN bool cot_swap_any(void); /* whether this process has movable allocations */
HIDDEN uint32_t cot_slab_class(uint64_t bytes);
/* the caller holds cot_lock, which protects the sums of swap_gpu */
HIDDEN void cot_swap_publish(struct region *region);
/* the caller holds cot_lock and cot_swap_lock, which protect the sums and the list of regions */
HIDDEN void cot_swap_unlink(struct region *region);
/* the caller holds cot_swap_lock, which protects the list of regions */
HIDDEN struct region *cot_swap_find_start(CUdeviceptr address);
HIDDEN struct region *cot_swap_find_of(const struct gpu *gpu, CUcontext context);
/* finds the base and size of the allocation that contains the address */
HIDDEN bool cot_swap_extent(CUdeviceptr address, CUdeviceptr *base, size_t *bytes);
HIDDEN bool cot_swap_is_managed(CUdeviceptr address);
HIDDEN struct region *cot_swap_keep(CUdeviceptr address, CUdeviceptr *base, size_t *bytes);
/* returns the regions of a GPU in an array from malloc, largest first */
HIDDEN struct region **cot_swap_snapshot(const struct gpu *gpu, uint32_t *count);
HIDDEN void cot_swap_backing_range(uint64_t *low, uint64_t *high);
HIDDEN void cot_swap_list_reset(void);

/* ---- swap/region.c ---- */
HIDDEN CUresult cot_swap_allocate(struct gpu *gpu, CUdeviceptr *out, uint64_t bytes);
/* returns false if no movable allocation begins at the address */
HIDDEN bool cot_swap_free(CUdeviceptr address, CUresult *result);
HIDDEN void cot_swap_forget_context(struct gpu *gpu, CUcontext context);
HIDDEN uint64_t cot_swap_piece_bytes(const struct region *region, uint32_t index);
HIDDEN CUdeviceptr cot_swap_piece_address(const struct region *region, uint32_t index);
/* maps the memory of a handle at an address; releases the handle also if the mapping fails */
HIDDEN CUresult cot_swap_map(CUdeviceptr address, uint64_t bytes, uint64_t handle, CUdevice device);
HIDDEN CUresult cot_swap_place_piece(struct region *region, uint32_t index, uint64_t handle);
HIDDEN CUresult cot_swap_map_piece(struct region *region, uint32_t index);
HIDDEN CUresult cot_swap_unmap_piece(struct region *region, uint32_t index);

/* ---- swap/move.c ---- */
HIDDEN void *cot_swap_mover(void *unused);

/* ---- swap/hand.c ---- */
#define SWAP_KEPT 32
struct swap_hand {
    int socket; /* socket to the process at the other end of the handle transfer; -1: there is none */
    _Atomic int memory; /* descriptor of the device memory that the mover is handling now; 0: none */
    uint32_t count;
    struct {
        int memory; /* descriptor of device memory that was received from the other process and is not used yet */
        uint64_t bytes;
    } kept[SWAP_KEPT];
};
extern HIDDEN struct swap_hand cot_hand; /* the handle transfer of the current move */
HIDDEN int cot_hand_open(CUdeviceptr address);
/* closes the descriptor, which frees the device memory unless another process uses it */
HIDDEN void cot_hand_let_go(int memory);
HIDDEN bool cot_hand_pass(int socket, int memory, uint64_t number, int flags);
HIDDEN int cot_hand_receive(int socket, uint64_t *number, int flags);
HIDDEN bool cot_hand_send(int memory, uint64_t bytes);
HIDDEN int cot_hand_take(uint64_t bytes, uint64_t *handle);
HIDDEN void cot_hand_keep(struct region_piece *piece, int memory);
HIDDEN int cot_hand_part_with(struct region_piece *piece);
HIDDEN bool cot_hand_free(void);
HIDDEN void cot_hand_reset_after_fork(void);

/* ---- swap/share.c, swap/opened.c ---- */
HIDDEN CUresult cot_share_export(CUdeviceptr address, void *handle);
HIDDEN void cot_share_end(struct region *region);
HIDDEN bool cot_share_is_handle(const struct cu_ipc_handle *handle);
HIDDEN CUresult cot_share_open(CUdeviceptr *out, const struct cu_ipc_handle *given);
/* returns false if the address was not opened by cot_share_open */
HIDDEN bool cot_share_close(CUdeviceptr address, CUresult *result);
HIDDEN bool cot_share_extent(CUdeviceptr address, CUdeviceptr *base, size_t *bytes);
HIDDEN void cot_share_forget_context(CUcontext context);
HIDDEN void cot_share_reset_after_fork(void);

/* ---- swap/copy.c ---- */
struct lane; /* a lane: the stream for the mover's copies in one direction, and its events */
/* called only by the mover, the thread that copies memory in and out; the first call creates the lane */
HIDDEN struct lane *cot_swap_lane(struct gpu *gpu, bool out);
HIDDEN CUresult cot_swap_copy(struct lane *lane, CUdeviceptr device, uint64_t backing, uint64_t bytes, uint32_t ticket);
/* waits for the end of the copy that cot_swap_copy began with this ticket */
HIDDEN CUresult cot_swap_copied(struct lane *lane, uint32_t ticket);
HIDDEN CUresult cot_swap_prefetch(struct lane *lane, CUdeviceptr device, uint64_t bytes, int where, uint32_t ticket);
HIDDEN void *cot_swap_pinner(void *context);
HIDDEN uint64_t cot_swap_pinned_bytes(void);
HIDDEN uint64_t cot_swap_usable_bytes(void); /* size of the host memory that the system can really provide */
HIDDEN void cot_swap_copy_reset(void);
#define SWAP_TICKETS 8 /* largest number of copies in flight on one lane */

#endif
