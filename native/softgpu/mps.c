/* The client side of the simulated MPS. COTENANT_SOFTGPU_MPS turns it on; it names the program that stands in for the
 * MPS control command. At cuInit the process connects to the socket in the folder CUDA_MPS_PIPE_DIRECTORY, and the MPS
 * server answers with the number of SMs and the memory that the process may use. If the variable is not set, or no
 * server listens in the folder, the process has the whole GPU and gets no error, as with real MPS. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "softgpu.h"

#define SERVER_LOST 805 /* CUDA_ERROR_MPS_RPC_FAILURE */

static int connection = -1;
static pid_t joined_by;
static unsigned sms;            /* number of SMs that the MPS server lets the process use; 0: all */
static unsigned long long limit; /* memory limit of this process on each GPU; 0: there is none */

static int dial(const char *folder)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/control", folder);
    int fd = length < (int)sizeof address.sun_path ? socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Connects to the server; called by cuInit with soft_lock held. */
int soft_mps_join(void)
{
    static const char *names[] = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                                  "CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_SM_PARTITION"};
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!getenv("COTENANT_SOFTGPU_MPS") || joined_by == getpid())
        return CUDA_SUCCESS;
    joined_by = getpid();
    if (connection >= 0)
        close(connection); /* the connection belongs to the parent process, from which a fork inherited it */
    sms = 0;
    limit = 0;
    connection = folder ? dial(folder) : -1;
    if (connection < 0)
        return CUDA_SUCCESS;
    char text[2048];
    int used = snprintf(text, sizeof text, "client visible=%s", visible ? visible : "");
    for (size_t i = 0; i < sizeof names / sizeof names[0] && used < (int)sizeof text; i++)
        if (getenv(names[i]))
            used += snprintf(text + used, sizeof text - (size_t)used, " %s=%s", names[i], getenv(names[i]));
    if (used >= (int)sizeof text - 1)
        return CUDA_ERROR_INVALID_VALUE;
    text[used++] = '\n';
    int error = SERVER_LOST;
    ssize_t got = send(connection, text, (size_t)used, MSG_NOSIGNAL) == used ? recv(connection, text, sizeof text - 1, 0) : 0;
    text[got > 0 ? got : 0] = 0;
    return sscanf(text, "ok %u %llu", &sms, &limit) == 2 || sscanf(text, "error %d", &error) != 1 ? CUDA_SUCCESS : error;
}

/* Tells the server that the process has created a context on a GPU. */
void soft_mps_tell(int device)
{
    uint8_t uuid[16];
    char text[64];
    soft_uuid(device, uuid);
    int used = snprintf(text, sizeof text, "device GPU");
    for (int i = 0; i < 16; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%02x",
                         i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    text[used++] = '\n';
    if (connection >= 0)
        send(connection, text, (size_t)used, MSG_NOSIGNAL);
}

/* Returns the error that every call must return after the server has ended this client or has died itself; otherwise
 * CUDA_SUCCESS. */
int soft_mps_lost(void)
{
    char text[64] = "";
    if (connection < 0 || joined_by != getpid())
        return CUDA_SUCCESS;
    ssize_t got = recv(connection, text, sizeof text - 1, MSG_DONTWAIT | MSG_PEEK);
    int error = SERVER_LOST;
    if (got > 0)
        sscanf(text, "error %d", &error);
    return got < 0 ? CUDA_SUCCESS : error;
}

/* Returns the number of SMs that this process may use. */
unsigned soft_mps_sms(void)
{
    return sms ? sms : SOFT_SM_COUNT;
}

/* Returns the limit of this process's memory on each GPU; UINT64_MAX if there is none. */
uint64_t soft_mps_limit(void)
{
    return limit ? limit : UINT64_MAX;
}

/* Returns 1 if the process is a client of MPS, 0 if it is not, and -1 if MPS is not simulated. */
int soft_mps_client(void)
{
    return getenv("COTENANT_SOFTGPU_MPS") ? sms > 0 : -1;
}
