/* The connection to the agent, and the helper thread that serves it.
 *
 * Each process has one socket. Any thread may send, but only the helper thread receives, so a thread that waits for
 * a turn does not keep other threads from requesting memory. The helper thread also ends turns and detects that the
 * process is idle (gate/turn.c). A closed socket means that the agent has ended. The shim then behaves as the
 * agent's last settings require (fail_mode), and tries to reconnect. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "copies/copies.h"
#include "shim.h"
#include "swap/swap.h"

#define CONNECT_PATIENCE_NS UINT64_C(10000000000)
#define STRANGER_PATIENCE_NS UINT64_C(2000000000)

pthread_mutex_t cot_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t cot_changed = PTHREAD_COND_INITIALIZER;

static pthread_mutex_t connect_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int agent_fd = -1;
static _Atomic int wake_fd = -1;
static _Atomic bool helper_runs, exiting;
static bool ever_connected, fork_handler_set;
/* the shared page (abi/tenant_page.h) of the latest connection; those of earlier connections stay mapped */
static struct cotenant_page *page;
static uint32_t fail_mode = COTENANT_FAIL_CLOSED;
static uint32_t reconnect_ms = 200;
static bool helper_stopped, page_changed;
static pid_t owner_pid;

bool cot_exiting(void)
{
    return exiting;
}

uint32_t cot_fail_mode(void)
{
    return fail_mode;
}

struct cotenant_page *cot_agent_page(void)
{
    return page;
}

int cot_agent_fd(void)
{
    return agent_fd;
}

bool cot_agent_is_connected(void)
{
    return agent_fd >= 0;
}

void cot_agent_wake_helper(void)
{
    uint64_t one = 1;
    if (wake_fd >= 0 && write(wake_fd, &one, sizeof one) < 0)
        return; /* the counter of the eventfd is full, so the helper thread will wake up in any case */
}

/* ---- receiving ---- */

static struct gpu *gpu_of_slot(uint32_t slot)
{
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->attached && cot_gpu_at(i)->slot == slot)
            return cot_gpu_at(i);
    return NULL;
}

/* Handles a message. The caller holds cot_lock. If the function takes the passed descriptor over, it sets *passed_fd
 * to -1. */
static void handle(const struct cotenant_message *message, int *passed_fd)
{
    struct gpu *gpu = gpu_of_slot(message->header.slot);
    switch (message->header.type) {
    case COTENANT_TOKEN_GRANT:
        if (gpu)
            cot_gate_grant(gpu, message->body.token_grant.epoch, message->body.token_grant.deadline_ns);
        break;
    case COTENANT_TOKEN_REVOKE:
        if (gpu && gpu->state == GATE_OPEN && gpu->turn_epoch == message->body.token_revoke.epoch)
            cot_gate_begin_close(gpu, COTENANT_RELEASE_REVOKED);
        break;
    case COTENANT_MOVE_OUT:
    case COTENANT_MOVE_IN:
    case COTENANT_MOVE_ALLOW:
        if (gpu)
            cot_swap_message(gpu, message, passed_fd);
        break;
    case COTENANT_PAGE_UPDATE:
        fail_mode = page->fail_mode;
        page_changed = true;
        pthread_cond_broadcast(&cot_changed);
        break;
    default:
        if (cot_rpc_reply(message, passed_fd))
            return;
        if (message->header.type == COTENANT_ERROR)
            cot_say("the agent reports: %.200s", (const char *)message->body.text.text);
    }
}

static void agent_lost(void) /* the caller holds cot_lock, which protects the state of the connection */
{
    if (agent_fd >= 0)
        close(agent_fd);
    agent_fd = -1;
    cot_rpc_agent_lost();
    cot_memory_agent_lost();
    cot_swap_agent_lost();
    cot_gates_agent_lost(fail_mode);
    pthread_cond_broadcast(&cot_changed);
    cot_say("the agent has ended; launches %s until it returns",
            fail_mode == COTENANT_FAIL_OPEN ? "continue without limits" : "wait");
}

