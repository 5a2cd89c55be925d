/* Controls swapping as the agent configures and orders it: stores the agent's settings, reports where contents are,
 * and decides when an order may run (see swap.h). */
#define _GNU_SOURCE
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "swap/swap.h"

/* Libraries that pass the physical memory of plain allocations to other processes or to the network without a call
 * that the shim could notice. If a program has loaded one of them, all its memory stays resident.
 * $COTENANT_FIXED_WITH names further libraries, separated by commas. Libraries that PyTorch always loads (NCCL,
 * NVSHMEM, cuFile) are not listed, because the shim detects when they pass memory on. */
static const char *const fixing_libraries[] = {"libuct_cuda", "libmpi_gtl_cuda"};

#define HOST_NUMA_ID_ATTRIBUTE 134
#define MPOL_PREFERRED 1


static uint32_t mode;
static uint8_t *backing;
static uint64_t backing_bytes;
static uint64_t piece_bytes = SWAP_PIECE;
static bool fixed, looked_at_libraries, threads_started;
static struct swap_gpu swap_gpus[COTENANT_MAX_GPUS];
static struct swap_order order;
static uint64_t allowed_bytes;
static bool agent_is_lost, stopped;
/* signalled when the mover (the thread that evicts and restores contents) has something to do; used together with
 * cot_lock */
static pthread_cond_t order_changed = PTHREAD_COND_INITIALIZER;

struct swap_gpu *cot_swap_of(const struct gpu *gpu)
{
    return &swap_gpus[gpu - cot_gpu_at(0)];
}

uint8_t *cot_swap_backing(uint64_t *bytes)
{
    *bytes = backing_bytes;
    return backing;
}

uint64_t cot_swap_piece(void)
{
    return piece_bytes;
}

/* Stores the agent's settings for this tenant. A process that reconnects to a new agent keeps its host memory, which
 * may hold evicted contents. */
void cot_swap_take_terms(const struct cotenant_hello_reply *terms)
{
    if (!threads_started)
        mode = terms->oversubscribe <= COTENANT_OVERSUBSCRIBE_PARK ? terms->oversubscribe : COTENANT_OVERSUBSCRIBE_NONE;
    pthread_mutex_lock(&cot_lock);
    agent_is_lost = false;
    pthread_mutex_unlock(&cot_lock);
}

/* Maps the file at an address that is aligned for huge pages. With huge pages the copy engines translate fewer
 * addresses. */
static void *map_aligned(int fd, uint64_t bytes)
{
    uint8_t *span = mmap(NULL, bytes + SWAP_GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (span == MAP_FAILED)
        return MAP_FAILED;
    uint8_t *at = (uint8_t *)(((uintptr_t)span + SWAP_GRANULE - 1) & ~(uintptr_t)(SWAP_GRANULE - 1));
    void *mapped = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED)
        munmap(span, bytes + SWAP_GRANULE);
    return mapped;
}

/* Asks the kernel to place the memory on the NUMA node to which the GPU is attached. */
static void place_near(const struct gpu *gpu, void *mapped, uint64_t bytes)
{
    int node = -1;
    if (REAL(cuDeviceGetAttribute)(&node, HOST_NUMA_ID_ATTRIBUTE, gpu->device) !=
            CUDA_SUCCESS ||
        node < 0 || node >= 1024)
        return;
    unsigned long nodes[1024 / (8 * sizeof(unsigned long))] = {0};
    nodes[node / (8 * sizeof nodes[0])] = 1ul << (node % (8 * sizeof nodes[0]));
    syscall(SYS_mbind, mapped, bytes, MPOL_PREFERRED, nodes, 1024ul, 0u);
}

static bool map_backing(const struct gpu *gpu)
{
    struct cotenant_move ask = {0};
    struct cotenant_message reply;
    int fd;
    if (cot_agent_call_fd(COTENANT_MOVE_BACKING, COTENANT_NO_SLOT, &ask, sizeof ask, &reply, &fd) != 0)
        return false;
    uint64_t bytes = reply.body.move.backing_bytes;
    uint64_t piece = reply.body.move.piece_bytes;
    void *mapped = fd >= 0 && bytes ? map_aligned(fd, bytes) : MAP_FAILED;
    if (fd >= 0)
        close(fd);
    if (mapped == MAP_FAILED)
        return false;
    madvise(mapped, bytes, MADV_HUGEPAGE);
    madvise(mapped, bytes, MADV_DONTDUMP);
    /* child processes do not need this memory, and copying it would be expensive */
    madvise(mapped, bytes, MADV_DONTFORK);
    place_near(gpu, mapped, bytes);
    backing = mapped;
    backing_bytes = bytes;
    if (piece >= SWAP_GRANULE && piece % SWAP_GRANULE == 0)
        piece_bytes = piece; /* existing regions keep the size of their pieces */
    return true;
}

