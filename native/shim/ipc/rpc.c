/* What is said to the agent: messages without a reply, and calls that wait for one.
 *
 * An agent that is gone is noticed by its socket.  One that hangs is not: a tenant that is to go on without an agent
 * (fail: open) counts it as gone when it has not said anything for a while although it was asked. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "shim.h"

#define ASK_AFTER_NS UINT64_C(3000000000)  /* of silence, while somebody waits for the agent */
#define HANGS_AFTER_NS UINT64_C(10000000000)

struct pending {
    uint64_t sequence;
    int outcome; /* 0: waiting, 1: reply, -1: agent lost */
    struct cotenant_message *reply;
    int *passed_fd; /* where the caller wants a descriptor that comes with the reply, or NULL */
    struct pending *next;
};

static struct pending *pending_calls; /* with cot_lock, as all here */
static uint64_t heard_ns;             /* when the agent last said something */
static uint64_t asked_ns;             /* when it was asked whether it lives; 0: it was not since then */
static uint64_t question;             /* sequence of that */

int cot_agent_send(uint16_t type, uint32_t slot, const void *body, size_t bytes)
{
    struct cotenant_message message;
    cot_wire_fill(&message, type, slot, body, bytes);
    int fd = cot_agent_fd();
    return fd >= 0 ? cot_wire_send(fd, &message) : -1;
}

/* The same as an answer: with the sequence of what it answers, and a status. */
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

/* Sends and waits for the reply, and for the descriptor that may come with it (*passed_fd, else -1).  -1: the agent is
 * lost. */
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

/* Is it the reply to a call?  Takes passed_fd where that call wants it (then it is -1). */
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

/* Waits for something to change, a second at most; asks a silent agent whether it lives. */
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
        cot_wire_send(cot_agent_fd(), &ask); /* finding no room is no answer either */
    } else if (cot_rpc_agent_hangs())
        cot_agent_wake_helper();
}

bool cot_rpc_agent_hangs(void)
{
    return asked_ns != 0 && cot_now_ns() - asked_ns >= HANGS_AFTER_NS;
}

void cot_rpc_agent_lost(void)
{
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
