/* Memory limits by control group, as driver release 615 and the kernel's dmem controller have them. The behaviour
 * was taken from the manual and from the driver's published source; it was not compared with a real GPU. The groups
 * are folders below COTENANT_SOFTGPU_CGROUPS, which cotenant.softgpu.cgroups creates and changes in the kernel's
 * place. If that variable is not set, the driver behaves as release 580, which has no such limits.
 *
 * If the root group has a file dmem.capacity, the kernel enforces limits. The limit of a group is in its file dmem.max,
 * which exists only if the parent group delegates dmem. It limits the group and all groups below it together.
 *
 * Otherwise the driver itself enforces limits. The limits of a group are in its file driver.limits (each line has
 * memory region, soft limit, hard limit, uncounted bytes). Only one group's limit applies to a process: that of its own
 * group or, if that has none, of the nearest group above that has one. The driver counts the memory of all processes in
 * that group and below it, except memory that was allocated there before the group's first limit was set. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "limits.h"

#define DRIVER_FILE "driver.limits"
#define MOST_ANCESTORS 64

struct path {
    char text[PATH_MAX];
};

static const char *root(void)
{
    const char *folder = getenv("COTENANT_SOFTGPU_CGROUPS");
    return folder && *folder ? folder : NULL;
}

/* Locks the tree of control groups against changes by other processes and threads (LOCK_EX, to change it oneself; or
 * LOCK_SH, to read several files). cotenant.softgpu.cgroups takes the same lock. If the process is killed, the kernel
 * releases it. */
static int lock_tree(int kind)
{
    int folder = open(root(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (folder >= 0 && flock(folder, kind) != 0 && errno == EINTR)
        ;
    return folder;
}

static void unlock_tree(int folder)
{
    if (folder < 0)
        return;
    flock(folder, LOCK_UN); /* the child of a fork may have inherited the descriptor, so that closing does not unlock */
    close(folder);
}

static struct path joined(const char *folder, const char *name)
{
    struct path path;
    if (snprintf(path.text, sizeof path.text, "%s/%s", folder, name) >= (int)sizeof path.text)
        path.text[0] = '\0';
    return path;
}

static bool exists(const char *folder, const char *name)
{
    return access(joined(folder, name).text, F_OK) == 0;
}

static bool within(const char *folder, const char *group)
{
    size_t length = strlen(folder);
    return strncmp(group, folder, length) == 0 && (group[length] == '/' || group[length] == '\0');
}

static bool is_root(const char *group)
{
    return strlen(group) <= strlen(root());
}

static void go_up(struct path *group)
{
    *strrchr(group->text, '/') = '\0';
}

static void region_of(int device, char text[SOFT_REGION_BYTES])
{
    char bus[SOFT_BUS_BYTES];
    soft_bus_id(device, bus);
    snprintf(text, SOFT_REGION_BYTES, "nvidia/%s/vidmem", bus);
}

/* ---- the files of a group, which have one line for each memory region ---- */

static bool values_of(const char *group, const char *name, int device, uint64_t values[3])
{
    char line[256], wanted[SOFT_REGION_BYTES], region[128], text[3][32];
    region_of(device, wanted);
    FILE *file = fopen(joined(group, name).text, "re");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        int count = sscanf(line, "%127s %31s %31s %31s", region, text[0], text[1], text[2]) - 1;
        found = count >= 1 && strcmp(region, wanted) == 0;
        for (int i = 0; found && i < count; i++)
            values[i] = strcmp(text[i], "max") == 0 ? SOFT_NO_LIMIT : strtoull(text[i], NULL, 10);
    }
    if (file)
        fclose(file);
    return found;
}

/* Replaces the line of a memory region in a file of a control group. If there are no values, removes the line. */
static bool set_values(const char *group, const char *name, int device, const uint64_t *values, int count)
{
    char line[256], wanted[SOFT_REGION_BYTES], region[128];
    struct path path = joined(group, name), fresh = joined(group, ".new");
    region_of(device, wanted);
    FILE *before = fopen(path.text, "re"), *after = fopen(fresh.text, "we");
    while (before && after && fgets(line, sizeof line, before))
        if (sscanf(line, "%127s", region) == 1 && strcmp(region, wanted) != 0)
            fputs(line, after);
    if (after && count)
        fputs(wanted, after);
    for (int i = 0; after && i < count; i++)
        if (values[i] == SOFT_NO_LIMIT)
            fputs(" max", after);
        else
            fprintf(after, " %llu", (unsigned long long)values[i]);
    if (after && count)
        fputc('\n', after);
    if (before)
        fclose(before);
    return after && fclose(after) == 0 && rename(fresh.text, path.text) == 0;
}

/* ---- the group of a process ---- */

static pid_t parent_of(pid_t pid)
{
    char name[64], line[1024];
    snprintf(name, sizeof name, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(name, "re");
    char *end = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    int parent = 0;
    if (end)
        sscanf(end + 1, " %*c %d", &parent);
    if (file)
        fclose(file);
    return parent;
}

static bool find(const char *group, pid_t pid, struct path *out)
{
    FILE *file = fopen(joined(group, "cgroup.procs").text, "re");
    int listed;
    bool found = false;
    while (file && !found && fscanf(file, "%d", &listed) == 1)
        found = listed == pid;
    if (file)
        fclose(file);
    if (found)
        snprintf(out->text, sizeof out->text, "%s", group);
    DIR *folder = found ? NULL : opendir(group);
    for (struct dirent *entry; folder && !found && (entry = readdir(folder));)
        if (entry->d_type == DT_DIR && entry->d_name[0] != '.')
            found = find(joined(group, entry->d_name).text, pid, out);
    if (folder)
        closedir(folder);
    return found;
}

/* Returns the group of a process. A process that no group lists is in the group of its nearest listed ancestor,
 * since on Linux child processes inherit the group. */
static struct path group_of(pid_t pid)
{
    struct path group;
    for (int i = 0; i < MOST_ANCESTORS && pid > 1; i++, pid = parent_of(pid))
        if (find(root(), pid, &group))
            return group;
    snprintf(group.text, sizeof group.text, "%s", root());
    return group;
}

static uint64_t charged(const char *group, int device)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < SOFT_MAX_PROCESSES; i++) {
        uint64_t owner = soft_process_at(i);
        uint64_t bytes = owner ? atomic_load(&soft_state()->processes[i].bytes[device]) : 0;
        if (bytes && within(group, group_of((pid_t)(owner >> 32)).text))
            sum += bytes;
    }
    return sum;
}

