/* The interface of messages, of the connection to the agent, and of the shim's threads. */
#ifndef COTENANT_IPC_ROOM_H
#define COTENANT_IPC_ROOM_H

#include "shim.h"

/* ---- wire.c ---- */
HIDDEN void cot_wire_fill(struct cotenant_message *message, uint16_t type, uint32_t slot, const void *body, size_t bytes);
/* moves a descriptor to a high number, which programs do not use: returns a duplicate and closes the original; if it
 * cannot be duplicated, returns the original, still open */
HIDDEN int cot_wire_high(int fd);
HIDDEN int cot_wire_send(int fd, struct cotenant_message *message);
HIDDEN int cot_wire_send_with(int fd, struct cotenant_message *message, int passed);
/* the functions that receive a message return 1: received; 0: there is no message; -1: connection lost; -2: invalid
 * message */
HIDDEN int cot_wire_receive(int fd, struct cotenant_message *message, int *passed_fd);
HIDDEN int cot_wire_receive_now(int fd, struct cotenant_message *message, int *passed_fd);
HIDDEN int cot_wire_introduce(struct cotenant_hello_reply *terms, struct cotenant_page **page, bool quiet);

/* ---- channels.c ---- */
HIDDEN void cot_channels_driver(int (*call)(int fd, unsigned long request, void *argument));
/* sends the agent the channel groups that have changed since the last call; called on the helper thread */
HIDDEN void cot_channels_report(int agent_fd);
HIDDEN void cot_channels_report_again(void);   /* makes the next report to the agent contain all channel groups */

/* ---- rpc.c ---- */
extern HIDDEN _Atomic uint64_t cot_agents_lost; /* how often this process has lost its agent */
/* how many agents were lost before the one that answered this thread's last call */
extern HIDDEN __thread uint64_t cot_answered_by __attribute__((tls_model("initial-exec")));
HIDDEN int cot_agent_send(uint16_t type, uint32_t slot, const void *body, size_t bytes);
HIDDEN int cot_agent_answer(uint16_t type, uint32_t slot, uint64_t sequence, uint32_t status, const void *body, size_t bytes);
HIDDEN int cot_agent_call_fd(uint16_t type, uint32_t slot, const void *body, size_t bytes, struct cotenant_message *reply,
                             int *passed_fd);
static inline int cot_agent_call(uint16_t type, uint32_t slot, const void *body, size_t bytes, struct cotenant_message *reply)
{
    return cot_agent_call_fd(type, slot, body, bytes, reply, NULL);
}
HIDDEN void cot_agent_warn(uint32_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));
HIDDEN bool cot_rpc_reply(const struct cotenant_message *message, int *passed_fd);
HIDDEN void cot_rpc_heard(void);
HIDDEN void cot_rpc_agent_lost(void);
HIDDEN bool cot_rpc_agent_hangs(void);
HIDDEN void cot_rpc_wait(void);
HIDDEN void cot_rpc_reset_after_fork(void);

/* ---- agent.c ---- */
HIDDEN int cot_agent_connect(void); /* returns 0, or the CUresult that the program gets */
HIDDEN bool cot_agent_is_connected(void);
HIDDEN int cot_agent_fd(void); /* returns the socket of the connection; -1 if the process is not connected */
HIDDEN void cot_agent_wake_helper(void);
HIDDEN struct cotenant_page *cot_agent_page(void);
HIDDEN uint32_t cot_fail_mode(void);
HIDDEN bool cot_exiting(void);
HIDDEN bool cot_start_thread(void *(*body)(void *), void *argument); /* starts a detached thread with all signals blocked */
/* signalled when a turn has begun, a reply has arrived, or the agent was lost; used together with cot_lock */
extern HIDDEN pthread_cond_t cot_changed;

#endif
