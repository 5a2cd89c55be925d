/* Finds the driver's channel groups behind the program's contexts. libcuda creates these objects by ioctl(), and
 * calls the definition in this file because the shim is preloaded. Each compute channel group is sent to the agent,
 * together with the file on which its client (the driver's owner of objects) was created: a process that holds this
 * file can set the group's time slice. Launches make no ioctl(), so they do not become slower. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim.h"

enum { ESC_FREE = 0x29, ESC_ALLOC = 0x2b };
enum { CLASS_DEVICE = 0x80, CLASS_SUBDEVICE = 0x2080, CLASS_GROUP = 0xa06c };
#define ANY_CHANNEL 0x6f /* the last byte of the class of every channel, whatever the generation of the GPU */
#define ANY_COMPUTE 0xc0
#define MOST_OBJECTS 8192
#define MOST_GROUPS 256
#define MOST_CHANNELS (sizeof((struct cotenant_channel_group *)0)->channels / sizeof(uint32_t))

struct object {
    uint32_t client, handle, parent, class;
    int fd; /* descriptor of the device file on which the object was created */
};

/* Arguments of the driver's allocation call. Current libraries use `new`, which has rights and flags; older ones use
 * `old`. */
struct alloc {
    uint32_t client, parent, handle, class;
    uint64_t params;
    union {
        struct {
            uint32_t params_bytes, status;
        } old;
        struct {
            uint64_t rights;
            uint32_t params_bytes, flags, status, unused;
        } new;
    };
};
struct free {
    uint32_t client, parent, handle, status;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* protects all variables below */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct object objects[MOST_OBJECTS];
static uint32_t object_count;
/* the channel groups as this process last reported them to the agent */
static struct cotenant_channel_group told[MOST_GROUPS];
static uint32_t told_count;
static _Atomic bool changed;

static int (*next_ioctl)(int, unsigned long, ...);
/* the function to call instead of ioctl if the driver is the software GPU (native/softgpu), which has no device file */
static int (*driver_ioctl)(int, unsigned long, void *);

void cot_channels_driver(int (*call)(int, unsigned long, void *))
{
    driver_ioctl = call;
}

static void in_child(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&lock, &fresh, sizeof fresh);
    object_count = told_count = 0;
    changed = false;
}