/* ---- programs whose memory must not be evicted ---- */

void cot_swap_fix(const char *why)
{
    if (fixed || mode == COTENANT_OVERSUBSCRIBE_NONE)
        return;
    pthread_mutex_lock(&cot_lock);
    fixed = true; /* no further order to evict memory is accepted; an order that is being carried out ends first */
    for (uint32_t i = 0; i < COTENANT_MAX_GPUS; i++)
        while (swap_gpus[i].moving && !cot_exiting())
            pthread_cond_wait(&cot_changed, &cot_lock);
    pthread_mutex_unlock(&cot_lock);
    cot_agent_warn(COTENANT_WARN_NOT_MOVABLE, "memory of this process stays on the GPU: %s", why);
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->attached)
            cot_swap_report_state(cot_gpu_at(i));
}

static bool is_listed(const char *base, const char *list)
{
    for (const char *name = list; name && *name;) {
        size_t length = strcspn(name, ",");
        if (length && strncmp(base, name, length) == 0)
            return true;
        name += length + (name[length] == ',');
    }
    return false;
}

static int look_at_library(struct dl_phdr_info *info, size_t size, void *found)
{
    (void)size;
    const char *base = strrchr(info->dlpi_name, '/');
    base = base ? base + 1 : info->dlpi_name;
    bool listed = is_listed(base, getenv("COTENANT_FIXED_WITH"));
    for (size_t i = 0; i < sizeof fixing_libraries / sizeof fixing_libraries[0]; i++)
        listed = listed || strncmp(base, fixing_libraries[i], strlen(fixing_libraries[i])) == 0;
    if (listed)
        *(const char **)found = base;
    return listed;
}

uint32_t cot_swap_mode(void)
{
    if (mode == COTENANT_OVERSUBSCRIBE_NONE || fixed)
        return COTENANT_OVERSUBSCRIBE_NONE;
    if (!looked_at_libraries) {
        const char *library = NULL;
        looked_at_libraries = true;
        if (mode == COTENANT_OVERSUBSCRIBE_SWAP && dl_iterate_phdr(look_at_library, &library) && library) {
            char why[160];
            snprintf(why, sizeof why, "the program has loaded %.80s, which passes memory to other processes", library);
            cot_swap_fix(why);
            return COTENANT_OVERSUBSCRIBE_NONE;
        }
    }
    return mode;
}

/* ---- reports to the agent ---- */

void cot_swap_report(struct gpu *gpu, uint16_t type, uint64_t sequence, uint32_t status, uint64_t moved_bytes,
                     const struct swap_times *times)
{
    static const struct swap_times none;
    times = times ? times : &none;
    struct swap_gpu *state = cot_swap_of(gpu);
    struct cotenant_move move = {.bytes = moved_bytes, .resident_bytes = state->here_bytes, .away_bytes = state->away_bytes,
                                 .backing_bytes = cot_swap_usable_bytes(), .pinned_bytes = cot_swap_pinned_bytes(),
                                 .elapsed_ns = times->elapsed_ns, .mapping_ns = times->mapping_ns,
                                 .copying_ns = times->copying_ns, .handed_bytes = times->handed_bytes,
                                 .staying_bytes = state->staying_bytes,
                                 .flags = fixed ? COTENANT_MOVE_FIXED : 0};
    if (type != COTENANT_MOVE_PROGRESS)
        cot_swap_backing_range(&move.backing_low, &move.backing_high);
    if (!gpu->stale)
        cot_agent_answer(type, gpu->slot, sequence, status, &move, sizeof move);
}

void cot_swap_report_state(struct gpu *gpu)
{
    if (mode != COTENANT_OVERSUBSCRIBE_NONE)
        cot_swap_report(gpu, COTENANT_MOVE_STATE, 0, COTENANT_OK, 0, NULL);
}

