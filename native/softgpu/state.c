/* The state that all processes share in a file: the schedules of the devices, and their memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "limits.h"

#define STATE_MAGIC UINT64_C(0x736f667467707533)
#define REAP_PERIOD_NS 10000000

static struct soft_state *state;
static struct soft_process *self;
static pid_t self_pid;
static uint64_t last_reap_ns;

uint64_t soft_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void soft_sleep_until(uint64_t when_ns)
{
    struct timespec when = {.tv_sec = (time_t)(when_ns / 1000000000), .tv_nsec = (long)(when_ns % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR)
        ;
}

void soft_take_time(void)
{
    static _Atomic int64_t call_ns = -1;
    int64_t ns = atomic_load(&call_ns);
    if (ns < 0) {
        const char *given = getenv("COTENANT_SOFTGPU_CALL_NS");
        atomic_store(&call_ns, ns = given ? atoll(given) : 0);
    }
    if (ns > 0)
        soft_sleep_until(soft_now_ns() + (uint64_t)ns);
}

struct soft_state *soft_state(void)
{
    return state;
}

static uint64_t start_time(pid_t pid)
{
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, line, sizeof line - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (length <= 0)
        return 0;
    line[length] = '\0';
    char *field = strrchr(line, ')');
    if (field && (field[2] == 'Z' || field[2] == 'X'))
        return 0; /* a zombie has ended already, so it counts as dead */
    for (int i = 0; field && i < 20; i++)
        field = strchr(field + 1, ' ');
    return field ? strtoull(field + 1, NULL, 10) : 0;
}

static uint64_t identity(pid_t pid)
{
    return (uint64_t)(uint32_t)pid << 32 | (uint32_t)start_time(pid);
}

static uint64_t number_from(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    uint64_t value = text ? strtoull(text, NULL, 10) : 0;
    return value ? value : otherwise;
}

int soft_open_state(void)
{
    char path[256];
    const char *named = getenv("COTENANT_SOFTGPU_STATE");
    if (named && named[0])
        snprintf(path, sizeof path, "%s", named);
    else
        snprintf(path, sizeof path, "/dev/shm/cotenant-softgpu-%u", (unsigned)getuid());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    int why = fd < 0 || ftruncate(fd, sizeof(struct soft_state)) != 0 ? errno : 0;
    /* without this allocation, an access to the mapped file would end the process by SIGBUS if the disk were full */
    int full = why ? 0 : posix_fallocate(fd, 0, sizeof(struct soft_state));
    if (full == ENOSPC || full == EDQUOT)
        why = full;
    if (why) {
        fprintf(stderr, "software GPU: the state file %s cannot be used: %s\n", path, strerror(why));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

/* Initialises a new state file, which is all zeros. If two processes do this at the same time, both write the same
 * values. */
static void found(struct soft_state *fresh)
{
    if (atomic_load(&fresh->magic) == STATE_MAGIC)
        return;
    uint64_t count = number_from("COTENANT_SOFTGPU_COUNT", 1);
    fresh->device_count = count > SOFT_MAX_DEVICES ? SOFT_MAX_DEVICES : (uint32_t)count;
    fresh->memory_bytes = number_from("COTENANT_SOFTGPU_MEMORY", SOFT_DEFAULT_MEMORY);
    fresh->link_bytes_per_us[0] = number_from("COTENANT_SOFTGPU_LINK_MBPS", SOFT_TO_DEVICE_BYTES_PER_US);
    fresh->link_bytes_per_us[1] = number_from("COTENANT_SOFTGPU_LINK_MBPS", SOFT_TO_HOST_BYTES_PER_US);
    atomic_store(&fresh->magic, STATE_MAGIC);
}

uint64_t soft_identity(void)
{
    static uint64_t mine;
    static pid_t whose;
    if (whose != getpid()) {
        mine = identity(getpid());
        whose = getpid();
    }
    return mine;
}

static struct soft_process *take_entry(void)
{
    uint64_t mine = soft_identity();
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES; i++) {
        uint64_t nobody = 0;
        if (atomic_compare_exchange_strong(&state->processes[i].owner, &nobody, mine))
            return &state->processes[i];
    }
    return NULL;
}

int soft_map(void)
{
    if (state)
        return CUDA_SUCCESS;
    int fd = soft_open_state();
    if (fd < 0)
        return CUDA_ERROR_NO_DEVICE;
    void *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    state = mapped;
    found(state);
    return CUDA_SUCCESS;
}

int soft_map_file(int fd)
{
    static struct stat mapped_file;
    struct stat found;
    if (self) /* a process that uses a device must not switch to another state file */
        return 0;
    if (syscall(SYS_fstat, fd, &found) != 0 || found.st_size < (off_t)sizeof *state)
        return -1;
    if (state && found.st_ino == mapped_file.st_ino && found.st_dev == mapped_file.st_dev)
        return 0;
    struct soft_state *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED || atomic_load(&mapped->magic) != STATE_MAGIC)
        return -1;
    state = mapped;
    mapped_file = found;
    return 0;
}