static void at_first(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

/* ---- objects ---- */

static bool is_root(uint32_t class)
{
    return class == 0 || class == 1 || class == 0x41;
}

static bool is_generation_of(uint32_t class, uint32_t kind)
{
    return class >= 0xa000 && class <= 0xffff && (class & 0xff) == kind;
}

static void gone(uint32_t client, uint32_t handle);

static void made(struct object object) /* the caller holds `lock`, which protects the table of objects */
{
    bool matters = is_root(object.class) || object.class == CLASS_DEVICE || object.class == CLASS_SUBDEVICE ||
                   object.class == CLASS_GROUP || is_generation_of(object.class, ANY_CHANNEL) ||
                   is_generation_of(object.class, ANY_COMPUTE);
    if (is_root(object.class)) {
        object.client = object.handle;
        /* client numbers are reused; a new client with this number means that the earlier one has ended together
         * with its file */
        gone(object.client, object.handle);
    }
    if (!matters || object_count == MOST_OBJECTS)
        return;
    objects[object_count++] = object;
    if (is_generation_of(object.class, ANY_CHANNEL) || is_generation_of(object.class, ANY_COMPUTE))
        changed = true;
}

/* Removes an object and its children, since the driver frees them together. The caller holds lock. */
static void gone(uint32_t client, uint32_t handle)
{
    for (uint32_t i = 0; i < object_count;) {
        struct object object = objects[i];
        if (object.client == client && (object.handle == handle || handle == client)) {
            objects[i] = objects[--object_count];
            changed |= object.class == CLASS_GROUP || is_generation_of(object.class, ANY_CHANNEL) || handle == client;
            i = 0;
            if (handle != client)
                for (uint32_t k = 0; k < object_count; k++)
                    if (objects[k].client == client && objects[k].parent == handle) {
                        gone(client, objects[k].handle);
                        k = UINT32_MAX;
                    }
        } else
            i++;
    }
}

static void look(int fd, unsigned long request, const void *argument)
{
    uint32_t bytes = _IOC_SIZE(request);
    const struct alloc *alloc = argument;
    const struct free *free = argument;
    bool makes = _IOC_NR(request) == ESC_ALLOC && (bytes == 32 || bytes == 48) &&
                 (bytes == 32 ? alloc->old.status : alloc->new.status) == 0;
    bool frees = _IOC_NR(request) == ESC_FREE && bytes == sizeof *free && free->status == 0;
    if (!makes && !frees)
        return;
    pthread_once(&once, at_first);
    pthread_mutex_lock(&lock);
    if (makes)
        made((struct object){.client = alloc->client, .handle = alloc->handle, .parent = alloc->parent, .class = alloc->class, .fd = fd});
    else
        gone(free->client, free->handle);
    bool tell = changed;
    pthread_mutex_unlock(&lock);
    if (tell)
        cot_agent_wake_helper();
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (UNLIKELY(!next_ioctl))
        next_ioctl = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    bool of_driver = _IOC_TYPE(request) == 'F' && argument;
    int result = of_driver && driver_ioctl ? driver_ioctl(fd, request, argument)
                 : next_ioctl              ? next_ioctl(fd, request, argument)
                                           : (int)syscall(SYS_ioctl, fd, request, argument);
    if (of_driver && result >= 0) {
        int saved = errno;
        look(fd, request, argument);
        errno = saved;
    }
    return result;
}

/* ---- channel groups ---- */

static const struct object *child_of(uint32_t client, uint32_t parent, bool (*is)(uint32_t class))
{
    for (uint32_t i = 0; i < object_count; i++)
        if (objects[i].client == client && objects[i].parent == parent && is(objects[i].class))
            return &objects[i];
    return NULL;
}

static bool is_subdevice(uint32_t class)
{
    return class == CLASS_SUBDEVICE;
}

static bool is_compute(uint32_t class)
{
    return is_generation_of(class, ANY_COMPUTE);
}

/* Collects the parts of a channel group; returns false if some do not exist yet. A group that has a compute object
 * belongs to the compute engine. */
static bool describe(const struct object *group, struct cotenant_channel_group *out)
{
    const struct object *subdevice = child_of(group->client, group->parent, is_subdevice);
    *out = (struct cotenant_channel_group){.client = group->client, .device = group->parent, .group = group->handle,
                                           .subdevice = subdevice ? subdevice->handle : 0};
    for (uint32_t i = 0; i < object_count && out->channel_count < MOST_CHANNELS; i++)
        if (objects[i].client == group->client && objects[i].parent == group->handle &&
            is_generation_of(objects[i].class, ANY_CHANNEL)) {
            memcpy(out->channels + sizeof(uint32_t) * out->channel_count++, &objects[i].handle, sizeof(uint32_t));
            out->compute |= child_of(group->client, objects[i].handle, is_compute) != NULL;
        }
    return subdevice && out->channel_count > 0;
}

static int file_of(uint32_t client)
{
    for (uint32_t i = 0; i < object_count; i++)
        if (is_root(objects[i].class) && objects[i].handle == client)
            return objects[i].fd;
    return -1;
}

static struct cotenant_channel_group *told_of(const struct cotenant_channel_group *group)
{
    for (uint32_t i = 0; i < told_count; i++)
        if (told[i].client == group->client && told[i].group == group->group)
            return &told[i];
    return NULL;
}

static void send_group(int agent_fd, const struct cotenant_channel_group *group, int file)
{
    struct cotenant_message message;
    cot_wire_fill(&message, COTENANT_CHANNEL_GROUP, COTENANT_NO_SLOT, group, sizeof *group);
    if (file >= 0 || group->channel_count == 0)
        cot_wire_send_with(agent_fd, &message, file);
}

void cot_channels_report_again(void)
{
    pthread_mutex_lock(&lock);
    told_count = 0;
    changed = object_count > 0;
    pthread_mutex_unlock(&lock);
}

void cot_channels_report(int agent_fd)
{
    if (!changed)
        return;
    pthread_mutex_lock(&lock);
    changed = false;
    bool stays[MOST_GROUPS] = {false};
    for (uint32_t i = 0; i < object_count; i++) {
        struct cotenant_channel_group group, *known;
        if (objects[i].class != CLASS_GROUP || !describe(&objects[i], &group))
            continue;
        known = told_of(&group);
        if (!known && told_count == MOST_GROUPS)
            continue;
        if (!known) {
            known = &told[told_count++];
            memset(known, 0, sizeof *known);
        }
        stays[known - told] = true;
        if (memcmp(known, &group, sizeof group) != 0)
            send_group(agent_fd, &group, file_of(group.client));
        *known = group;
    }
    for (uint32_t i = told_count; i-- > 0;)
        if (!stays[i]) {
            told[i].channel_count = 0;
            send_group(agent_fd, &told[i], -1);
            told[i] = told[--told_count];
            stays[i] = stays[told_count];
        }
    pthread_mutex_unlock(&lock);
}
