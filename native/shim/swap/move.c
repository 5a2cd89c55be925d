/* The mover: a thread that moves contents off the GPU and back. It carries out one order of the agent at a time.
 *
 * Copies are enqueued a few pieces in advance, so that the copy engine never waits for the host. When the contents
 * of a piece have arrived in host memory, its device memory is freed at once and the agent is informed, so that
 * another tenant can be restored. When a piece is restored, its copy in host memory stays valid until the piece is
 * resident (PIECE_HERE), so a move that fails loses nothing. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "swap/swap.h"

#define TELL_BYTES (UINT64_C(64) << 20)
/* memory that another process has freed may become available with a delay of up to this time */
#define FULL_PATIENCE_NS UINT64_C(1000000000)

struct flight { /* a piece of a region that the mover is copying */
    struct region *region;
    uint32_t index;
};

struct move {
    const struct swap_order *order;
    struct lane *lane;
    struct flight flights[SWAP_TICKETS];
    /* number of the move's copies that have begun, and of those that have ended; both only increase */
    uint32_t begun, ended;
    uint64_t moved_bytes;     /* sum of the sizes of the pieces whose copies have ended */
    uint64_t told_bytes;      /* number of moved bytes that was last reported to the agent */
    uint64_t started_bytes;
    uint64_t waited_ns;       /* time in which the move waited for MOVE_ALLOW */
    uint64_t mapping_ns, copying_ns, handed_bytes;
    CUresult result;
};

static struct region_piece *piece_of(const struct flight *flight)
{
    return &flight->region->piece[flight->index];
}

static void change(struct flight *flight, enum piece_state to)
{
    struct swap_gpu *state = cot_swap_of(flight->region->gpu);
    uint64_t bytes = cot_swap_piece_bytes(flight->region, flight->index);
    pthread_mutex_lock(&cot_lock);
    *(piece_of(flight)->state == PIECE_HERE ? &state->here_bytes : &state->away_bytes) -= bytes;
    piece_of(flight)->state = to;
    *(to == PIECE_HERE ? &state->here_bytes : &state->away_bytes) += bytes;
    pthread_mutex_unlock(&cot_lock);
}

/* Unmaps the memory of a piece. If another process can take the memory, it is sent to that process. */
static CUresult vacate(struct move *move, const struct flight *flight)
{
    uint64_t bytes = cot_swap_piece_bytes(flight->region, flight->index);
    int memory = -1;
    if (cot_hand.socket >= 0 && bytes >= SWAP_SHARED_LEAST) {
        memory = cot_hand_part_with(piece_of(flight));
        if (memory < 0)
            memory = cot_hand_open(cot_swap_piece_address(flight->region, flight->index));
        cot_hand.memory = memory;
    }
    CUresult result = cot_swap_unmap_piece(flight->region, flight->index);
    if (memory >= 0 && result != CUDA_SUCCESS)
        cot_hand_let_go(memory);
    else if (memory >= 0 && cot_hand_send(memory, bytes))
        move->handed_bytes += bytes;
    return result;
}

/* Waits for the end of the oldest copy, and updates the state of its piece. */
static void land(struct move *move)
{
    uint32_t ticket = move->ended++ % SWAP_TICKETS;
    struct flight *flight = &move->flights[ticket];
    bool out = move->order->type == COTENANT_MOVE_OUT;
    uint64_t began = cot_now_ns();
    CUresult result = cot_swap_copied(move->lane, ticket);
    uint64_t copied = cot_now_ns();
    move->copying_ns += copied - began;
    if (out && result == CUDA_SUCCESS && !flight->region->managed) {
        result = vacate(move, flight);
        move->mapping_ns += cot_now_ns() - copied;
    }
    if (result != CUDA_SUCCESS) {
        if (move->result == CUDA_SUCCESS)
            move->result = result;
        if (!out && !flight->region->managed)
            /* the contents of the piece are still in host memory, so the piece stays evicted */
            cot_swap_unmap_piece(flight->region, flight->index);
        return;
    }
    change(flight, out ? PIECE_AWAY : PIECE_HERE);
    move->moved_bytes += cot_swap_piece_bytes(flight->region, flight->index);
    if (move->moved_bytes - move->told_bytes >= TELL_BYTES) {
        move->told_bytes = move->moved_bytes;
        cot_swap_report(flight->region->gpu, COTENANT_MOVE_PROGRESS, move->order->sequence, COTENANT_OK, move->moved_bytes, 0);
    }
}