uint32_t soft_process_index(void)
{
    return (uint32_t)(self - state->processes);
}

uint64_t soft_process_at(uint32_t index)
{
    uint64_t owner = index < SOFT_MAX_PROCESSES ? atomic_load(&state->processes[index].owner) : 0;
    return soft_is_dead(owner) ? 0 : owner;
}

void soft_uuid(int device, uint8_t uuid[16])
{
    memcpy(uuid, "cotenant softgpu", 16);
    uuid[8] = (uint8_t)('0' + device);
}

int soft_attach(void)
{
    if (self && self_pid == getpid())
        return CUDA_SUCCESS;
    int result = soft_map();
    if (result != CUDA_SUCCESS)
        return result;
    soft_reap();
    self = take_entry();
    self_pid = getpid();
    return self ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

bool soft_is_dead(uint64_t owner)
{
    pid_t pid = (pid_t)(owner >> 32);
    return owner != 0 && (kill(pid, 0) != 0 && errno == ESRCH ? true : identity(pid) != owner);
}

/* Shortens a schedule to the end of the last time span that a live process has reserved on it. */
static void shorten(_Atomic uint64_t *until_ns, size_t tail)
{
    uint64_t until = atomic_load(until_ns), latest = 0;
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES; i++) {
        uint64_t end = atomic_load((_Atomic uint64_t *)((char *)&state->processes[i] + tail));
        latest = end > latest ? end : latest;
    }
    if (latest < until)
        atomic_compare_exchange_strong(until_ns, &until, latest);
}

/* Frees the entries of dead processes and the future time spans that they had reserved: a real device also drops the
 * work of a killed context. Before it clears an entry, this process makes itself the owner of the entry. Without that,
 * the entry could be freed by a second process and claimed by a third, whose values would then be cleared. */
void soft_reap(void)
{
    bool freed = false;
    uint64_t mine = soft_identity();
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES; i++) {
        struct soft_process *process = &state->processes[i];
        uint64_t owner = atomic_load(&process->owner);
        if (owner == 0 || process == self || !soft_is_dead(owner) ||
            !atomic_compare_exchange_strong(&process->owner, &owner, mine))
            continue;
        for (uint32_t d = 0; d < SOFT_MAX_DEVICES; d++) {
            atomic_store(&process->tail_ns[d], 0);
            atomic_store(&process->shape[d], 0);
            atomic_store(&process->bytes[d], 0);
            atomic_store(&process->engine_tail_ns[d][0], 0);
            atomic_store(&process->engine_tail_ns[d][1], 0);
            atomic_store(&process->saved_bytes[d], 0);
            atomic_store(&process->place[d], 0);
        }
        atomic_store(&process->checkpoint, 0);
        atomic_store(&process->managed, 0);
        atomic_store(&process->owner, 0);
        freed = true;
    }
    for (uint32_t d = 0; freed && d < state->device_count; d++) {
        shorten(&state->devices[d].busy_until_ns, offsetof(struct soft_process, tail_ns[d]));
        for (int direction = 0; direction < 2; direction++)
            shorten(&state->devices[d].engine_until_ns[direction], offsetof(struct soft_process, engine_tail_ns[d][direction]));
    }
}

static bool others_interleave(struct soft_device *device, int number, uint64_t now)
{
    uint64_t last = atomic_load(&device->last_process);
    if (last == 0 || &state->processes[last - 1] == self)
        return false;
    struct soft_process *other = &state->processes[last - 1];
    return atomic_load(&other->owner) != 0 && atomic_load(&other->tail_ns[number]) + SOFT_SLICED_WINDOW_NS > now &&
           atomic_load(&other->tail_ns[number]) > now;
}

/* Returns the device that now holds the memory which this process allocated on device `number`. A restore from a
 * checkpoint may have moved that memory to another device. */