static uint64_t counted(const char *group, int device, uint64_t uncounted)
{
    uint64_t all = charged(group, device);
    return all > uncounted ? all - uncounted : 0;
}

/* ---- limits of an allocation ---- */

static bool within_limits(int device)
{
    uint64_t values[3];
    struct path group = group_of(getpid());
    bool dmem = exists(root(), "dmem.capacity");
    for (; !is_root(group.text); go_up(&group)) {
        if (dmem && values_of(group.text, "dmem.max", device, values) && charged(group.text, device) > values[0])
            return false;
        if (!dmem && values_of(group.text, DRIVER_FILE, device, values))
            return counted(group.text, device, values[2]) <= values[1];
    }
    return true;
}

bool soft_within_limits(int device)
{
    if (!root())
        return true;
    int lock = lock_tree(LOCK_SH);
    bool within = within_limits(device);
    unlock_tree(lock);
    return within;
}

/* Limits the memory that a process sees. The process sees the limit of its own control group as the size of the GPU's
 * memory; limits of the groups above that group are not visible to it. */
void soft_limit_view(int device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    uint64_t limit[3], used = 0;
    if (!root())
        return;
    int lock = lock_tree(LOCK_SH);
    struct path group = group_of(getpid());
    bool limited = !is_root(group.text) && values_of(group.text, "dmem.max", device, limit) && limit[0] < *total_bytes;
    if (limited)
        used = charged(group.text, device);
    unlock_tree(lock);
    if (!limited)
        return;
    uint64_t left = used < limit[0] ? limit[0] - used : 0;
    *total_bytes = limit[0];
    *free_bytes = left < *free_bytes ? left : *free_bytes;
}

/* ---- the two NVML calls for memory limits ---- */

bool soft_mig(void)
{
    const char *text = getenv("COTENANT_SOFTGPU_MIG");
    return text && strcmp(text, "1") == 0;
}

