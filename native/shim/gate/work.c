/* Looks up each launched kernel's work class and SMs, which the rule of the scheme orion needs. They are in the
 * tenant's kernel profile (`--kernel-profile`), which the agent sends as the kernel table. Only processes under that
 * scheme do this. Each combination of kernel, grid and block is looked up once. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi/floor.h"
#include "shim.h"

#define SEEN 1024 /* number of entries of the cache: a power of two, since hashes are reduced to indices by a mask */

struct seen {
    struct kernel_shape shape; /* a kernel that was looked up; the entry is empty if shape.function is NULL */
    struct work work;
};

struct table {
    uint32_t count;
    const struct cotenant_kernel *entries; /* the rows of the tenant's kernel table, ordered by key */
};

bool cot_kernels_known;
__thread const struct kernel_shape *cot_launching __attribute__((tls_model("initial-exec")));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct table table;
static struct seen seen[SEEN];

/* Receives the table of this tenant's kernels. Every agent sends the same table, so only the first one is kept. */
void cot_work_table(int fd, uint32_t count)
{
    size_t bytes = count * sizeof(struct cotenant_kernel);
    pthread_mutex_lock(&lock);
    if (!table.entries && count > 0 && lseek(fd, 0, SEEK_END) >= (off_t)bytes) {
        const void *entries = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (entries != MAP_FAILED) {
            table = (struct table){.count = count, .entries = entries};
            __atomic_store_n(&cot_kernels_known, true, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&lock);
}

static const struct cotenant_kernel *find(uint64_t key)
{
    uint32_t low = 0, high = table.count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (table.entries[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low < table.count && table.entries[low].key == key ? &table.entries[low] : NULL;
}

/* Looks a kernel up by its name and shape, and then by its name alone. A kernel that the profile does not contain
 * has an unknown class, as in the Orion paper. */
static struct work look_up(const struct kernel_shape *shape)
{
    struct work work = {.work_class = COTENANT_WORK_UNKNOWN};
    const char *name = cot_kernel_name(shape->function);
    if (!name)
        return work;
    uint64_t by_name = cot_hash(HASH_BASIS, name, strnlen(name, COTENANT_KERNEL_NAME));
    uint64_t by_shape = cot_hash(cot_hash(by_name, shape->grid, sizeof shape->grid), shape->block, sizeof shape->block);
    const struct cotenant_kernel *found = find(by_shape);
    if (!found)
        found = find(by_name);
    if (found)
        work = (struct work){.work_class = found->work_class, .sms = found->sms, .duration_ns = found->duration_ns};
    return work;
}

/* Returns the work class and SMs of the work that this thread launches now. If the launch is not a kernel, or if
 * there is no kernel table, these are the values that the tenant stated. */
struct work cot_work_now(struct work stated)
{
    const struct kernel_shape *launching = cot_launching;
    if (!launching || !launching->function)
        return stated;
    struct kernel_shape shape = *launching;
    shape.shared_bytes = 0;
    struct seen *at = &seen[cot_hash(HASH_BASIS, &shape, sizeof shape) & (SEEN - 1)];
    pthread_mutex_lock(&lock);
    if (memcmp(&at->shape, &shape, sizeof shape) != 0)
        *at = (struct seen){.shape = shape, .work = look_up(&shape)};
    struct work work = at->work;
    pthread_mutex_unlock(&lock);
    return work;
}

/* Called in the child of a fork: another thread of the parent may have held the lock, so it is initialized again. */
void cot_work_after_fork(void)
{
    pthread_mutex_init(&lock, NULL);
}