/* Called when the GPU is full: asks the agent to evict other tenants' memory. Returns true if the caller should try
 * again. Sets *later if the memory need not be on the GPU before the next turn. */
bool cot_swap_make_room(struct gpu *gpu, uint64_t bytes, bool *later)
{
    struct cotenant_move ask = {.bytes = bytes, .resident_bytes = cot_swap_of(gpu)->here_bytes,
                                .away_bytes = cot_swap_of(gpu)->away_bytes};
    struct cotenant_message reply;
    *later = false;
    if (cot_agent_call(COTENANT_MOVE_ROOM, gpu->slot, &ask, sizeof ask, &reply) != 0)
        return false;
    *later = reply.header.status == COTENANT_DENIED;
    return reply.header.type == COTENANT_MOVE_ROOM_REPLY && reply.header.status == COTENANT_OK;
}

/* Called when other tenants occupy the GPU and an allocation must be on the GPU at once (one that cannot be swapped,
 * or a context): asks the agent to evict their memory now. Returns false if the agent answers that it could not. */
bool cot_swap_room_now(struct gpu *gpu, uint64_t bytes, uint32_t flags)
{
    struct cotenant_move ask = {.bytes = bytes, .flags = COTENANT_MOVE_NOW | flags};
    struct cotenant_message reply;
    return cot_agent_call(COTENANT_MOVE_ROOM, gpu->slot, &ask, sizeof ask, &reply) != 0 ||
           (reply.header.type == COTENANT_MOVE_ROOM_REPLY && reply.header.status == COTENANT_OK);
}

/* Returns the time until the end of the current turn, for programs that can release memory before it ends
 * (hooks/sitecustomize.py); UINT64_MAX while no other tenant waits. */
EXPORT uint64_t cotenant_turn_left_ns(void)
{
    uint64_t left = UINT64_MAX, now = cot_now_ns();
    pthread_mutex_lock(&cot_lock);
    for (uint32_t i = 0; i < cot_gpu_count(); i++) {
        struct gpu *gpu = cot_gpu_at(i);
        if (!gpu->attached || gpu->state != GATE_OPEN || !(gpu->page_slot->flags & COTENANT_SLOT_CONTENDED) ||
            gpu->deadline_ns == COTENANT_NO_DEADLINE)
            continue;
        uint64_t here = gpu->deadline_ns > now ? gpu->deadline_ns - now : 0;
        left = here < left ? here : left;
    }
    pthread_mutex_unlock(&cot_lock);
    return left;
}

/* ---- orders ---- */

bool cot_swap_is_away(const struct gpu *gpu)
{
    const struct swap_gpu *state = cot_swap_of(gpu);
    return state->moving || state->away_bytes > 0;
}

static bool may_move(struct gpu *gpu, bool out)
{
    bool closed = gpu->state == GATE_CLOSED || gpu->state == GATE_REQUESTED;
    return closed && !cot_swap_of(gpu)->moving && order.type == 0 && threads_started && !(out && fixed);
}

void cot_swap_message(struct gpu *gpu, const struct cotenant_message *message, int *passed_fd)
{
    const struct cotenant_move *move = &message->body.move;
    uint16_t type = message->header.type;
    if (type == COTENANT_MOVE_ALLOW) {
        if (move->bytes > allowed_bytes)
            allowed_bytes = move->bytes;
        stopped = stopped || move->flags & COTENANT_MOVE_STOP;
    } else if (!may_move(gpu, type == COTENANT_MOVE_OUT)) {
        cot_swap_report(gpu, COTENANT_MOVE_DONE, message->header.sequence, COTENANT_DENIED, 0, NULL);
    } else {
        order = (struct swap_order){.type = type, .sequence = message->header.sequence, .gpu = gpu, .bytes = move->bytes,
                                    .base = move->base, .span_bytes = move->span_bytes, .hand = cot_wire_high(*passed_fd)};
        *passed_fd = -1;
        allowed_bytes = move->bytes;
        stopped = false;
        cot_swap_of(gpu)->moving = true;
    }
    pthread_cond_broadcast(&order_changed);
}

