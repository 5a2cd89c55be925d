/* Sends and receives messages on the socket between this process and the agent, and opens the connection by a
 * handshake. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "shim.h"

#define SEND_PATIENCE_MS 2000
#define ANSWER_PATIENCE_S 10
#define HIGH_FD 600

static _Atomic uint64_t next_sequence = 1;

/* Sends a message, together with a descriptor if `passed` is not -1. */
int cot_wire_send_with(int fd, struct cotenant_message *message, int passed)
{
    union {
        struct cmsghdr aligned;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (passed >= 0) {
        header.msg_control = &control;
        header.msg_controllen = sizeof control;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof passed);
        memcpy(CMSG_DATA(rights), &passed, sizeof passed);
    }
    message->header.sent_ns = cot_now_ns();
    for (int tries = 0; tries < SEND_PATIENCE_MS; tries++) {
        ssize_t sent = sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent == (ssize_t)sizeof *message)
            return 0;
        if (sent >= 0 || (errno != EAGAIN && errno != EINTR && errno != ENOBUFS))
            return -1;
        struct pollfd writable = {.fd = fd, .events = POLLOUT};
        poll(&writable, 1, 1);
    }
    return -1;
}

int cot_wire_send(int fd, struct cotenant_message *message)
{
    return cot_wire_send_with(fd, message, -1);
}

void cot_wire_fill(struct cotenant_message *message, uint16_t type, uint32_t slot, const void *body, size_t bytes)
{
    memset(message, 0, sizeof *message);
    message->header.magic = COTENANT_PROTOCOL_MAGIC;
    message->header.version = COTENANT_PROTOCOL_VERSION;
    message->header.type = type;
    message->header.slot = slot;
    message->header.sequence = atomic_fetch_add(&next_sequence, 1);
    if (bytes > sizeof message->body)
        bytes = sizeof message->body;
    if (body)
        memcpy(&message->body, body, bytes);
}

static uint64_t own_start_time(void)
{
    char line[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, line, sizeof line - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (length <= 0)
        return 0;
    line[length] = '\0';
    /* field 22 of /proc/PID/stat; the count starts after field 2, the program's name in parentheses, because the
     * name may contain any character */
    char *field = strrchr(line, ')');
    for (int i = 0; field && i < 20; i++)
        field = strchr(field + 1, ' ');
    return field ? strtoull(field + 1, NULL, 10) : 0;
}

static int receive(int fd, struct cotenant_message *message, int *passed_fd, int flags)
{
    union {
        struct cmsghdr aligned;
        char bytes[CMSG_SPACE(sizeof(int) * 4)];
    } control;
    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got;
    do
        got = recvmsg(fd, &header, MSG_CMSG_CLOEXEC | flags);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return errno == EAGAIN ? 0 : -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            for (int i = 0; i < count; i++) {
                int received;
                memcpy(&received, CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof received);
                if (passed_fd && *passed_fd < 0)
                    *passed_fd = received;
                else
                    close(received);
            }
        }
    if (got != (ssize_t)sizeof *message || header.msg_flags & MSG_TRUNC ||
        message->header.magic != COTENANT_PROTOCOL_MAGIC || message->header.version != COTENANT_PROTOCOL_VERSION)
        return got == 0 ? -1 : -2;
    return 1;
}

int cot_wire_receive(int fd, struct cotenant_message *message, int *passed_fd)
{
    return receive(fd, message, passed_fd, 0);
}

int cot_wire_receive_now(int fd, struct cotenant_message *message, int *passed_fd)
{
    return receive(fd, message, passed_fd, MSG_DONTWAIT);
}

/* Moves a descriptor to a high number. Some programs close low numbers that they consider their own, or expect the
 * next new descriptor to have a low number. */
int cot_wire_high(int fd)
{
    int high = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, HIGH_FD) : -1;
    if (high < 0)
        return fd;
    close(fd);
    return high;
}

static int open_socket(void)
{
    const char *path = getenv(COTENANT_ENV_SOCKET);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || !path[0] || strlen(path) >= sizeof address.sun_path) {
        errno = EINVAL;
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path));
    int fd = cot_wire_high(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    /* the time limit of connect() and of each send, which would otherwise wait for ever if the agent is suspended and
     * its socket is full */
    struct timeval patience = {.tv_sec = ANSWER_PATIENCE_S};
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

static bool map_page(int fd, struct cotenant_page **page)
{
    struct cotenant_page *mapped = mmap(NULL, COTENANT_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return false;
    if (mapped->magic != COTENANT_PROTOCOL_MAGIC || mapped->version != COTENANT_PROTOCOL_VERSION) {
        munmap(mapped, COTENANT_PAGE_BYTES);
        return false;
    }
    *page = mapped; /* the shared page of the previous connection stays mapped, since another thread may still use it */
    return true;
}

static void program_name(uint8_t *into, size_t bytes)
{
    int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, into, bytes - 1) : 0;
    if (fd >= 0)
        close(fd);
    while (length > 0 && into[length - 1] == '\n')
        into[--length] = 0;
}


static void say_why(struct cotenant_message *refusal)
{
    if (!refusal)
        cot_say("the agent does not support protocol version %u: install the same release of agent and shim", COTENANT_PROTOCOL_VERSION);
    else if (refusal->header.type == COTENANT_ERROR) {
        refusal->body.text.text[sizeof refusal->body.text.text - 1] = 0;
        cot_say("the agent refused this program: %s", (char *)refusal->body.text.text);
    } else if (refusal->header.status != COTENANT_OK)
        cot_say("the agent refused this program (status %u)", refusal->header.status);
    else
        cot_say("the shared page that the agent sent does not have protocol version %u: install the same release of agent "
                "and shim", COTENANT_PROTOCOL_VERSION);
}

/* Tries once to connect: sends HELLO, and maps the page that comes with the reply. Returns the socket; -1 if no
 * agent listens; -2 if the agent refused this process (unless `quiet`, its reason is printed). */
int cot_wire_introduce(struct cotenant_hello_reply *terms, struct cotenant_page **page, bool quiet)
{
    int fd = open_socket();
    if (fd < 0)
        return -1;
    struct timeval patience = {.tv_sec = ANSWER_PATIENCE_S};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    struct cotenant_hello hello = {.pid = (uint32_t)getpid(), .start_time_ticks = own_start_time(),
                                   .shim_version = COTENANT_PROTOCOL_VERSION};
    int version = 0;
    if (REAL(cuDriverGetVersion)(&version) == CUDA_SUCCESS)
        hello.driver_version = (uint32_t)version;
    const char *token = getenv(COTENANT_ENV_TOKEN);
    if (token)
        strncpy((char *)hello.token, token, sizeof hello.token - 1);
    program_name(hello.program, sizeof hello.program);
    struct cotenant_message message;
    cot_wire_fill(&message, COTENANT_HELLO, COTENANT_NO_SLOT, &hello, sizeof hello);
    int page_fd = -1, got = -1;
    if (cot_wire_send(fd, &message) == 0)
        got = cot_wire_receive(fd, &message, &page_fd);
    bool good = got == 1 && message.header.type == COTENANT_HELLO_REPLY && message.header.status == COTENANT_OK &&
                page_fd >= 0 && map_page(page_fd, page);
    if (page_fd >= 0)
        close(page_fd);
    if (!good) {
        close(fd);
        if (got == 0 && !quiet)
            cot_say("the agent does not answer within %d s", ANSWER_PATIENCE_S);
        else if (got != -1 && !quiet)
            say_why(got == 1 ? &message : NULL);
        return got == -1 ? -1 : -2;
    }
    *terms = message.body.hello_reply;
    return fd;
}
