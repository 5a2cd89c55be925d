/* Requests the copy page of each GPU, and decides how a copy between host and device runs: unscheduled, waiting in
 * its stream (paced.c), or waiting on its thread. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "copies/copies.h"

#define SPIN_NS 500000 /* a waiting thread polls this long before it sleeps, since a sleep takes at least 60 us */
#define MEMORY_TYPE_ATTRIBUTE 2
#define IS_MANAGED_ATTRIBUTE 8
#define MEMORY_TYPE_HOST 1
#define MEMORY_TYPE_DEVICE 2


static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;
static struct attached {
    uint64_t connection; /* the connection to the agent on which the page was requested */
    /* value of gpu->relocations at that request: how often the process had been restored on another GPU by then */
    uint32_t relocations;
    struct copy_link link;
} attached[COTENANT_MAX_GPUS];

/* ---- the copy page ---- */

static struct cotenant_copy_page *map_page(int fd, const struct cotenant_copies *terms)
{
    if (fd < 0 || terms->page_bytes != COTENANT_COPY_PAGE_BYTES || terms->queue >= COTENANT_COPY_QUEUES ||
        terms->participant == 0 || terms->participant > UINT16_MAX)
        return NULL;
    struct cotenant_copy_page *page = mmap(NULL, COTENANT_COPY_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return NULL;
    if (page->magic == COTENANT_COPY_MAGIC && page->version == COTENANT_COPY_VERSION && page->chunk_bytes && page->in_flight)
        return page;
    munmap(page, COTENANT_COPY_PAGE_BYTES);
    return NULL;
}

/* Requests the copy page (shared memory for scheduling copies) from the agent if there is a new connection, or if the
 * process was restored on another GPU. The page of a previous agent stays mapped, and is used until the new page has
 * arrived. */
static void attach(struct gpu *gpu, struct attached *mine, uint64_t connection)
{
    pthread_mutex_lock(&attach_lock);
    uint32_t relocations = gpu->relocations;
    if (mine->relocations != relocations) { /* the mapped copy page belongs to the process's previous GPU */
        __atomic_store_n(&mine->link.page, NULL, __ATOMIC_RELEASE);
        mine->connection = 0;
        __atomic_store_n(&mine->relocations, relocations, __ATOMIC_RELEASE);
    }
    if (mine->connection != connection) {
        struct cotenant_message reply;
        int fd = -1;
        bool answered = cot_agent_call_fd(COTENANT_COPY_ATTACH, gpu->slot, NULL, 0, &reply, &fd) == 0;
        const struct cotenant_copies *terms = &reply.body.copies;
        struct cotenant_copy_page *page = NULL;
        if (answered && reply.header.type == COTENANT_COPY_REPLY && reply.header.status == COTENANT_OK)
            page = map_page(fd, terms);
        if (fd >= 0)
            close(fd);
        if (page) {
            mine->link.page = NULL; /* other threads must not see the copy page before all fields of the link are set */
            atomic_thread_fence(memory_order_seq_cst);
            mine->link = (struct copy_link){NULL, terms->queue, terms->participant, (uint32_t)(gpu - cot_gpu_at(0))};
            __atomic_store_n(&mine->link.page, page, __ATOMIC_RELEASE);
        }
        if (answered)
            __atomic_store_n(&mine->connection, connection, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&attach_lock);
}

/* Finds the copy page of a GPU, and requests it if necessary. Returns false if copies of this process on this GPU
 * are not scheduled. */
static bool link_of(struct gpu *gpu, struct copy_link *link)
{
    if (!(gpu->page_slot->flags & COTENANT_SLOT_COPIES))
        return false;
    struct attached *mine = &attached[gpu - cot_gpu_at(0)];
    struct cotenant_page *page = cot_agent_page();
    /* until the GPU is attached to a restarted agent, gpu->page_slot is on the page of the previous agent */
    bool current = page && gpu->page_slot == &page->slots[gpu->slot];
    bool moved = __atomic_load_n(&mine->relocations, __ATOMIC_ACQUIRE) != gpu->relocations;
    if (UNLIKELY(moved || (current && __atomic_load_n(&mine->connection, __ATOMIC_ACQUIRE) != page->connection_id)) &&
        cot_agent_is_connected())
        attach(gpu, mine, page->connection_id);
    struct cotenant_copy_page *copies = __atomic_load_n(&mine->link.page, __ATOMIC_ACQUIRE);
    *link = mine->link;
    link->page = copies;
    return copies != NULL;
}

uint64_t cot_copy_slice_bytes(void)
{
    struct copy_link link;
    struct gpu *gpu = cot_thread_gpu();
    if (!gpu || !link_of(gpu, &link))
        return 0;
    bool best_effort = link.page->links[0].queues[link.queue].rank == COTENANT_COPY_BEST_EFFORT;
    return best_effort ? link.page->slice_bytes : 0;
}

/* ---- copies ---- */

static CUresult whole(const struct host_copy *copy)
{
    __auto_type call = cot_gate_enter(copy->key, copy->stream);
    CUresult result = copy->issue(copy, 0, copy->bytes, copy->stream, !copy->host_waits);
    cot_gate_exit(call);
    cot_count_copy(call);
    return result;
}

enum memory_kind { PAGEABLE, PINNED, OTHER };

static enum memory_kind kind_of(const void *host)
{
    unsigned type = 0, managed = 0;
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)host;
    CUresult (*get)(void *, int, CUdeviceptr) = REAL(cuPointerGetAttribute);
    if (get(&type, MEMORY_TYPE_ATTRIBUTE, address) != CUDA_SUCCESS)
        return PAGEABLE;
    if (get(&managed, IS_MANAGED_ATTRIBUTE, address) == CUDA_SUCCESS && managed)
        return OTHER;
    return type == MEMORY_TYPE_HOST ? PINNED : OTHER;
}

bool cot_is_on_device(word address)
{
    unsigned type = 0;
    CUresult (*get)(void *, int, CUdeviceptr) = REAL(cuPointerGetAttribute);
    return get(&type, MEMORY_TYPE_ATTRIBUTE, address) == CUDA_SUCCESS && type == MEMORY_TYPE_DEVICE;
}

static struct copy_ticket wait_for_turn(const struct copy_link *link, uint32_t direction, uint64_t bytes)
{
    struct copy_ticket ticket;
    uint64_t began = cot_now_ns(), now = began;
    while (!copy_try(link->page, direction, link->queue, link->participant, bytes, now, &ticket)) {
        if (now - began > COPY_RESCUE_NS)
            copy_rescue(link->page, direction, link->queue, now);
        if (now - began > SPIN_NS)
            cot_nap_for(COPY_NAP_NS);
        else
            cot_copies_breathe();
        now = cot_now_ns();
    }
    __atomic_fetch_add(&link->page->links[direction].queues[link->queue].waited_ns, now - began, __ATOMIC_RELAXED);
    return ticket;
}

/* Makes a copy on the calling thread, piece by piece, because the driver copies pageable memory on that thread. Copies
 * of pinned memory are made this way only if the stream itself cannot wait for slots.
 *
 * If the copy has several pieces, or if the memory is pinned, the thread must wait for earlier work in the stream. It
 * waits for that work before it requests the first slot, so that it holds no slot meanwhile.
 *
 * The queue stays marked as waiting until the last piece has a slot, even while a piece is in flight. Otherwise
 * weights would have no effect, since a thread has only one piece in flight. This delays only other tenants' copies of
 * the same kind of memory (pageable or pinned) in the same direction. */
static CUresult paced_by_thread(const struct copy_link *link, const struct host_copy *copy, bool pinned)
{
    const struct cotenant_copy_page *page = link->page;
    uint32_t number = copy->direction + (pinned ? 0 : COTENANT_COPY_PAGEABLE);
    uint64_t wanted = copy_piece(page, number, link->queue, cot_now_ns());
    uint64_t unit = copy->unit ? copy->unit : 1, piece = wanted / unit * unit;
    if (piece < unit)
        piece = unit;
    CUresult result = CUDA_SUCCESS;
    if (copy->bytes > piece || pinned)
        result = REAL(cuStreamSynchronize)(copy->stream);
    for (uint64_t from = 0; from < copy->bytes && result == CUDA_SUCCESS; from += piece) {
        uint64_t bytes = copy->bytes - from < piece ? copy->bytes - from : piece;
        __auto_type call = cot_gate_enter(copy->key, copy->stream);
        struct copy_ticket ticket = wait_for_turn(link, number, bytes);
        if (from + bytes == copy->bytes)
            copy_withdraw(link->page, number, link->queue);
        result = copy->issue(copy, from, bytes, copy->stream, !copy->host_waits);
        if (pinned && result == CUDA_SUCCESS)
            result = REAL(cuStreamSynchronize)(copy->stream);
        copy_done(link->page, number, ticket);
        copy_store(&link->page->links[number].queues[link->queue].active_ns, cot_now_ns());
        cot_gate_exit(call);
        if (from == 0)
            cot_count_copy(call);
    }
    return result;
}

static CUresult paced(const struct copy_link *link, const struct host_copy *copy)
{
    enum memory_kind kind = kind_of(copy->host);
    if (kind == PAGEABLE)
        return paced_by_thread(link, copy, false);
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (kind == PINNED) {
        __auto_type call = cot_gate_enter(copy->key, copy->stream);
        result = cot_copy_paced_by_stream(link, copy);
        cot_gate_exit(call);
        if (result != CUDA_ERROR_NOT_SUPPORTED) {
            cot_count_copy(call);
            return result;
        }
    }
    if (kind == PINNED)
        return paced_by_thread(link, copy, true);
    copy_charge(link->page, &link->page->links[copy->direction], link->queue, copy->bytes);
    return whole(copy);
}

CUresult cot_copy_over_link(const struct host_copy *copy)
{
    struct copy_link link;
    struct gpu *gpu = cot_thread_gpu();
    if (!gpu || atomic_load(&cot_captures) > 0 || !link_of(gpu, &link))
        return whole(copy);
    struct cotenant_copy_link *mine = &link.page->links[copy->direction];
    if (copy->bytes <= COTENANT_COPY_SMALL_BYTES) {
        copy_charge(link.page, mine, link.queue, copy->bytes);
        __atomic_fetch_add(&mine->queues[link.queue].small, 1, __ATOMIC_RELAXED);
        return whole(copy);
    }
    if (copy->bytes <= link.page->alone_bytes && copy_is_sole(mine, link.queue)) {
        copy_count(mine, link.queue, copy->bytes);
        return whole(copy);
    }
    int cancel;
    /* a thread that were cancelled while it waits for a slot would never release the locks that it holds */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    CUresult result = paced(&link, copy);
    pthread_setcancelstate(cancel, NULL);
    return result;
}

void cot_copy_charge_whole(uint32_t direction, uint64_t bytes)
{
    struct copy_link link;
    struct gpu *gpu = cot_thread_gpu();
    if (gpu && bytes && atomic_load(&cot_captures) == 0 && link_of(gpu, &link))
        copy_charge(link.page, &link.page->links[direction], link.queue, bytes);
}

/* Makes a copy for the shim itself, of pinned memory in the shim's own stream. It is scheduled if the tenants'
 * copies on this GPU are scheduled. */
CUresult cot_copy_of_shim(struct gpu *gpu, const struct host_copy *copy)
{
    struct copy_link link;
    if (link_of(gpu, &link)) {
        struct cotenant_copy_link *mine = &link.page->links[copy->direction];
        if (copy_is_sole(mine, link.queue)) {
            copy_count(mine, link.queue, copy->bytes);
        } else {
            CUresult result = cot_copy_paced_by_stream(&link, copy);
            if (result != CUDA_ERROR_NOT_SUPPORTED)
                return result;
            copy_charge(link.page, mine, link.queue, copy->bytes);
        }
    }
    return copy->issue(copy, 0, copy->bytes, copy->stream, true);
}

void cot_copies_reset_after_fork(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&attach_lock, &fresh, sizeof fresh);
    memset(attached, 0, sizeof attached);
    cot_copies_drop_records();
}