static void land_all(struct move *move)
{
    while (move->ended != move->begun)
        land(move);
}

static CUresult start_copy(struct move *move, struct region *region, uint32_t index)
{
    bool out = move->order->type == COTENANT_MOVE_OUT;
    uint32_t ticket = move->begun % SWAP_TICKETS;
    uint64_t bytes = cot_swap_piece_bytes(region, index);
    CUresult result;
    if (region->managed)
        result = cot_swap_prefetch(move->lane, region->address, bytes, out ? -1 : region->gpu->device, ticket);
    else
        result = cot_swap_copy(move->lane, cot_swap_piece_address(region, index), region->piece[index].backing, bytes, ticket);
    if (result != CUDA_SUCCESS)
        return result;
    move->flights[ticket] = (struct flight){region, index};
    move->begun++;
    move->started_bytes += bytes;
    return CUDA_SUCCESS;
}

static void keep_flying(struct move *move)
{
    while (move->begun - move->ended >= SWAP_TICKETS)
        land(move);
}

/* ---- evicting ---- */

static bool push_out(struct move *move, struct region *region, uint32_t index, uint64_t *next)
{
    uint64_t bytes = cot_swap_piece_bytes(region, index), end = move->order->base + move->order->span_bytes;
    if (!region->managed && (*next + bytes > end || *next + bytes > cot_swap_usable_bytes()))
        return true; /* the host memory has no space for this piece, but a smaller one may fit */
    region->piece[index].backing = *next;
    *next += bytes;
    keep_flying(move);
    if (move->result == CUDA_SUCCESS)
        move->result = start_copy(move, region, index);
    return move->result == CUDA_SUCCESS;
}

static uint32_t move_out(struct move *move)
{
    uint32_t count;
    struct region **list = cot_swap_snapshot(move->order->gpu, &count);
    uint64_t next = move->order->base;
    bool go = list != NULL && !cot_exiting();
    for (uint32_t r = 0; r < count && go; r++)
        for (uint32_t i = 0; i < list[r]->pieces && go; i++)
            if (list[r]->piece[i].state == PIECE_HERE)
                go = move->started_bytes < move->order->bytes && push_out(move, list[r], i, &next);
    land_all(move);
    free(list);
    return move->result == CUDA_SUCCESS && list ? COTENANT_OK : COTENANT_INTERNAL;
}

/* ---- restoring ---- */

/* Maps memory for a piece. If restored contents will overwrite the whole piece, it uses memory that another process
 * has passed on, if there is any; otherwise it allocates new memory. */
static CUresult supply(struct move *move, struct region *region, uint32_t index)
{
    uint64_t handle, bytes = cot_swap_piece_bytes(region, index);
    bool covered = region->piece[index].state == PIECE_AWAY && bytes >= SWAP_SHARED_LEAST;
    int memory = covered ? cot_hand_take(bytes, &handle) : -1;
    if (memory >= 0 && cot_swap_place_piece(region, index, handle) == CUDA_SUCCESS) {
        cot_hand_keep(&region->piece[index], memory);
        move->handed_bytes += bytes;
        return CUDA_SUCCESS;
    }
    if (memory >= 0)
        cot_hand_let_go(memory);
    CUresult result = cot_swap_map_piece(region, index);
    /* received memory whose size does not fit is freed, which makes space for new memory */
    if (result == CUDA_ERROR_OUT_OF_MEMORY && cot_hand_free())
        result = cot_swap_map_piece(region, index);
    return result;
}

/* Whether the shim itself started this move, while no agent ran, and an agent is there now. Its orders to move memory
 * are refused as long as the move goes on. */
static bool is_superseded(const struct swap_order *order)
{
    return order->sequence == 0 && cot_agent_is_connected();
}

/* Maps memory for a piece. If memory is exhausted it retries for a while, since memory that another process has
 * freed may become available with a delay. */
