/* Joins the LS gate of a GPU (abi/floor.h), as a best-effort or as a latency-sensitive process: connects to the
 * agent's second socket and receives the gate page. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "floor/pieces.h"

#define ANSWER_PATIENCE_S 2
/* time from the first failed attempt to the second one; it doubles after each further failure */
#define FIRST_PATIENCE_NS UINT64_C(1000000000)
#define MOST_PATIENCE_NS UINT64_C(30000000000)

static int open_socket(void)
{
    const char *path = getenv(COTENANT_ENV_SOCKET);
    const char *slash = path ? strrchr(path, '/') : NULL;
    size_t folder = slash ? (size_t)(slash - path) + 1 : 0;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || folder + sizeof COTENANT_FLOOR_SOCKET > sizeof address.sun_path)
        return -1;
    memcpy(address.sun_path, path, folder);
    memcpy(address.sun_path + folder, COTENANT_FLOOR_SOCKET, sizeof COTENANT_FLOOR_SOCKET);
    int fd = cot_wire_high(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    struct timeval patience = {.tv_sec = ANSWER_PATIENCE_S};
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

static struct cotenant_floor *map_floor(int fd, uint32_t role)
{
    int access = PROT_READ | (role == COTENANT_FLOOR_LATENCY_SENSITIVE ? PROT_WRITE : 0);
    struct cotenant_floor *page = mmap(NULL, COTENANT_FLOOR_BYTES, access, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return NULL;
    if (page->magic == COTENANT_FLOOR_MAGIC && page->version == COTENANT_FLOOR_VERSION)
        return page;
    munmap(page, COTENANT_FLOOR_BYTES);
    return NULL;
}

/* Receives the table of this tenant's kernels, if the agent announces one. */
static void take_kernels(int fd, const struct cotenant_message *reply)
{
    struct cotenant_floor_reply terms;
    struct cotenant_message message;
    int table_fd = -1;
    memcpy(&terms, reply->body.bytes, sizeof terms);
    if (terms.kernels == 0)
        return;
    if (cot_wire_receive(fd, &message, &table_fd) == 1 && message.header.type == COTENANT_FLOOR_KERNELS && table_fd >= 0)
        cot_work_table(table_fd, terms.kernels);
    if (table_fd >= 0)
        close(table_fd);
}

/* Receives the wait-flag page, on whose flags streams wait, if the agent announces it. */
static struct cotenant_floor_words *take_words(int fd, const struct cotenant_message *reply)
{
    struct cotenant_floor_reply terms;
    struct cotenant_message message;
    int words_fd = -1;
    memcpy(&terms, reply->body.bytes, sizeof terms);
    if (terms.words != 1 || cot_wire_receive(fd, &message, &words_fd) != 1 || words_fd < 0)
        return NULL;
    void *words = MAP_FAILED;
    if (message.header.type == COTENANT_FLOOR_WORDS)
        words = mmap(NULL, COTENANT_FLOOR_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, words_fd, 0);
    close(words_fd);
    return words == MAP_FAILED ? NULL : words;
}

static struct cotenant_floor *ask(struct gpu *gpu, uint32_t role, int fd, struct cotenant_message *message,
                                  struct cotenant_floor_words **shown)
{
    struct cotenant_floor_join join = {.role = role, .wants_kernels = 1, .wants_words = 1};
    memcpy(join.uuid, gpu->uuid.bytes, sizeof join.uuid);
    cot_wire_fill(message, COTENANT_FLOOR_JOIN, COTENANT_NO_SLOT, &join, sizeof join);
    int page_fd = -1;
    if (cot_wire_send(fd, message) != 0 || cot_wire_receive(fd, message, &page_fd) != 1 ||
        message->header.type != COTENANT_FLOOR_PAGE || page_fd < 0) {
        if (page_fd >= 0)
            close(page_fd);
        return NULL;
    }
    struct cotenant_floor *page = map_floor(page_fd, role);
    close(page_fd);
    if (page) {
        take_kernels(fd, message);
        *shown = take_words(fd, message);
    }
    return page;
}

/* Called if the process could not join, for example because the agent was too busy to answer. A process that has not
 * joined is neither protected nor limited by the LS gate, so it tries again later. */
static void not_joined(struct gpu *gpu)
{
    if (gpu->floor_patience_ns == 0) {
        gpu->floor_patience_ns = FIRST_PATIENCE_NS;
        cot_agent_warn(COTENANT_WARN_NO_FLOOR,
                       "the agent's %s could not be joined: until this succeeds, best-effort programs do not wait for "
                       "latency-sensitive ones on this GPU; the shim tries again", COTENANT_FLOOR_SOCKET);
    } else if (gpu->floor_patience_ns < MOST_PATIENCE_NS)
        gpu->floor_patience_ns *= 2;
    gpu->floor_again_ns = cot_now_ns() + gpu->floor_patience_ns;
}

/* Joins the LS gate of a GPU and returns the gate page; NULL, with a warning, if that fails. *fd is the connection:
 * when it closes, the agent knows that the process has ended. *shown is the wait-flag page; NULL if the agent has
 * none. */
struct cotenant_floor *cot_floor_page(struct gpu *gpu, uint32_t role, int *fd, struct cotenant_message *reply,
                                      struct cotenant_floor_words **shown)
{
    *fd = open_socket();
    *shown = NULL;
    struct cotenant_floor *page = *fd >= 0 ? ask(gpu, role, *fd, reply, shown) : NULL;
    if (page) {
        gpu->floor_again_ns = gpu->floor_patience_ns = 0;
        return page;
    }
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    not_joined(gpu);
    return NULL;
}

/* Called after the GPU was attached to the agent, also to a restarted one. */
void cot_floor_join(struct gpu *gpu)
{
    if (!(gpu->page_slot->flags & COTENANT_SLOT_BEST_EFFORT))
        return;
    struct cotenant_message message;
    struct cotenant_floor_reply reply;
    int fd;
    struct cotenant_floor_words *shown;
    const struct cotenant_floor *page = cot_floor_page(gpu, COTENANT_FLOOR_BEST_EFFORT, &fd, &message, &shown);
    if (!page)
        return;
    memcpy(&reply, message.body.bytes, sizeof reply);
    struct floor *floor = gpu->floor;
    if (!floor) {
        if (!(floor = calloc(1, sizeof *floor))) {
            close(fd);
            return;
        }
        pthread_mutex_init(&floor->lock, NULL);
        floor->fd = -1;
    }
    if (floor->fd >= 0)
        close(floor->fd);
    floor->fd = fd; /* stays open: when it closes, the agent knows that this process has ended */
    floor->stated = (struct work){.work_class = reply.work_class, .sms = reply.work_sms};
    floor->in_flight_us = reply.in_flight_us;
    /* the gate page of the previous agent stays mapped, since another thread may still use it */
    __atomic_store_n(&floor->page, page, __ATOMIC_RELEASE);
    cot_ahead_move(floor, shown);
    __atomic_store_n(&gpu->floor, floor, __ATOMIC_RELEASE);
}

/* Called in the child of a fork: the connection belongs to the parent, and no thread of the child holds the lock. */
void cot_floor_after_fork(struct gpu *gpu)
{
    if (gpu->floor && gpu->floor->fd >= 0)
        close(gpu->floor->fd);
    gpu->floor = NULL;
}
