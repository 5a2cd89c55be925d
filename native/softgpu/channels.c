/* The driver objects behind contexts (clients, channel groups, channels), and the driver's controls on them, for the
 * software GPU. A program calls ioctl() to report the objects that it has created, as libcuda does. A process that
 * holds the program's device file may set time slices, and may disable channels; a group whose channels are all
 * disabled does not run. The kernel does not know these calls: the driver shim intercepts them, and passes those of
 * the software GPU to cotenant_soft_ioctl. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "softgpu.h"

enum { ESC_FREE = 0x29, ESC_CONTROL = 0x2a, ESC_ALLOC = 0x2b };
enum { CLASS_ROOT = 0x41, CLASS_DEVICE = 0x80, CLASS_SUBDEVICE = 0x2080, CLASS_GROUP = 0xa06c, CLASS_CHANNEL = 0xc86f,
       CLASS_COMPUTE = 0xcbc0 };
enum { OK = 0, BUSY = 0x03, INVALID_CLIENT = 0x23, INVALID_ARGUMENT = 0x1f, NO_OBJECT = 0x57, NOT_SUPPORTED = 0x56 };
#define CLIENT UINT32_C(0xc1d00000)
#define DEVICE UINT32_C(0x5d000000)
#define SUBDEVICE UINT32_C(0x5e000000)
/* the handle of a channel group is GROUP | device << 16 | group << 4; its channels have that handle | 1, 2, ... */
#define GROUP UINT32_C(0x5c000000)
#define COMPUTE UINT32_C(0x5f000000)
/* durations of the three control calls on a real GPU: set a time slice, disable channels, enable channels */
#define SET_NS 300000
#define OFF_NS 600000
#define ON_NS 350000
#define HIGH_FD 700

struct alloc {
    uint32_t root, parent, handle, class;
    uint64_t params, rights;
    uint32_t params_bytes, flags, status, unused;
};
struct free {
    uint32_t root, parent, handle, status;
};
struct control {
    uint32_t client, object, command, flags;
    uint64_t params;
    uint32_t bytes, status;
};
struct disable {
    uint8_t off, unused_0[3];
    uint32_t count;
    uint8_t only, rewind, unused_1[6];
    uint64_t event;
    uint32_t clients[64], channels[64];
};
struct uuid_text {
    uint32_t index, flags, length;
    char data[256];
};

static int file = -1;
static pid_t told_by;
static uint32_t told_devices;

static uint32_t group_handle(int device, int group)
{
    return GROUP | (uint32_t)device << 16 | (uint32_t)group << 4;
}

/* ---- objects that a program creates ---- */

static void tell(uint32_t parent, uint32_t handle, uint32_t class)
{
    /* parameters of a channel group: params[3], the only one that is set, is the engine of the group */
    uint32_t params[8] = {0, 0, 0, 1};
    struct alloc alloc = {.root = class == CLASS_ROOT ? 0 : CLIENT | soft_process_index(), .parent = parent, .handle = handle,
                          .class = class, .params = (uintptr_t)params, .params_bytes = sizeof params};
    int before = errno;
    ioctl(file, _IOWR('F', ESC_ALLOC, struct alloc), &alloc);
    errno = before;
}

void soft_tell_context(const struct soft_context *context)
{
    if (context->group < 0)
        return;
    if (told_by != getpid()) {
        if (file < 0)
            file = soft_open_state();
        int high = file >= 0 ? fcntl(file, F_DUPFD_CLOEXEC, HIGH_FD) : -1;
        if (high >= 0) {
            close(file);
            file = high;
        }
        told_by = getpid();
        told_devices = 0;
        tell(0, CLIENT | soft_process_index(), CLASS_ROOT);
    }
    uint32_t device = DEVICE | (uint32_t)context->device, group = group_handle(context->device, context->group);
    if (!(told_devices & 1u << context->device)) {
        told_devices |= 1u << context->device;
        tell(CLIENT | soft_process_index(), device, CLASS_DEVICE);
        tell(device, SUBDEVICE | (uint32_t)context->device, CLASS_SUBDEVICE);
    }
    tell(device, group, CLASS_GROUP);
    for (uint32_t channel = 1; channel <= SOFT_CHANNELS; channel++) {
        tell(group, group | channel, CLASS_CHANNEL);
        tell(group | channel, COMPUTE | (group & 0xffffff) | channel, CLASS_COMPUTE);
    }
}

void soft_tell_context_gone(const struct soft_context *context)
{
    if (context->group < 0 || told_by != getpid())
        return;
    struct free gone = {.root = CLIENT | soft_process_index(), .parent = DEVICE | (uint32_t)context->device,
                        .handle = group_handle(context->device, context->group)};
    int before = errno;
    ioctl(file, _IOWR('F', ESC_FREE, struct free), &gone);
    errno = before;
}

/* ---- controls ---- */

static void set_slice(struct soft_schedule *s, int group, uint64_t slice_us)
{
    uint64_t slice_ns = (slice_us ? slice_us : 1) * 1000;
    s->groups[group].slice_ns = slice_ns > SOFT_LONGEST_SLICE_NS ? SOFT_LONGEST_SLICE_NS : slice_ns;
    s->groups[group].slice_us = slice_us;
    if (s->current == (uint32_t)group + 1 && s->slice_end_ns > s->at_ns + slice_ns)
        s->slice_end_ns = s->at_ns + slice_ns;
}