static void receive_all(void)
{
    struct cotenant_message message;
    int got, passed_fd = -1;
    while (agent_fd >= 0 && (got = cot_wire_receive_now(agent_fd, &message, &passed_fd)) != 0) {
        pthread_mutex_lock(&cot_lock);
        cot_rpc_heard();
        if (got < 0)
            agent_lost();
        else
            handle(&message, &passed_fd);
        pthread_mutex_unlock(&cot_lock);
        if (passed_fd >= 0)
            close(passed_fd);
        passed_fd = -1;
        if (page_changed)
            /* the process may have been restored on another GPU; this is handled before the next message, which may
             * grant a turn on the new GPU */
            cot_gpus_follow();
        page_changed = false;
    }
}

static void take_terms(const struct cotenant_hello_reply *terms)
{
    fail_mode = terms->fail_mode;
    if (terms->reconnect_ms >= 10 && terms->reconnect_ms <= 60000)
        reconnect_ms = terms->reconnect_ms;
    cot_swap_take_terms(terms);
}

static void try_to_return(void)
{
    struct cotenant_hello_reply terms;
    static bool refused;
    int fd = cot_wire_introduce(&terms, &page, refused);
    refused = fd == -2;
    if (fd < 0)
        return;
    take_terms(&terms);
    cot_channels_report_again();
    pthread_mutex_lock(&cot_lock);
    agent_fd = fd;
    pthread_mutex_unlock(&cot_lock);
    cot_say("the agent has returned");
}

/* Attaches the GPUs again after a reconnection. This runs on a short-lived thread, because its calls wait for replies
 * that the helper thread receives. */
static void *reattach(void *unused)
{
    (void)unused;
    cot_gpus_after_reconnect();
    return NULL;
}

bool cot_start_thread(void *(*body)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool started = pthread_create(&thread, NULL, body, argument) == 0;
    if (started)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

static void *helper(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "cotenant");
    /* the default timer slack of 50 us would delay the end of turns */
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    while (!exiting) {
        uint64_t now = cot_now_ns();
        uint64_t next = cot_gates_advance(now);
        bool lost = agent_fd < 0;
        if (!lost)
            cot_channels_report(agent_fd);
        if (lost && next > reconnect_ms * UINT64_C(1000000))
            next = reconnect_ms * UINT64_C(1000000);
        struct timespec wait = {.tv_sec = (time_t)(next / 1000000000), .tv_nsec = (long)(next % 1000000000)};
        struct pollfd ready[2] = {{.fd = wake_fd, .events = POLLIN}, {.fd = agent_fd, .events = POLLIN}};
        int count = ppoll(ready, lost ? 1 : 2, &wait, NULL);
        if (count > 0 && ready[0].revents & POLLNVAL) { /* the program has closed all its files, including the shim's */
            wake_fd = cot_wire_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
            count = 0;
        }
        if (count > 0 && ready[0].revents & POLLIN) {
            uint64_t drained;
            if (read(wake_fd, &drained, sizeof drained) < 0)
                continue;
        }
        if (!lost) {
            receive_all();
            pthread_mutex_lock(&cot_lock);
            if (agent_fd >= 0 && cot_rpc_agent_hangs())
                agent_lost();
            pthread_mutex_unlock(&cot_lock);
        } else if (count == 0) {
            try_to_return();
            if (agent_fd >= 0)
                cot_start_thread(reattach, NULL);
        }
    }
    pthread_mutex_lock(&cot_lock);
    helper_stopped = true;
    pthread_cond_broadcast(&cot_changed);
    pthread_mutex_unlock(&cot_lock);
    return NULL;
}

/* ---- fork, exit and the first connection ---- */