static void wait_a_while(void) /* the caller holds cot_lock, which is released during the wait */
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 200000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&order_changed, &cot_lock, &until);
}

/* Called if there is no agent but launches may continue (fail: open): orders that the process's evicted memory be
 * restored first. The caller holds cot_lock. */
static void order_own_return(void)
{
    for (uint32_t i = 0; i < cot_gpu_count() && order.type == 0; i++)
        if (swap_gpus[i].away_bytes > 0 && !swap_gpus[i].moving) {
            order = (struct swap_order){.type = COTENANT_MOVE_IN, .gpu = cot_gpu_at(i), .hand = -1};
            allowed_bytes = UINT64_MAX;
            stopped = false;
            swap_gpus[i].moving = true;
        }
}

bool cot_swap_next_order(struct swap_order *next)
{
    pthread_mutex_lock(&cot_lock);
    while (order.type == 0 && !cot_exiting()) {
        if (agent_is_lost && cot_fail_mode() == COTENANT_FAIL_OPEN)
            order_own_return();
        if (order.type == 0)
            wait_a_while();
    }
    *next = order;
    pthread_mutex_unlock(&cot_lock);
    return next->type != 0 && !cot_exiting();
}

void cot_swap_order_done(const struct swap_order *done, uint32_t status, uint64_t moved_bytes,
                         const struct swap_times *times)
{
    pthread_mutex_lock(&cot_lock);
    cot_swap_of(done->gpu)->moving = false;
    order.type = 0;
    if (agent_is_lost && cot_fail_mode() == COTENANT_FAIL_OPEN)
        cot_gates_agent_lost(COTENANT_FAIL_OPEN);
    else
        cot_swap_report(done->gpu, COTENANT_MOVE_DONE, done->sequence, status, moved_bytes, times);
    pthread_cond_broadcast(&cot_changed);
    pthread_mutex_unlock(&cot_lock);
}

bool cot_swap_wait_allowed(uint64_t total_bytes)
{
    pthread_mutex_lock(&cot_lock);
    while (allowed_bytes < total_bytes && !stopped && !agent_is_lost && !cot_exiting())
        wait_a_while();
    bool go = allowed_bytes >= total_bytes;
    pthread_mutex_unlock(&cot_lock);
    return go;
}

void cot_swap_agent_lost(void)
{
    agent_is_lost = true;
    stopped = true; /* the next agent may be there before the mover looks, and would not allow the rest of this move */
    pthread_cond_broadcast(&order_changed);
}

/* ---- start and fork ---- */

void cot_swap_context_made(struct gpu *gpu)
{
    if (cot_swap_mode() != COTENANT_OVERSUBSCRIBE_SWAP && cot_swap_mode() != COTENANT_OVERSUBSCRIBE_MANAGED)
        return;
    pthread_mutex_lock(&cot_lock);
    bool first = !threads_started;
    threads_started = true;
    pthread_mutex_unlock(&cot_lock);
    if (!first)
        return;
    if (mode == COTENANT_OVERSUBSCRIBE_SWAP && !map_backing(gpu)) {
        cot_swap_fix("the agent has no host memory for evicted contents");
        return;
    }
    if (!cot_start_thread(cot_swap_mover, NULL)) {
        cot_swap_fix("the thread that moves memory could not be started");
        return;
    }
    if (backing)
        cot_start_thread(cot_swap_pinner, gpu->any_context);
    cot_swap_report_state(gpu); /* from now on the agent may send orders to this process */
}

void cot_swap_reset_after_fork(void)
{
    static const pthread_cond_t fresh = PTHREAD_COND_INITIALIZER;
    memcpy(&order_changed, &fresh, sizeof fresh);
    memset(swap_gpus, 0, sizeof swap_gpus);
    if (order.type && order.hand >= 0)
        /* memory that another process sent over this socket would otherwise stay in use as long as the child runs */
        close(order.hand);
    cot_hand_reset_after_fork();
    cot_share_reset_after_fork();
    order.type = 0;
    threads_started = fixed = looked_at_libraries = agent_is_lost = false;
    mode = COTENANT_OVERSUBSCRIBE_NONE;
    backing = NULL; /* the child does not have this mapping, because of MADV_DONTFORK */
    backing_bytes = 0;
    cot_swap_list_reset();
    cot_swap_copy_reset();
}