static int place_of(int number)
{
    uint32_t place = self ? atomic_load(&self->place[number]) : 0;
    return place ? (int)place - 1 : number;
}

void soft_pass(void)
{
    while (self && atomic_load(&self->checkpoint) != 0)
        soft_sleep_until(soft_now_ns() + 200000);
}

void soft_note_managed(void)
{
    atomic_store(&self->managed, 1);
}

struct soft_process *soft_process_of(int pid)
{
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES; i++)
        if (atomic_load(&state->processes[i].owner) >> 32 == (uint32_t)pid && !soft_is_dead(atomic_load(&state->processes[i].owner)))
            return &state->processes[i];
    return NULL;
}

/* Reserves the next free time span of a device, from not_before_ns on, and returns its end. */
uint64_t soft_reserve(int number, uint64_t not_before_ns, struct soft_unit unit)
{
    number = place_of(number);
    if (soft_runs_together())
        return soft_share(number, self, not_before_ns, unit);
    uint64_t length_ns = unit.length_ns;
    struct soft_device *device = &state->devices[number];
    uint64_t now = soft_now_ns();
    uint64_t until = atomic_load(&device->busy_until_ns), end;
    if (until > now + REAP_PERIOD_NS && now - last_reap_ns > REAP_PERIOD_NS) {
        last_reap_ns = now;
        soft_reap();
        until = atomic_load(&device->busy_until_ns);
    }
    if (others_interleave(device, number, now))
        length_ns = length_ns * SOFT_SLICED_PERMILLE / 1000;
    do {
        uint64_t begin = until > now ? until : now;
        begin = begin > not_before_ns ? begin : not_before_ns;
        end = begin + length_ns;
    } while (!atomic_compare_exchange_weak(&device->busy_until_ns, &until, end));
    atomic_store(&device->last_process, (uint64_t)(self - state->processes) + 1);
    atomic_store(&self->tail_ns[number], end);
    atomic_fetch_add(&device->busy_ns, length_ns);
    return end;
}

void soft_note_engine(int number, int direction, uint64_t end_ns)
{
    atomic_store(&self->engine_tail_ns[number][direction], end_ns);
    uint64_t now = soft_now_ns();
    if (end_ns > now + REAP_PERIOD_NS && now - last_reap_ns > REAP_PERIOD_NS) {
        last_reap_ns = now;
        soft_reap();
    }
}

uint64_t soft_used_memory(int number)
{
    uint64_t used = 0;
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES; i++)
        used += atomic_load(&state->processes[i].bytes[number]);
    return used;
}

static uint64_t soft_own_memory(int number)
{
    return self ? atomic_load(&self->bytes[number]) : 0;
}

/* Returns how much memory this process may still allocate under the limit of the MPS server. */
uint64_t soft_mps_left(int number)
{
    uint64_t own = soft_own_memory(place_of(number)), limit = soft_mps_limit();
    return own < limit ? limit - own : 0;
}

/* Charges memory to this process if the device has enough and no limit is exceeded (of a control group or of MPS). The
 * bytes are added to the process's entry first and checked then, so two processes cannot both take the last free
 * memory. */
bool soft_take_memory(int number, uint64_t bytes)
{
    soft_pass();
    number = place_of(number);
    if (bytes > state->memory_bytes)
        return false;
    for (int tries = 0; tries < 2; tries++) {
        atomic_fetch_add(&self->bytes[number], bytes);
        bool allowed = soft_within_limits(number) && soft_own_memory(number) <= soft_mps_limit();
        if (allowed && soft_used_memory(number) <= state->memory_bytes)
            return true;
        atomic_fetch_sub(&self->bytes[number], bytes);
        soft_reap();
    }
    return false;
}

void soft_give_memory(int number, uint64_t bytes)
{
    soft_pass();
    atomic_fetch_sub(&self->bytes[place_of(number)], bytes);
}

static __attribute__((destructor)) void leave(void)
{
    if (!self || self_pid != getpid())
        return;
    for (uint32_t d = 0; d < SOFT_MAX_DEVICES; d++)
        atomic_store(&self->bytes[d], 0), atomic_store(&self->place[d], 0);
    for (uint32_t d = 0; d < state->device_count; d++)
        for (int i = 0; i < SOFT_MAX_GROUPS; i++)
            if (atomic_load(&state->devices[d].group_owner[i]) == soft_identity())
                soft_group_gone((int)d, i);
    atomic_store(&self->managed, 0);
    atomic_store(&self->owner, 0);
}
