/* Messages to the agent that have no reply, and calls that wait for one.
 *
 * A closed socket shows that an agent has ended, but nothing shows that it hangs. So if a tenant may run without an
 * agent (fail: open), the shim sends a query to an agent that has been silent for a while, and treats it as ended if
 * it does not answer. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "shim.h"

/* if a thread waits and the agent has been silent for this long, the shim sends it a query */
#define ASK_AFTER_NS UINT64_C(3000000000)
#define HANGS_AFTER_NS UINT64_C(10000000000)

struct pending {
    uint64_t sequence;
    /* state of a call that waits for a reply of the agent: 0: waiting; 1: the reply has come; -1: the agent was lost */
    int outcome;
    struct cotenant_message *reply;
    int *passed_fd; /* where to store the descriptor that comes with the reply; NULL: the caller expects none */
    struct pending *next;
};

static struct pending *pending_calls; /* cot_lock protects this list of waiting calls and the variables below */
static uint64_t heard_ns;             /* time of the agent's last message to this process */
/* time at which the shim sent a query to a silent agent; 0: no query is outstanding */
static uint64_t asked_ns;
static uint64_t question;             /* sequence number of the query to the silent agent */

_Atomic uint64_t cot_agents_lost;
__thread uint64_t cot_answered_by __attribute__((tls_model("initial-exec")));

int cot_agent_send(uint16_t type, uint32_t slot, const void *body, size_t bytes)
{
    struct cotenant_message message;
    cot_wire_fill(&message, type, slot, body, bytes);
    int fd = cot_agent_fd();
    return fd >= 0 ? cot_wire_send(fd, &message) : -1;
}

/* Sends the answer to a message of the agent, with the sequence number of that message and a status. */
int cot_agent_answer(uint16_t type, uint32_t slot, uint64_t sequence, uint32_t status, const void *body, size_t bytes)
{
    struct cotenant_message message;
    cot_wire_fill(&message, type, slot, body, bytes);
    if (sequence)
        message.header.sequence = sequence;
    message.header.status = status;
    int fd = cot_agent_fd();
    return fd >= 0 ? cot_wire_send(fd, &message) : -1;
}

/* Sends a message and waits for the reply and for the descriptor that may come with it (*passed_fd; -1: no
 * descriptor came). Returns -1 if the agent is lost. */
int cot_agent_call_fd(uint16_t type, uint32_t slot, const void *body, size_t bytes, struct cotenant_message *reply,
                      int *passed_fd)
{
    if (passed_fd)
        *passed_fd = -1;
    struct cotenant_message message;
    cot_wire_fill(&message, type, slot, body, bytes);
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    pthread_mutex_lock(&cot_lock);
    struct pending call = {
        .sequence = message.header.sequence, .reply = reply, .passed_fd = passed_fd, .next = pending_calls};
    pending_calls = &call;
    cot_answered_by = atomic_load(&cot_agents_lost); /* if this agent is lost, the call fails */
    if (cot_agent_fd() < 0 || cot_wire_send(cot_agent_fd(), &message) != 0)
        call.outcome = -1;
    while (call.outcome == 0 && !cot_exiting())
        cot_rpc_wait();
    for (struct pending **link = &pending_calls; *link; link = &(*link)->next)
        if (*link == &call) {
            *link = call.next;
            break;
        }
    pthread_mutex_unlock(&cot_lock);
    pthread_setcancelstate(cancel, NULL);
    return call.outcome == 1 ? 0 : -1;
}

void cot_agent_warn(uint32_t code, const char *format, ...)
{
    struct cotenant_text text = {.code = code};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf((char *)text.text, sizeof text.text, format, arguments);
    va_end(arguments);
    cot_say("warning: %s", (char *)text.text);
    cot_agent_send(COTENANT_WARNING, COTENANT_NO_SLOT, &text, sizeof text);
}

/* Returns whether a message is the reply to a waiting call. If that call takes the passed descriptor over,
 * *passed_fd is set to -1. */
bool cot_rpc_reply(const struct cotenant_message *message, int *passed_fd)
{
    for (struct pending *call = pending_calls; call; call = call->next)
        if (call->sequence == message->header.sequence && call->outcome == 0) {
            *call->reply = *message;
            call->outcome = 1;
            if (call->passed_fd) {
                *call->passed_fd = *passed_fd;
                *passed_fd = -1;
            }
            pthread_cond_broadcast(&cot_changed);
            return true;
        }
    return question && message->header.sequence == question;
}

void cot_rpc_heard(void)
{
    heard_ns = cot_now_ns();
    asked_ns = 0;
}

/* Waits at most one second for cot_changed (a turn, a reply, or the loss of the agent). With fail_mode open, it also
 * sends a query to an agent that has been silent. */
void cot_rpc_wait(void)
{
    struct timespec look_again;
    clock_gettime(CLOCK_REALTIME, &look_again);
    look_again.tv_sec++;
    pthread_cond_timedwait(&cot_changed, &cot_lock, &look_again);
    uint64_t now = cot_now_ns();
    if (cot_agent_fd() < 0 || cot_fail_mode() != COTENANT_FAIL_OPEN || now - heard_ns < ASK_AFTER_NS)
        return;
    if (asked_ns == 0) {
        struct cotenant_message ask;
        struct cotenant_memory what = {.family = COTENANT_MEMORY_HOST};
        cot_wire_fill(&ask, COTENANT_MEMORY_QUERY, COTENANT_NO_SLOT, &what, sizeof what);
        question = ask.header.sequence;
        asked_ns = now;
        /* it does not matter whether the query can be sent: if the socket is full, the agent could not answer either */
        cot_wire_send(cot_agent_fd(), &ask);
    } else if (cot_rpc_agent_hangs())
        cot_agent_wake_helper();
}

bool cot_rpc_agent_hangs(void)
{
    return asked_ns != 0 && cot_now_ns() - asked_ns >= HANGS_AFTER_NS;
}

void cot_rpc_agent_lost(void)
{
    atomic_fetch_add(&cot_agents_lost, 1);
    for (struct pending *call = pending_calls; call; call = call->next)
        if (call->outcome == 0)
            call->outcome = -1;
    asked_ns = question = 0;
}

void cot_rpc_reset_after_fork(void)
{
    pending_calls = NULL;
    asked_ns = question = 0;
}