static void at_exit(void)
{
    if (owner_pid != getpid() || !ever_connected)
        return;
    if (cot_total_contexts() > 0 && cot_total_launches() == 0)
        cot_gates_exit();
    pthread_mutex_lock(&cot_lock);
    exiting = true;
    for (uint32_t i = 0; i < cot_gpu_count(); i++)
        if (cot_gpu_at(i)->attached) {
            cot_gpu_at(i)->published_ns = 0;
            cot_gpu_publish(cot_gpu_at(i), cot_now_ns());
        }
    cot_gates_agent_lost(COTENANT_FAIL_OPEN); /* exit handlers that run after this one do not wait for a turn */
    pthread_cond_broadcast(&cot_changed);
    cot_agent_wake_helper();
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    while (helper_runs && !helper_stopped && pthread_cond_timedwait(&cot_changed, &cot_lock, &until) == 0)
        ;
    pthread_mutex_unlock(&cot_lock);
    /* The socket stays open until the process has ended: when it is closed, the agent counts the process's memory as
     * free, but the driver frees the memory only at the end of the process. */
}

static void after_fork_in_child(void)
{
    static const pthread_mutex_t fresh_mutex = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t fresh_cond = PTHREAD_COND_INITIALIZER;
    memcpy(&cot_lock, &fresh_mutex, sizeof fresh_mutex);
    memcpy(&connect_lock, &fresh_mutex, sizeof fresh_mutex);
    memcpy(&cot_changed, &fresh_cond, sizeof fresh_cond);
    if (agent_fd >= 0)
        close(agent_fd);
    if (wake_fd >= 0)
        close(wake_fd);
    agent_fd = wake_fd = -1;
    helper_runs = ever_connected = helper_stopped = false;
    cot_rpc_reset_after_fork();
    page = NULL;
    cot_gate_reset_after_fork();
    cot_streams_reset_after_fork();
    cot_copies_reset_after_fork();
    cot_memory_reset_after_fork();
    cot_swap_reset_after_fork();
}

/* Connects to the agent. It tries several times: the agent may still be starting, and an agent that identifies the
 * process by its parent processes may not have registered those yet. */
static int reach_agent(struct cotenant_hello_reply *terms)
{
    const char *socket_path = getenv(COTENANT_ENV_SOCKET), *token = getenv(COTENANT_ENV_TOKEN);
    uint64_t began = cot_now_ns();
    for (;;) {
        uint64_t waited = cot_now_ns() - began;
        bool perhaps_later = !(token && token[0]) && waited < STRANGER_PATIENCE_NS;
        int fd = cot_wire_introduce(terms, &page, perhaps_later);
        if (fd >= 0 || (fd == -2 && !perhaps_later) || (fd == -1 && (!socket_path || waited >= CONNECT_PATIENCE_NS)))
            return fd;
        usleep(20000);
    }
}

static int connect_once(void)
{
    struct cotenant_hello_reply terms;
    int fd = reach_agent(&terms);
    if (fd < 0) {
        if (fd == -1)
            cot_say("no agent listens at %s=%s; start one with `cotenant agent`, since a tenant cannot run without it", COTENANT_ENV_SOCKET,
                    getenv(COTENANT_ENV_SOCKET) ? getenv(COTENANT_ENV_SOCKET) : "(not set)");
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    take_terms(&terms);
    if (wake_fd < 0)
        wake_fd = cot_wire_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    agent_fd = fd;
    if (wake_fd < 0 || !cot_start_thread(helper, NULL)) {
        cot_say("the shim's helper thread could not be started: does the container limit the number of threads?");
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    helper_runs = ever_connected = true;
    cot_kernels_start();
    owner_pid = getpid();
    if (!fork_handler_set) {
        fork_handler_set = true;
        pthread_atfork(NULL, NULL, after_fork_in_child);
        atexit(at_exit);
    }
    return CUDA_SUCCESS;
}

int cot_agent_connect(void)
{
    if (helper_runs)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&connect_lock);
    int result = helper_runs ? CUDA_SUCCESS : connect_once();
    pthread_mutex_unlock(&connect_lock);
    return result;
}