static CUresult settle(struct move *move, struct region *region, uint32_t index)
{
    uint64_t began = cot_now_ns();
    for (;;) {
        uint64_t before = cot_now_ns();
        CUresult result = supply(move, region, index);
        move->mapping_ns += cot_now_ns() - before;
        if (result != CUDA_ERROR_OUT_OF_MEMORY || cot_now_ns() - began > FULL_PATIENCE_NS || cot_exiting() ||
            is_superseded(move->order))
            return result;
        if (move->ended != move->begun)
            land(move);
        else
            usleep(200);
    }
}

static bool bring_in(struct move *move, struct region *region, uint32_t index)
{
    uint64_t bytes = cot_swap_piece_bytes(region, index), began = cot_now_ns();
    if (!cot_swap_wait_allowed(move->started_bytes + bytes)) {
        move->result = CUDA_ERROR_NOT_READY;
        return false;
    }
    move->waited_ns += cot_now_ns() - began;
    keep_flying(move);
    if (!region->managed) {
        CUresult result = move->result == CUDA_SUCCESS ? settle(move, region, index) : move->result;
        if (result != CUDA_SUCCESS) {
            move->result = result;
            return false;
        }
        if (region->piece[index].state == PIECE_EMPTY) {
            struct flight here = {region, index};
            change(&here, PIECE_HERE);
            move->started_bytes += bytes;
            move->moved_bytes += bytes;
            return true;
        }
    }
    CUresult result = start_copy(move, region, index);
    if (result != CUDA_SUCCESS) {
        if (!region->managed)
            cot_swap_unmap_piece(region, index);
        move->result = result;
    }
    return result == CUDA_SUCCESS;
}

static uint64_t away_bytes(struct gpu *gpu)
{
    pthread_mutex_lock(&cot_lock);
    uint64_t bytes = cot_swap_of(gpu)->away_bytes;
    pthread_mutex_unlock(&cot_lock);
    return bytes;
}

static uint32_t move_in(struct move *move)
{
    struct gpu *gpu = move->order->gpu;
    while (move->result == CUDA_SUCCESS && away_bytes(gpu) > 0 && !cot_exiting()) {
        uint32_t count;
        uint64_t before = move->started_bytes;
        struct region **list = cot_swap_snapshot(gpu, &count);
        bool go = list != NULL;
        for (uint32_t r = 0; r < count && go; r++)
            for (uint32_t i = 0; i < list[r]->pieces && go; i++)
                if (list[r]->piece[i].state != PIECE_HERE)
                    go = bring_in(move, list[r], i);
        land_all(move);
        free(list);
        if (move->started_bytes == before && move->result == CUDA_SUCCESS)
            /* no contents could be moved yet, because another thread is about to add an allocation to the list */
            usleep(200);
    }
    if (move->result == CUDA_ERROR_OUT_OF_MEMORY)
        return COTENANT_OUT_OF_MEMORY;
    if (move->result == CUDA_ERROR_NOT_READY)
        return COTENANT_DENIED; /* the agent stopped the move before it had allowed enough bytes */
    return move->result == CUDA_SUCCESS ? COTENANT_OK : COTENANT_INTERNAL;
}

void *cot_swap_mover(void *unused)
{
    (void)unused;
    struct swap_order order;
    pthread_setname_np(pthread_self(), "cotenant-move");
    while (cot_swap_next_order(&order)) {
        struct move move = {.order = &order};
        cot_hand.socket = order.hand;
        uint64_t began = cot_now_ns();
        bool out = order.type == COTENANT_MOVE_OUT;
        uint32_t status = COTENANT_INTERNAL;
        move.lane = cot_swap_lane(order.gpu, out);
        if (move.lane)
            status = out ? move_out(&move) : move_in(&move);
        if (status == COTENANT_INTERNAL)
            cot_say("moving memory %s the GPU failed with CUDA error %d; no contents are lost", out ? "off" : "to",
                    move.result);
        if (status != COTENANT_OK && order.sequence == 0 && !is_superseded(&order))
            /* the agent does not wait for this move, which the shim itself started, so the shim tries again later */
            usleep(200000);
        cot_hand_free();
        cot_hand.socket = -1;
        if (order.hand >= 0)
            close(order.hand);
        struct swap_times times = {cot_now_ns() - began - move.waited_ns, move.mapping_ns, move.copying_ns,
                                    move.handed_bytes};
        cot_swap_order_done(&order, status, move.moved_bytes, &times);
    }
    return NULL;
}