static void switch_off(struct soft_schedule *s, int group, uint64_t channel)
{
    s->groups[group].disabled[channel]++;
    s->groups[group].off |= 1u << channel;
}

/* As measured on an H200: a channel that was disabled n times runs again after it was enabled n times; enabling a
 * channel that is not disabled has no effect. */
static void switch_on(struct soft_schedule *s, int group, uint64_t channel)
{
    if (s->groups[group].disabled[channel] > 0 && --s->groups[group].disabled[channel] == 0)
        s->groups[group].off &= ~(1u << channel);
}

static void preempt(struct soft_schedule *s, int group, uint64_t unused)
{
    (void)unused;
    if (s->current == (uint32_t)group + 1)
        s->slice_end_ns = s->at_ns;
}

static uint32_t find(uint32_t client, uint32_t handle, int *device, int *group)
{
    uint64_t owner = (client & 0xfff00000) == CLIENT ? soft_process_at(client & 0xfffff) : 0;
    if (!owner)
        return INVALID_CLIENT;
    *device = (int)(handle >> 16 & 0xff);
    *group = (int)(handle >> 4 & 0xfff);
    if ((handle & 0xff000000) != GROUP || *device >= (int)soft_state()->device_count || *group >= SOFT_MAX_GROUPS ||
        atomic_load(&soft_state()->devices[*device].group_owner[*group]) != owner)
        return NO_OBJECT;
    return OK;
}

/* Whether the driver refuses this control now, for tests: the file $COTENANT_SOFTGPU_REFUSES contains the control's
 * name. Each refusal is a line of the file beside it whose name ends with `.log`: process, control. */
static bool is_refused(const char *name)
{
    const char *path = getenv("COTENANT_SOFTGPU_REFUSES");
    FILE *names = path && *path ? fopen(path, "re") : NULL;
    char each[32], log_path[4096];
    bool found = false;
    while (names && !found && fscanf(names, "%31s", each) == 1)
        found = strcmp(each, name) == 0;
    if (names)
        fclose(names);
    if (!found || snprintf(log_path, sizeof log_path, "%s.log", path) >= (int)sizeof log_path)
        return found;
    FILE *log = fopen(log_path, "ae");
    if (log) {
        fprintf(log, "%d %s\n", (int)getpid(), name);
        fclose(log);
    }
    return true;
}

static uint32_t disable(const struct disable *order)
{
    int device, group;
    if (is_refused(order->off ? "disable" : "enable"))
        return BUSY;
    for (uint32_t i = 0; i < order->count && i < 64; i++) {
        uint32_t status = find(order->clients[i], order->channels[i], &device, &group), channel = order->channels[i] & 0xf;
        if (status != OK || channel == 0 || channel > SOFT_CHANNELS)
            return status != OK ? status : NO_OBJECT;
        soft_group_change(device, group, order->off ? switch_off : switch_on, channel - 1);
    }
    soft_sleep_until(soft_now_ns() + (order->off ? OFF_NS : ON_NS));
    return OK;
}

static uint32_t of_group(uint32_t command, int device, int group, void *params)
{
    struct soft_group now;
    switch (command) {
    case 0xa06c0103:
        if (is_refused("slice"))
            return BUSY;
        soft_sleep_until(soft_now_ns() + SET_NS);
        soft_group_change(device, group, set_slice, *(uint64_t *)params);
        return OK;
    case 0xa06c0104:
        now = soft_group_change(device, group, NULL, 0);
        *(uint64_t *)params = now.slice_us ? now.slice_us : now.slice_ns / 1000;
        return OK;
    case 0xa06c0105:
        soft_group_change(device, group, preempt, 0);
        return OK;
    case 0xa06c0106:
        *(uint32_t *)params = (uint32_t)group;
        return OK;
    /* only the software GPU has this call; it returns the GPU time of the channel group and its numbers of runs and
     * yields */
    case 0x50f70001:
        now = soft_group_change(device, group, NULL, 0);
        memcpy(params, &(uint64_t[3]){now.busy_ns, now.runs, now.yields}, 24);
        return OK;
    default:
        return NOT_SUPPORTED;
    }
}

static uint32_t control(const struct control *order)
{
    void *params = (void *)(uintptr_t)order->params;
    int device, group;
    if (order->command == 0x2080110b)
        return order->bytes == sizeof(struct disable) ? disable(params) : INVALID_ARGUMENT;
    if (order->command == 0x2080014a) {
        struct uuid_text *text = params;
        uint8_t uuid[16];
        soft_uuid((int)(order->object & 0xff), uuid);
        int length = snprintf(text->data, sizeof text->data, "GPU-");
        for (int i = 0; i < 16; i++)
            length += snprintf(text->data + length, sizeof text->data - (size_t)length, "%s%02x",
                               i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
        text->length = (uint32_t)length + 1;
        return OK;
    }
    uint32_t status = find(order->client, order->object, &device, &group);
    return status == OK ? of_group(order->command, device, group, params) : status;
}

EXPORT int cotenant_soft_ioctl(int fd, unsigned long request, void *argument)
{
    if (_IOC_TYPE(request) != 'F' || soft_map_file(fd) != 0) {
        errno = ENOTTY;
        return -1;
    }
    if (_IOC_NR(request) == ESC_CONTROL && _IOC_SIZE(request) == sizeof(struct control)) {
        struct control *order = argument;
        order->status = control(order);
    }
    return 0;
}