static int checked(const char *group)
{
    if (!root())
        return SOFT_NVML_FUNCTION_NOT_FOUND;
    /* the driver supports no limits if MIG is on, or if the system has control groups of version 1 */
    if (soft_mig() || !exists(root(), "cgroup.controllers"))
        return SOFT_NVML_NOT_SUPPORTED;
    if (!group || !within(root(), group) || !exists(group, "cgroup.procs"))
        return SOFT_NVML_INVALID_ARGUMENT;
    return is_root(group) ? SOFT_NVML_NOT_SUPPORTED : 0;
}

/* Adds the change of a group's dmem.min to the dmem.min of every ancestor, up to the first that has none, as the
 * driver does. */
static void raise_ancestors(struct path group, int device, uint64_t before, uint64_t after)
{
    uint64_t sum[3];
    for (go_up(&group); !is_root(group.text) && values_of(group.text, "dmem.min", device, sum); go_up(&group)) {
        sum[0] += after - before;
        set_values(group.text, "dmem.min", device, sum, 1);
    }
}

static int set_memory_limits(int device, const char *name, uint64_t soft, uint64_t hard)
{
    uint64_t old[3] = {0, 0, 0};
    struct stat top;
    int error = checked(name);
    if (error)
        return error;
    /* on a real machine only the user root may set limits; here it is the user who owns the folder of the groups */
    if (syscall(SYS_stat, root(), &top) != 0 || top.st_uid != geteuid())
        return SOFT_NVML_NO_PERMISSION;
    if (soft > hard)
        return SOFT_NVML_INVALID_ARGUMENT;
    struct path group;
    snprintf(group.text, sizeof group.text, "%s", name);
    if (exists(root(), "dmem.capacity")) {
        if (!exists(name, "dmem.max"))
            return SOFT_NVML_NOT_FOUND;
        values_of(name, "dmem.min", device, old);
        bool done = set_values(name, "dmem.max", device, &hard, 1) && set_values(name, "dmem.min", device, &soft, 1);
        raise_ancestors(group, device, old[0], soft);
        return done ? 0 : SOFT_NVML_UNKNOWN;
    }
    bool known = values_of(name, DRIVER_FILE, device, old);
    if (soft == 0 && hard == SOFT_NO_LIMIT)
        return set_values(name, DRIVER_FILE, device, NULL, 0) ? 0 : SOFT_NVML_UNKNOWN;
    uint64_t fresh[3] = {soft, hard, known ? old[2] : charged(name, device)};
    if (counted(name, device, fresh[2]) > hard)
        return SOFT_NVML_INVALID_ARGUMENT;
    return set_values(name, DRIVER_FILE, device, fresh, 3) ? 0 : SOFT_NVML_UNKNOWN;
}

int soft_set_memory_limits(int device, const char *name, uint64_t soft, uint64_t hard)
{
    int lock = root() ? lock_tree(LOCK_EX) : -1;
    int error = set_memory_limits(device, name, soft, hard);
    unlock_tree(lock);
    return error;
}

static int get_memory_limits(int device, const char *name, uint64_t *soft, uint64_t *hard, uint64_t *used)
{
    uint64_t values[3] = {0, 0, 0};
    int error = checked(name);
    if (error)
        return error;
    bool dmem = exists(root(), "dmem.capacity");
    struct path group;
    for (snprintf(group.text, sizeof group.text, "%s", name); !is_root(group.text); go_up(&group)) {
        if (!values_of(group.text, dmem ? "dmem.max" : DRIVER_FILE, device, values))
            continue;
        *hard = dmem ? values[0] : values[1];
        *soft = values[0];
        if (dmem && values_of(group.text, "dmem.min", device, values))
            *soft = values[0];
        *used = counted(group.text, device, dmem ? 0 : values[2]);
        if (dmem)
            set_values(group.text, "dmem.current", device, used, 1);
        return 0;
    }
    return SOFT_NVML_NOT_SUPPORTED;
}

int soft_get_memory_limits(int device, const char *name, uint64_t *soft, uint64_t *hard, uint64_t *used)
{
    int lock = root() ? lock_tree(LOCK_EX) : -1; /* it writes dmem.current */
    int error = get_memory_limits(device, name, soft, hard, used);
    unlock_tree(lock);
    return error;
}
